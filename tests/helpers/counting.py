"""How much work Python does, as a number that no busy or slow machine changes."""

import contextlib
import cProfile
import gc
from collections.abc import Callable, Iterator
from typing import Any

import jax


def count_calls(fn: Callable[[], object]) -> int:
    """How many functions are called, Python's and C's, while `fn` runs in this thread."""
    profile = cProfile.Profile()
    gc.disable()  # finalizers that happen to run are not `fn`'s
    try:
        profile.runcall(fn)
    finally:
        gc.enable()
    return sum(entry.callcount for entry in profile.getstats())  # pyright: ignore


@contextlib.contextmanager
def compilations() -> Iterator[list[str]]:
    """A list that grows whenever XLA compiles a program, or reads one that it compiled before."""
    compiled: list[str] = []

    def listener(event: str, *_: Any, **__: Any) -> None:
        if "backend_compile" in event:
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listener)
    try:
        yield compiled
    finally:
        jax.monitoring.unregister_event_duration_listener(listener)
