"""How much work Python does, as a number that no busy or slow machine changes."""

import cProfile
import gc
from collections.abc import Callable


def count_calls(fn: Callable[[], object]) -> int:
    """How many functions are called, Python's and C's, while `fn` runs in this thread."""
    profile = cProfile.Profile()
    gc.disable()  # finalizers that happen to run are not `fn`'s
    try:
        profile.runcall(fn)
    finally:
        gc.enable()
    return sum(entry.callcount for entry in profile.getstats())  # pyright: ignore
