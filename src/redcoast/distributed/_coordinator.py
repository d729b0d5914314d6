"""Runs JAX's coordination service in a separate process.

If it ran inside process 0 and that process died, JAX would abort all other processes before they
could report which process was lost. The separate process outlives process 0 by `LINGER` seconds.
"""

import contextlib
import ctypes
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from types import TracebackType
from typing import Any

import jax

from ._private_jax import SERVICE_PROGRAM, forget_connections, key_value_store
from ._rendezvous import split_address

# Seconds that the service outlives process 0: the others need 30 s to notice that it has died and
# to end, and more on a busy machine.
LINGER = 60
LOST = 70  # the exit code if another process is lost: EX_SOFTWARE of sysexits.h
INTERVAL = 1.0  # seconds between questions to the coordinator
UNREACHABLE = 25.0  # seconds without an answer until this process ends


def skip_barrier_on_error() -> None:
    """Makes an uncaught exception end this process without waiting for the others.

    At exit, JAX waits for all processes at a barrier, while the others wait for this one in a
    collective. Skipping the barrier lets them detect the failure.
    """
    before = sys.excepthook

    def leave(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        before(kind, error, trace)
        # An interactive session also prints errors by this hook, and continues.
        if not hasattr(sys, "ps1"):
            forget_connections()

    sys.excepthook = leave


class Service:
    """The handle of the service in process 0."""

    def __init__(self, address: str, count: int, **options: object):
        # Lost processes are detected by heartbeats between the processes, not by JAX.
        arguments = json.dumps([address, count, LINGER, {**options, "recoverable": True}])
        self._process = subprocess.Popen(
            [sys.executable, "-c", SERVICE_PROGRAM, arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # signals of the terminal do not reach it
            env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2"},  # errors only
        )
        assert self._process.stdout is not None
        if self._process.stdout.readline() != "ready\n":
            raise OSError(f"JAX's coordination service could not be started at {address}.")

    def shutdown(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.write("end\n")
            self._process.stdin.close()


class CoordinatorWatch:
    """Ends this process with a sentence if the coordinator can no longer be reached.

    Otherwise JAX would abort it, and offers no callback for Python (an `absl::Status` has no Python
    type). So JAX's own limit is set to a longer time.
    """

    def __init__(self, address: str):
        self._address = address
        self._ended = threading.Event()
        self._answers = itertools.count()
        self._answered = 0  # the number of the last answer
        self._on_abort = ctypes.CFUNCTYPE(None, ctypes.c_int)(self._explain_abort)

    def start(self) -> None:
        for target in (self._ask, self._count):
            threading.Thread(target=target, name="redcoast-coordinator", daemon=True).start()
        _handle_aborts(self._on_abort)

    def stop(self) -> None:
        self._ended.set()
        _handle_aborts(None)

    def _ask(self) -> None:
        while not self._ended.wait(INTERVAL) and (client := key_value_store()) is not None:
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                client.key_value_dir_get("redcoast/nothing")
                self._answered = next(self._answers)

    def _count(self) -> None:
        # Intervals are counted, because this process may have been stopped for a while.
        last, silent = None, 0.0
        while not self._ended.wait(INTERVAL):
            silent += INTERVAL
            if self._answered != last:
                last, silent = self._answered, 0.0
            if silent >= UNREACHABLE:
                self._leave(f"has not answered for {silent:.0f} s")

    def _explain_abort(self, number: int) -> None:
        """Called while JAX aborts this process, as it does at once if the connection is closed."""
        try:
            socket.create_connection(split_address(self._address), INTERVAL).close()
        except OSError as error:
            self._leave(f"can no longer be reached ({error})")

    def _leave(self, why: str) -> None:
        if not self._ended.is_set():
            print(
                f"redcoast: The coordinator of this job at {self._address}, on the machine of "
                f"process 0, {why}. This process exits.",
                file=sys.stderr,
                flush=True,
            )
            os._exit(LOST)


def _handle_aborts(handler: Any) -> None:
    """Sets the C function that is called when this process aborts; `None` for the default."""
    # A handler of Python's `signal` module would only run after the abort.
    if os.name == "posix":
        ctypes.CDLL(None).signal(int(signal.SIGABRT), handler or ctypes.c_void_p(signal.SIG_DFL))


_left_alone = False  # whether the last run ended because a process failed


def forget_others(is_failure: bool) -> None:
    """Records whether the last run failed: at exit, the other processes are then not waited for."""
    global _left_alone
    _left_alone = is_failure


def wait_for_all(watch: CoordinatorWatch) -> None:
    """Waits at exit until all processes are done, since they need each other to communicate."""
    client = key_value_store()
    if _left_alone:
        # The other processes wait in a collective, or have ended.
        forget_connections()
    elif client is not None:
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # another process may have died
            client.wait_at_barrier("redcoast/end", 300_000)
    watch.stop()
