"""How much work Python does, as a number that no busy or slow machine changes."""

import gc
import sys
from collections.abc import Callable


def count_calls(fn: Callable[[], object]) -> int:
    """How many functions are called, Python's and C's, while `fn` runs in this thread."""
    calls = 0

    def note(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    gc.disable()  # finalizers that happen to run are not `fn`'s
    sys.setprofile(note)
    try:
        fn()
    finally:
        sys.setprofile(None)
        gc.enable()
    return calls
