"""Stops a loop on a signal, after a time, or when a machine is preempted."""

import contextlib
import contextvars
import dataclasses
import functools as ft
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import PyTree

from ..core._axis_types import with_auto_axes
from ..core._errors import check_mesh, check_number

logger = logging.getLogger("redcoast")

# The exit code of a script whose run was stopped and should be started again (EX_TEMPFAIL).
STOPPED = 75
# `timeout`, `uv run` and some schedulers send each signal twice.
TWICE = 0.1


# Why a loop stops: a user's function, a signal or time limit, or an interrupt (Ctrl-C), after which
# `fit` raises `KeyboardInterrupt`.
GO_ON, ASKED, STOP, INTERRUPT = 0, 1, 2, 3


class StopReason(NamedTuple):
    text: str
    level: int


class StopRequest:
    """Whether a loop is asked to stop. It is called once after each step.

    - `level`: if so, `ASKED`, `STOP` or `INTERRUPT`, the same in all processes of the run.
    - `reasons`: the reasons of this process, each with its level.
    - `of_caller`: whether it belongs to a `stop_on_signal` of the caller, who then decides what to
        do after the loop.
    """

    def __init__(
        self,
        ask: Callable[[PyTree], int],
        reasons: list[StopReason],
        *,
        of_caller: bool = False,
        of_process: "StopRequest | None" = None,
    ):
        self._ask, self.reasons, self.of_caller = ask, reasons, of_caller
        self._of_process = of_process  # the request of this process, if all have to agree
        self._reason: str | None = None
        self.level = GO_ON

    def __call__(self, after: PyTree = None) -> bool:
        """Whether to stop. The processes agree on it after the arrays `after`, such as metrics of
        the step, are computed, and not if they could not be computed."""
        own = ASKED
        if self._reason is None or self._of_process:
            own = GO_ON
        # A level never falls: what was asked for once counts until the loop ends.
        self.level = max(self.level, self._ask(after), own)
        return self.level > GO_ON

    def ask(self, reason: str) -> None:
        """Asks this loop, and no loop around it, to stop."""
        self._reason = reason
        if self._of_process is not None:
            self._of_process.ask(reason)

    @property
    def reason(self) -> str:
        """The reason, as a sentence without a full stop."""
        if self.reasons:
            return self.reasons[0].text
        if self._reason is not None:
            return self._reason
        return "Another process of the run was asked to stop"


# The request of an enclosing `stop_on_signal`, so that a loop inside it stops too.
_enclosing: contextvars.ContextVar[StopRequest | None] = contextvars.ContextVar(
    "enclosing", default=None
)


@dataclasses.dataclass(frozen=True)
class Received:
    """A signal that a run of this process received, after which the process continued.

    - `step`, `steps`: the step after which the run ended, and the number of its steps.
    """

    reason: str  # which signal, as a sentence
    step: int
    steps: int | None
    cut_short: bool


_received: list[Received] = []


def refuse_after_signal(name: str, *, trains: bool) -> None:
    """Raises `RuntimeError` if a signal stopped an earlier run of this process.

    Otherwise, a script that does not check `state.step` would continue with a partly trained model.
    Inside `stop_on_signal`, the caller handles signals. Functions that do not train are only
    rejected if the run was incomplete.
    """
    # The script handles signals itself.
    if _enclosing.get() is not None:
        return
    for signal_of_run in _received:
        if not (trains or signal_of_run.cut_short):
            continue
        of_steps = ""
        if signal_of_run.steps is not None:
            of_steps = f" of {signal_of_run.steps}"
        raise RuntimeError(
            f"{signal_of_run.reason} during an earlier `fit` of this process, which ended after "
            f"step {signal_of_run.step}{of_steps}, so `{name}` does not begin. End the script when "
            "`state.step` is less than the number of steps, or handle signals yourself: call these "
            "functions inside `redcoast.stop_on_signal()`."
        )


def end_after_signal(request: StopRequest, step: int, steps: int | None, *, saved: str) -> None:
    """Handles a signal after a run has ended and was saved.

    Raises `KeyboardInterrupt` after Ctrl-C.
    """
    if request.of_caller:
        return
    # A signal may have arrived during the last step, or while it was saved.
    level = highest_level(request.reasons, request.level)
    # As Python does for Ctrl-C, but after the state was saved.
    if level == INTERRUPT:
        raise KeyboardInterrupt(f"`fit` was interrupted after step {step}. {saved}")
    if level == STOP:
        unfinished = steps is None or step < steps
        cut_short = request.level > GO_ON and unfinished
        # Later calls in this process refuse to begin, so that the script ends in time.
        _received.append(Received(request.reason, step, steps, cut_short))


