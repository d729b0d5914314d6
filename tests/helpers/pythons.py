"""The Pythons of this machine that redcoast can be tested on; prints them, the oldest first."""

import os
import shutil
import subprocess
from pathlib import Path

OLDEST, NEWEST = 11, 19  # the minor versions of Python 3 that are looked for


def pythons() -> dict[int, str]:
    """Returns an interpreter for each minor version of Python 3, on the path or of pyenv."""
    actual = {}
    for minor in range(OLDEST, NEWEST + 1):
        for candidate in _candidates(minor):
            if minor not in actual and _starts(candidate, minor):
                actual[minor] = candidate
    return actual


def _candidates(minor: int) -> list[str]:
    name = f"python3.{minor}"
    on_path = shutil.which(name)
    # Without a chosen version, what pyenv puts on the path does not start.
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    of_pyenv = sorted(root.glob(f"versions/3.{minor}.*/bin/{name}"))
    return [*([on_path] if on_path else []), *map(str, reversed(of_pyenv))]


def _starts(program: str, minor: int) -> bool:
    check = f"import sys, venv, ensurepip; sys.exit(sys.version_info[:2] != (3, {minor}))"
    return subprocess.run([program, "-c", check], capture_output=True).returncode == 0


if __name__ == "__main__":
    for interpreter in pythons().values():
        print(interpreter)
