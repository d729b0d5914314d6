"""Runs JAX's coordination service in a separate process.

If it ran inside process 0 and that process died, JAX would abort all other processes before they
could report which process was lost. The separate process outlives process 0 by `LINGER` seconds.
"""

import contextlib
import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import jax
from jax._src import distributed
from jax._src.lib import _jax  # pyright: ignore[reportPrivateImportUsage]


def skip_barrier_on_error() -> None:
    """Makes an uncaught exception end this process without waiting for the others.

    At exit, JAX waits for all processes at a barrier, while the others wait for this one in a
    collective. Skipping the barrier lets them detect the failure.
    """
    before = sys.excepthook

    def leave(*error: Any) -> None:
        before(*error)
        state = distributed.global_state
        for connection in (state.client, state.service):
            # The destructor waits at the barrier, so the object must never be freed.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(connection))
        state.client = state.service = None

    sys.excepthook = leave


LINGER = 30  # seconds that the service outlives process 0
_PROGRAM = """
import json, os, signal, sys, time

# Schedulers send these to all processes of a job, which still need the service afterwards.
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
    signal.signal(number, signal.SIG_IGN)
from jax._src.lib import _jax

address, count, linger, options = json.loads(sys.argv[1])
service = _jax.get_distributed_runtime_service(address, count, **options)
print("ready", flush=True)
# The others may still be disconnecting, or have yet to detect that process 0 is gone.
time.sleep(5 if sys.stdin.readline() else linger)
service.shutdown()
os._exit(0)
"""


class _Service:
    """The handle of the service in process 0."""

    def __init__(self, address: str, count: int, **options: Any):
        # Lost processes are detected by heartbeats between the processes, not by JAX.
        asked = json.dumps([address, count, LINGER, {**options, "recoverable": True}])
        command = [sys.executable, "-c", _PROGRAM, asked]
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
    client = distributed.global_state.client
    if client is not None:
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # another process may have died
            client.wait_at_barrier("redcoast/end", 300_000)


@contextlib.contextmanager
def service_in_subprocess() -> Iterator[None]:
    """Makes `jax.distributed.initialize` start its service in a separate process."""
    before = _jax.get_distributed_runtime_service
    _jax.get_distributed_runtime_service = _Service
    try:
        yield
    finally:
        _jax.get_distributed_runtime_service = before
