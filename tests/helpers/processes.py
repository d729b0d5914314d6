"""Real processes of one job on this machine, joined over loopback by `rc.initialize()`."""

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
# Seconds after which something hangs: what ends is not waited for any longer, so that a machine
# may be busy.
PATIENCE = 900
# What this process of tests has, and a user's process has not.
OURS = ("XLA_FLAGS", "NPROC", "PYTEST_CURRENT_TEST")


class Finished(NamedTuple):
    returncode: int  # minus the signal's number for one that a signal ended
    output: str  # what it printed, errors among it


@dataclass(frozen=True)
class Process:
    """One of the processes, while it runs."""

    popen: subprocess.Popen
    file: Path

    @property
    def output(self) -> str:
        """What it has printed as yet."""
        return self.file.read_text("utf-8", errors="replace")

    def wait(self, timeout: float = PATIENCE) -> Finished:
        try:
            code = self.popen.wait(timeout)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"Still running after {timeout} s:\n{self.output}") from None
        return Finished(code, self.output)

    def wait_for(self, text: str, timeout: float = PATIENCE) -> None:
        """Until it has printed `text`."""
        end = time.monotonic() + timeout
        while text not in self.output:
            assert self.popen.poll() is None, f"Ended without {text!r}:\n{self.output}"
            assert time.monotonic() < end, f"No {text!r} in {timeout} s:\n{self.output}"
            time.sleep(0.01)

    def kill(self, number: int = signal.SIGKILL) -> None:
        self.popen.send_signal(number)


def run_processes(
    script: str | Path,
    *arguments: object,
    processes: int,
    devices: int = 1,
    timeout: float = PATIENCE,
    env: Mapping[str, str] | None = None,
) -> list[Finished]:
    """Runs a script to its end in several processes at once, and gives how each ended.

    `script` is a program's text, which can import what is in `tests`, or the path of a file. It
    calls `rc.initialize()`. Raises TimeoutError, with all that was printed, if one goes on longer.
    """
    end = time.monotonic() + timeout
    with start_processes(
        script, *arguments, processes=processes, devices=devices, env=env
    ) as running:
        try:
            return [p.wait(max(0, end - time.monotonic())) for p in running]
        except TimeoutError:
            printed = "\n".join(f"-- process {i}:\n{p.output}" for i, p in enumerate(running))
            raise TimeoutError(f"Not all ended within {timeout} s.\n{printed}") from None


@contextlib.contextmanager
def start_processes(
    script: str | Path,
    *arguments: object,
    processes: int,
    devices: int = 1,
    env: Mapping[str, str] | None = None,
) -> Iterator[list[Process]]:
    """As `run_processes`, but gives them while they run, to watch or kill; kills those left."""
    job = {
        "REDCOAST_COORDINATOR": f"127.0.0.1:{free_port()}",
        "REDCOAST_PROCESSES": str(processes),
        "REDCOAST_LOCAL_DEVICES": str(devices),
    }
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        running = []
        for i in range(processes):
            own = {"REDCOAST_PROCESS_ID": str(i)} | dict(env or {})
            running.append(_start(script, arguments, job | own, Path(name) / f"{i}.txt"))
            stack.callback(running[-1].popen.wait)
            stack.callback(running[-1].popen.kill)
        yield running


def _start(
    script: str | Path, arguments: tuple[object, ...], env: Mapping[str, str], file: Path
) -> Process:
    program = [str(script)] if isinstance(script, Path) else ["-c", script]
    outside = {key: value for key, value in os.environ.items() if key not in OURS}
    outside["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "").partition(" ")[2]  # quick to compile
    with file.open("wb") as output:
        popen = subprocess.Popen(
            [sys.executable, *program, *map(str, arguments)],
            cwd=HERE,
            env=outside | {"PYTHONUNBUFFERED": "1"} | dict(env),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    return Process(popen, file)


def free_port() -> int:
    """A port that nobody listens on, below those that the system gives to outgoing connections."""
    while True:
        port = random.randrange(12000, 32000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
