"""Runs programs that a model wrote, apart from this process and with limits.

A program has a process of its own: without the user's environment, in an empty folder, for a few
seconds, with little memory, and without files to write, sockets and other processes. This stops
accidents. It is no protection from a program that is written to break out: for models that may
write one, run the whole experiment in a container without a network.
"""

import json
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Sequence

# Runs in the new process. What the program prints is not read; the word of the parent is needed to
# report the number of tests that passed, so that a program cannot end early with a number.
PROGRAM = """
import io, json, os, resource, sys
task = json.load(sys.stdin)
word, report = task.pop("word"), sys.stdout.write
for kind, limit in task["limits"].items():
    resource.setrlimit(getattr(resource, kind), (limit, limit))
sys.stdout = sys.stderr = io.StringIO()

READS = {"os.listdir", "os.scandir", "os.walk", "os.fwalk", "os.getxattr", "os.listxattr"}
WRITE = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND

def refuse(event, arguments):
    names = ("os.", "socket.", "subprocess.", "ctypes.", "signal.", "shutil.", "tempfile.")
    if event == "open":
        _, mode, flags = arguments
        writes = set(str(mode or "")) & set("wax+") or flags & WRITE
    else:
        writes = False
    if writes or event.startswith(names) and event not in READS:
        raise PermissionError(event)

sys.addaudithook(refuse)
namespace, passed = {"__name__": "program"}, 0
try:
    exec(task["program"], namespace)
    for test in task["tests"]:
        try:
            passed += eval(test, dict(namespace)) is True
        except Exception:
            pass
except BaseException:
    passed = 0
report(f"{word} {passed}")
"""
LIMITS = {"RLIMIT_FSIZE": 0, "RLIMIT_NOFILE": 16, "RLIMIT_CORE": 0}


def passed_tests(
    program: str, tests: Sequence[str], *, seconds: int = 2, megabytes: int = 512
) -> int:
    """Runs a program and returns how many of the tests, which are expressions, are then `True`."""
    word = secrets.token_hex(16)
    limits = LIMITS | {"RLIMIT_CPU": seconds, "RLIMIT_AS": megabytes * 2**20}
    task = {"program": program, "tests": [*tests], "word": word, "limits": limits}
    command = [sys.executable, "-I", "-S", "-c", PROGRAM]
    with tempfile.TemporaryDirectory() as folder:
        try:
            process = subprocess.run(
                command,
                input=json.dumps(task),
                capture_output=True,
                text=True,
                errors="replace",
                cwd=folder,
                env={},
                timeout=5 * seconds,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return 0
    reported_word, _, passed = process.stdout.rpartition(" ")
    if reported_word != word or not passed.isdecimal() or int(passed) > len(tests):
        return 0
    return int(passed)
