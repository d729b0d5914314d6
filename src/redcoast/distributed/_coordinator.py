"""JAX's coordination service, in a process of its own.

Where it runs in process 0, its end is the end of all: JAX aborts the others before they could learn
who it was. Here it outlives process 0 for long enough.
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


def leave_on_error() -> None:
    """Lets an uncaught exception end this process although the others have not ended.

    At exit, JAX waits for all processes to end as well, while they wait for this one in a
    collective. Without its farewell they notice that it is gone.
    """
    before = sys.excepthook

    def leave(*error: Any) -> None:
        before(*error)
        state = distributed.global_state
        for connection in (state.client, state.service):
            # What is never freed does not wait in its destructor either.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(connection))
        state.client = state.service = None

    sys.excepthook = leave


LINGER = 30  # seconds that it outlives process 0
_PROGRAM = """
import json, os, signal, sys, time

# Schedulers send them to all processes of a job, and the others have to hear of what follows.
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
    signal.signal(number, signal.SIG_IGN)
from jax._src.lib import _jax

address, count, linger, options = json.loads(sys.argv[1])
service = _jax.get_distributed_runtime_service(address, count, **options)
print("ready", flush=True)
# The others may still be taking their leave; or have to find out that process 0 is gone.
time.sleep(5 if sys.stdin.readline() else linger)
service.shutdown()
os._exit(0)
"""


class _Service:
    """What stands for the service in process 0."""

    def __init__(self, address: str, count: int, **options: Any):
        # The others need not hear from JAX that one is gone, for they watch each other.
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
    """At exit: whoever leaves first would take the others' means to talk away."""
    client = distributed.global_state.client
    if client is not None:
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # one may have died
            client.wait_at_barrier("redcoast/end", 300_000)


@contextlib.contextmanager
def service_apart() -> Iterator[None]:
    """Has `jax.distributed.initialize` start its service in a process of its own."""
    before = _jax.get_distributed_runtime_service
    _jax.get_distributed_runtime_service = _Service
    try:
        yield
    finally:
        _jax.get_distributed_runtime_service = before
