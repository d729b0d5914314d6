"""Stopping early: on a signal, after a time, or when a machine is preempted."""

import contextlib
import contextvars
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ..core._errors import check_number

logger = logging.getLogger("redcoast")

# The exit code of a script whose run was stopped and is to be run again: EX_TEMPFAIL, sysexits.h.
STOPPED = 75
# `timeout`, `uv run` and some schedulers send each signal twice.
TWICE = 0.1


# What an enclosing `stop_on_signal` returns, so that a loop inside it stops too.
_enclosing: contextvars.ContextVar[Callable[[], bool] | None] = contextvars.ContextVar(
    "enclosing", default=None
)


@contextlib.contextmanager
def stop_on_signal(
    max_seconds: int | float | None = None, *, mesh: Mesh | None = None
) -> Iterator[Callable[[], bool]]:
    """Stops a loop after the current step when a signal arrives, in all processes at once.

    The loop stops after SIGTERM, SIGINT, SIGUSR1, SIGHUP, a preemption notice that JAX receives, or
    `max_seconds`. A second signal ends the process at once. [`redcoast.fit`][] uses this function
    itself; call `fit` inside of `stop_on_signal(max_seconds)` to limit its time.

    **Arguments:**

    - `max_seconds`: the time in seconds, from the call, after which to stop; without it, only
        signals stop the loop. At least one step is taken.
    - `mesh`: the mesh of the run. With several processes, the returned function needs it.

    **Returns:**

    A context manager that returns a function. Call the function once after each step is
    dispatched. It returns whether to stop, with the same result in all processes.

    **Raises:**

    `ValueError` or `TypeError` if `max_seconds` is not a positive number. The function raises
    `ValueError` if there are several processes and no mesh.

    !!! Example

        ```python
        with rc.stop_on_signal(max_seconds=3600) as stopping:
            for batch in data:
                state, metrics = step(state, batch.arrays)
                if stopping():
                    break
        ```
    """
    if max_seconds is not None:
        check_number("max_seconds", max_seconds, above=0)
    with stop_signals(max_seconds) as asked:
        if jax.process_count() == 1:
            yield asked
        else:
            yield _refuse if mesh is None else _agreed(mesh, asked)


def _refuse() -> bool:
    raise ValueError("Several processes stop at the same step over a mesh: pass `mesh`.")


def _agreed(mesh: Mesh, asked: Callable[[], bool]) -> Callable[[], bool]:
    """A function that returns whether any process is asked to stop, in all at the same step.

    Each call dispatches an all-reduce of the processes' flags and reads the result of the call
    before, which the devices have computed by then, so that no process waits for another.
    """
    everywhere = NamedSharding(mesh, P(mesh.axis_names))
    # Each process fills its own part, so that an array holds the flags of all processes.
    of_all = lambda flag: jax.make_array_from_callback(
        (mesh.size,), everywhere, lambda _: np.full(1, flag, np.int32)
    )
    flags = [of_all(0), of_all(1)]
    count = jax.jit(jnp.sum, out_shardings=NamedSharding(mesh, P()))
    counted: Any = None

    def agreed() -> bool:
        nonlocal counted
        before, counted = counted, count(flags[bool(asked())])
        return before is not None and int(before) > 0

    return agreed


@contextlib.contextmanager
def stop_signals(max_seconds: int | float | None = None) -> Iterator[Callable[[], bool]]:
    """Turns the first SIGTERM, SIGINT, SIGUSR1 or SIGHUP into a flag; a second ends the process.

    Gives a function that returns whether this process is asked to stop, to be called once after
    each step. Python handles signals in the main thread only; in others, none is seen.
    """
    if (outer := _enclosing.get()) is not None and max_seconds is None:
        yield outer
        return
    reasons: list[str] = []
    begin = time.monotonic()
    noticed = _preemption_notice() if outer is None else (lambda: False)
    warned = False

    def stopping() -> bool:
        nonlocal warned
        if noticed():
            reasons.append("JAX received a preemption notice")
        if max_seconds is not None and time.monotonic() - begin >= max_seconds:
            reasons.append(f"`max_seconds={max_seconds}` have passed")
        if reasons and not warned:
            logger.warning("%s: training stops after the current step.", reasons[0])
            warned = True
        return bool(reasons) or (outer is not None and outer())

    token = _enclosing.set(stopping)
    try:
        with _flagged(reasons) if outer is None else contextlib.nullcontext():
            yield stopping
    finally:
        _enclosing.reset(token)


@contextlib.contextmanager
def _flagged(reasons: list[str]) -> Iterator[None]:
    """Appends the name of the first signal that arrives."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = [signal.SIGTERM, signal.SIGINT]
    user, hangup = getattr(signal, "SIGUSR1", None), getattr(signal, "SIGHUP", None)
    if user and not callable(signal.getsignal(user)):  # the script does not handle it
        numbers.append(user)
    if hangup and signal.getsignal(hangup) == signal.SIG_DFL:  # `nohup` ignores it
        numbers.append(hangup)
    before = {number: signal.getsignal(number) for number in numbers}
    received = False

    def note(number: int, frame: object) -> None:
        nonlocal received
        if received:
            return
        received = True
        _tell()
        reasons.append(f"{signal.Signals(number).name} was received")
        # The default handlers end a process even where it hangs in native code.
        time.sleep(TWICE)
        restore()
        if hangup in before:
            # The shell and the kernel each send it when a terminal is closed.
            signal.signal(hangup, signal.SIG_IGN)

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    for number in before:
        signal.signal(number, note)
    try:
        yield
    finally:
        restore()


def _tell() -> None:
    """Says at once, on a line after the terminal's `^C`, what a signal does; a step may be long."""
    # Not `print`: the handler may have interrupted one, whose file is locked then.
    if sys.stderr is not None and sys.stderr.isatty():
        text = "\nStopping after this step. A second Ctrl-C ends the process at once.\n"
        with contextlib.suppress(OSError):  # the terminal may be gone
            os.write(2, text.encode())


def _preemption_notice() -> Callable[[], bool]:
    """A function that returns whether this is the step at which all processes must stop."""
    from jax.experimental import multihost_utils

    step = 0
    there = True

    def noticed() -> bool:
        # All processes count alike. A SIGTERM that JAX's own handler got before ours shows here.
        nonlocal step, there
        step += 1
        try:
            return there and multihost_utils.reached_preemption_sync_point(step)
        except RuntimeError:  # JAX's preemption service is switched off
            there = False
            return False

    return noticed