@contextlib.contextmanager
def stop_on_signal(
    max_seconds: int | float | None = None, *, mesh: Mesh | None = None
) -> Iterator[Callable[[], bool]]:
    """Stops a loop when a signal arrives, after the same step in all processes.

    The loop stops after SIGTERM, SIGINT, SIGUSR1, SIGHUP, a preemption notice that JAX receives, or
    `max_seconds`. A second signal ends the process at once. [`redcoast.fit`][] uses this function
    itself; call `fit` inside `stop_on_signal(max_seconds)` to limit its time. The caller is then
    responsible for signals: `fit` returns the state after every signal, including Ctrl-C, and the
    caller compares `state.step` with the number of steps.

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
    if mesh is not None:
        check_mesh(mesh)
    with stop_request(max_seconds, mesh=mesh) as request:
        yield request


@contextlib.contextmanager
def stop_request(
    max_seconds: int | float | None = None, *, mesh: Mesh | None
) -> Iterator[StopRequest]:
    """Like `stop_on_signal`, for a loop that needs the reason why it stops."""
    with stop_signals(max_seconds) as request:
        if jax.process_count() == 1:
            yield request
        elif mesh is None:
            yield StopRequest(_refuse, [])
        else:
            yield agreed(with_auto_axes(mesh), request)


def _refuse(_: PyTree) -> int:
    raise ValueError("Several processes stop at the same step over a mesh: pass `mesh`.")


def agreed(mesh: Mesh, request: StopRequest) -> StopRequest:
    """Returns whether any process is asked to stop, with the same result in all processes.

    Each call dispatches an all-reduce of the levels, and reads the result of the previous call,
    which is then ready, so that no process waits for another.
    """
    everywhere = NamedSharding(mesh, P(mesh.axis_names))
    # Each process fills its own part of an array with the levels of all processes.
    of_all = lambda level: jax.make_array_from_callback(
        (mesh.size,), everywhere, lambda _: np.full(1, level, np.int32)
    )
    # On the devices before the loop, since a transfer in each step would wait.
    levels = [of_all(level) for level in (GO_ON, ASKED, STOP, INTERRUPT)]
    # If a process has died, the step fails in some processes before others. Those must not go on to
    # another all-reduce: Gloo would pair it with the step's of the others, or end them by SIGABRT.
    # An argument that is not used is waited for all the same.
    highest = jax.jit(
        lambda levels, after: jnp.max(levels),
        keep_unused=True,
        out_shardings=NamedSharding(mesh, P()),
    )
    computed: Any = None

    def level(after: PyTree) -> int:
        nonlocal computed
        request()
        # The answer of the step before: reading this one's would wait for the devices.
        before, computed = computed, highest(levels[request.level], after)
        if before is None:
            return GO_ON
        return int(before)

    return StopRequest(level, request.reasons, of_caller=request.of_caller, of_process=request)


@contextlib.contextmanager
def stop_signals(max_seconds: int | float | None = None) -> Iterator[StopRequest]:
    """Turns the first SIGTERM, SIGINT, SIGUSR1 or SIGHUP into a flag; a second ends the process.

    Yields a function that returns whether this process is asked to stop, to be called once after
    each step. Python handles signals only in the main thread, so other threads see no signal.
    """
    outer = _enclosing.get()
    if outer is not None and max_seconds is None:
        yield StopRequest(lambda _: _level_of(outer), outer.reasons, of_caller=True)
        return
    reasons: list[StopReason] = []
    begin = time.monotonic()
    # JAX counts the steps of one loop, the outermost.
    noticed, signals = (lambda: False), contextlib.nullcontext()
    if outer is None:
        noticed, signals = _preemption_notice(), _handling_signals(reasons)
    warned = False

    def level(_: PyTree) -> int:
        nonlocal warned
        if noticed():
            reasons.append(StopReason("JAX received a preemption notice", STOP))
        if max_seconds is not None and time.monotonic() - begin >= max_seconds:
            reasons.append(StopReason(f"`max_seconds={max_seconds}` have passed", STOP))
        if reasons and not warned:
            logger.warning("%s: training stops after the current step.", reasons[0].text)
            warned = True
        return highest_level(reasons, _level_of(outer))

    request = StopRequest(level, reasons)
    token = _enclosing.set(request)
    try:
        with signals:
            yield request
    finally:
        _enclosing.reset(token)


def _level_of(outer: StopRequest | None) -> int:
    if outer is None:
        return GO_ON
    outer()
    # A request by the user's function is for its own loop.
    if outer.level > ASKED:
        return outer.level
    return GO_ON


def highest_level(reasons: list[StopReason], level: int) -> int:
    # An interrupt after a SIGTERM still raises `KeyboardInterrupt`.
    return max([level, *(reason.level for reason in reasons)])


@contextlib.contextmanager
def _handling_signals(reasons: list[StopReason]) -> Iterator[None]:
    """Appends the first signal that arrives."""
    # Python lets only the main thread handle signals.
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = [signal.SIGTERM, signal.SIGINT]
    user, hangup = getattr(signal, "SIGUSR1", None), getattr(signal, "SIGHUP", None)
    if user and not callable(signal.getsignal(user)):  # the script does not handle it
        numbers.append(user)
    if hangup and signal.getsignal(hangup) == signal.SIG_DFL:  # `nohup` ignores it
        numbers.append(hangup)
    # Of the script, which get their signals again.
    before = {number: signal.getsignal(number) for number in numbers}
    received = False

    def note(number: int, frame: object) -> None:
        nonlocal received
        if received:
            return
        received = True
        _tell()
        level = STOP
        if number == signal.SIGINT:
            level = INTERRUPT
        reasons.append(StopReason(f"{signal.Signals(number).name} was received", level))
        # The default handlers end a process even where it hangs in native code.
        time.sleep(TWICE)
        restore()
        if hangup is not None and hangup in before:
            # The shell and the kernel each send it when a terminal is closed.
            signal.signal(hangup, signal.SIG_IGN)

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)

    for number in before:
        signal.signal(number, note)
    _undone_in_child.append(restore)
    try:
        with _ending_native_code([signal.SIGTERM, signal.SIGINT], lambda: received):
            yield
    finally:
        restore()
        _undone_in_child.remove(restore)


# How a forked process, such as one that reads data, leaves the run: signals have the effect there
# that they had before. `multiprocessing.Pool` ends its processes by a single SIGTERM.
_undone_in_child: list[Callable[[], object]] = []


def _leave_run() -> None:
    for undo in _undone_in_child:
        undo()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_run)


@contextlib.contextmanager
def _ending_native_code(numbers: list[int], is_handled: Callable[[], bool]) -> Iterator[None]:
    """Ends the process at a second signal that arrives before Python could handle the first.

    Python runs handlers between two operations of the main thread, and so not while a program is
    compiled, or while a step is waited for, which may take minutes.
    """
    others = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(others)
    # At a prompt, the end of the process would lose what the user has there. And an event loop may
    # have asked for the signals before.
    if hasattr(sys, "ps1") or others != -1:
        yield
        return
    reading, writing = os.pipe()
    os.set_blocking(writing, False)

    def watch() -> None:
        first: float | None = None
        # Each signal is one byte, and the end of the context is the end of the file.
        while arrived := os.read(reading, 1):
            now = time.monotonic()
            if arrived[0] not in numbers or is_handled():
                continue
            if first is not None and now - first >= TWICE:
                os._exit(128 + arrived[0])  # as a shell reports the end by a signal
            first = first or now
        os.close(reading)

    # Python writes into it at once, in whatever code the main thread is.
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    stop_writing = ft.partial(signal.set_wakeup_fd, -1)
    _undone_in_child.append(stop_writing)
    threading.Thread(target=watch, name="redcoast-signals", daemon=True).start()
    try:
        yield
    finally:
        stop_writing()
        _undone_in_child.remove(stop_writing)
        os.close(writing)


def _tell() -> None:
    """Prints what a signal does, on a line after the terminal's `^C`, because a step may take
    long."""
    # Not `print`, because the handler may have interrupted a call to it, which has locked the file.
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
        # All processes count the same steps. This also detects a SIGTERM that JAX's handler
        # received first.
        nonlocal step, there
        step += 1
        try:
            return there and multihost_utils.reached_preemption_sync_point(step)
        except RuntimeError:  # JAX's preemption service is switched off
            there = False
            return False

    return noticed
