"""What ends a run before its time: a signal, the clock, a machine that is taken back."""

import contextlib
import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Int32

from ..core._errors import check_number


class _Agreement:
    """Whether any process wants to stop, as all processes learn it at the same step.

    Each call dispatches an all-reduce of the processes' wishes and reads that of the call before,
    which the devices have computed by then, so that no process waits for another.
    """

    def __init__(self, mesh: Mesh, wishes: Callable[[], bool]):
        self._wishes = wishes
        self._votes = [_vote(mesh, wish) for wish in (0, 1)]
        self._count = jax.jit(jnp.sum, out_shardings=NamedSharding(mesh, P()))
        self._counted: Array | None = None

    def __call__(self) -> bool:
        before, self._counted = self._counted, self._count(self._votes[bool(self._wishes())])
        return before is not None and int(before) > 0


def _vote(mesh: Mesh, wish: int) -> Int32[Array, " devices"]:
    # Its parts differ from process to process, so that the value differs as well.
    everywhere = NamedSharding(mesh, P(mesh.axis_names))
    part = lambda index: np.full(1, wish, np.int32)
    return jax.make_array_from_callback((mesh.size,), everywhere, part)


logger = logging.getLogger("redcoast")

# What a script whose run was stopped exits with, to be run again: EX_TEMPFAIL of sysexits.h.
STOPPED = 75
# `timeout`, `uv run` and some schedulers send what they send twice.
TWICE = 0.1


@contextlib.contextmanager
def stop_on_signal(
    max_seconds: int | float | None = None,
    *,
    mesh: Mesh | None = None,
    since: float | None = None,
) -> Iterator[Callable[[], bool]]:
    """Stops a loop after the step under way when a signal arrives, in all processes at once.

    SIGTERM, SIGINT, SIGUSR1, a preemption notice that JAX receives, and the end of `max_seconds`
    ask for the stop. A second signal ends the process at once.

    **Arguments:**

    - `max_seconds`: the time in seconds after which to stop; without it, only signals do.
    - `mesh`: the mesh of the run; needed with several processes.
    - `since`: the time of `time.monotonic()` from which the seconds count; now by default.

    **Returns:**

    A context manager that gives a function, to be called once after each step was dispatched,
    which returns whether to stop. All processes get the same answer.

    **Raises:**

    `ValueError` if `max_seconds` is not positive, or if there are several processes and no mesh.

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
    if jax.process_count() > 1 and mesh is None:
        raise ValueError("Several processes stop at the same step over a mesh: pass `mesh`.")
    with stop_signals(max_seconds, since=since) as wishes:
        yield wishes if jax.process_count() == 1 or mesh is None else _Agreement(mesh, wishes)


@contextlib.contextmanager
def stop_signals(
    max_seconds: int | float | None = None, *, since: float | None = None
) -> Iterator[Callable[[], bool]]:
    """Turns the first SIGTERM, SIGINT or SIGUSR1 into a flag; a second one stops at once.

    Gives a function, to be called once at each step, that says whether to stop: because a signal
    came, because `max_seconds` have passed `since` a time of `time.monotonic` (now by default), or
    because JAX was told that the machine is taken back. Outside the main thread, where Python
    handles no signals, none of them comes.
    """
    reasons: list[str] = []
    begin = time.monotonic() if since is None else since
    noticed = _preemption_notice()
    said = False

    def stopping() -> bool:
        nonlocal said
        if noticed():
            reasons.append("JAX has notice of a preemption")
        if max_seconds is not None and time.monotonic() - begin >= max_seconds:
            reasons.append(f"`max_seconds={max_seconds}` have passed")
        if reasons and not said:
            logger.warning("%s: training stops after the step under way.", reasons[0])
            said = True
        return bool(reasons)

    with _flagged(reasons):
        yield stopping


@contextlib.contextmanager
def _flagged(reasons: list[str]) -> Iterator[None]:
    """Appends the name of the first signal that comes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in _signals()}
    came = False

    def note(number: int, frame: object) -> None:
        nonlocal came
        if came:
            return
        came = True
        reasons.append(f"{signal.Signals(number).name} came")
        # The default handlers end a process even where it hangs in native code.
        time.sleep(TWICE)
        restore()

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    for number in before:
        signal.signal(number, note)
    try:
        yield
    finally:
        restore()


def _signals() -> list[signal.Signals]:
    """SIGTERM, SIGINT, and SIGUSR1 unless the script handles it."""
    found = [signal.SIGTERM, signal.SIGINT]
    user = getattr(signal, "SIGUSR1", None)
    return [*found, user] if user and not callable(signal.getsignal(user)) else found


def _preemption_notice() -> Callable[[], bool]:
    """A function that says whether all processes of a job have come to the step to stop at."""
    from jax.experimental import multihost_utils

    step = 0
    there = True

    def noticed() -> bool:
        # All processes count alike. What JAX's own handler saw before ours was set comes here.
        nonlocal step, there
        step += 1
        try:
            return there and multihost_utils.reached_preemption_sync_point(step)
        except RuntimeError:  # the service is switched off
            there = False
            return False

    return noticed
