"""Computes items in threads, a few ahead of their reader."""

from collections.abc import Callable, Generator, Iterable, Iterator
from time import perf_counter
from typing import TypeVar

from ..core._iterate import map_in_threads

T = TypeVar("T")
U = TypeVar("U")
WORKERS, AHEAD = 2, 4
CHEAP = 0.2e-3  # seconds


def prefetch(
    make: Callable[[T], U], items: Iterable[T], *, workers: int = WORKERS, ahead: int = AHEAD
) -> Generator[U, None, None]:
    """Yields `map(make, items)` in order; in threads, `ahead` of the reader, if `make` is slow."""
    items = iter(items)
    yield from _while_fast(make, items)
    yield from map_in_threads(make, items, workers=workers, ahead=ahead, name="redcoast-data")


def _while_fast(make: Callable[[T], U], items: Iterator[T]) -> Iterator[U]:
    """Computes results in this thread, until two in a row take longer than their reader."""
    # The device computes at the same time, so this costs nothing as long as it takes less time.
    # Threads share the interpreter with the reader, and passing a small batch between threads
    # costs more than computing it.
    slow = 0
    before = perf_counter()
    for item in items:
        begin = perf_counter()
        result = make(item)
        end = perf_counter()
        slow = slow + 1 if end - begin > max(CHEAP, begin - before) else 0
        yield result
        before = end
        if slow == 2:
            return
