"""Runs JAX's coordination service in a separate process.

If it ran inside process 0 and that process died, JAX would abort all other processes before they
could report which process was lost. The separate process outlives process 0 by `LINGER` seconds.
"""

import contextlib
import json
import os
import subprocess
import sys
from typing import Any

import jax

from ._private_jax import SERVICE_PROGRAM, forget_connections, key_value_store

LINGER = 30  # seconds that the service outlives process 0


def skip_barrier_on_error() -> None:
    """Makes an uncaught exception end this process without waiting for the others.

    At exit, JAX waits for all processes at a barrier, while the others wait for this one in a
    collective. Skipping the barrier lets them detect the failure.
    """
    before = sys.excepthook

    def leave(*error: Any) -> None:
        before(*error)
        forget_connections()

    sys.excepthook = leave


class Service:
    """The handle of the service in process 0."""

    def __init__(self, address: str, count: int, **options: Any):
        # Lost processes are detected by heartbeats between the processes, not by JAX.
        asked = json.dumps([address, count, LINGER, {**options, "recoverable": True}])
        command = [sys.executable, "-c", SERVICE_PROGRAM, asked]
        pipe, quiet = subprocess.PIPE, {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2"}
        self._process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, text=True, start_new_session=True, env=quiet
        )
        assert self._process.stdout is not None
        if self._process.stdout.readline() != "ready\n":
            raise OSError(f"JAX's coordination service could not be started at {address}.")

    def shutdown(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.write("end\n")
            self._process.stdin.close()


def wait_for_all() -> None:
    """Waits at exit until all processes are done, since they need each other to communicate."""
    client = key_value_store()
    if client is not None:
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # another process may have died
            client.wait_at_barrier("redcoast/end", 300_000)
