"""Times calls."""

import time
from collections.abc import Callable

import jax


def elapsed(run: Callable[[], object], clock: Callable[[], float] = time.process_time) -> float:
    """The seconds until a call has computed what it returns, by default of processor time."""
    begin = clock()
    jax.block_until_ready(run())
    return clock() - begin
