"""Items made in threads, a few ahead of their reader."""

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from time import perf_counter
from typing import Any, TypeVar

T = TypeVar("T")
U = TypeVar("U")
AHEAD = 4
CHEAP = 0.2e-3  # seconds


def prefetch(
    make: Callable[[T], U], items: Iterable[T], *, workers: int, ahead: int = AHEAD
) -> Generator[U, None, None]:
    """`map(make, items)`, in order; in threads, `ahead` of the reader, where that is worth it."""
    items = iter(items)
    yield from _while_hidden(make, items)
    pool = ThreadPoolExecutor(workers, thread_name_prefix="redcoast-data")
    pending: deque[Any] = deque()
    errors: list[Exception] = []
    try:
        for item in _until_error(items, errors):
            pending.append(pool.submit(make, item))
            if len(pending) > ahead:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
        if errors:
            raise errors[0]
    finally:
        # The reader may stop early; batches under way are of no use then.
        pool.shutdown(wait=False, cancel_futures=True)


def _until_error(items: Iterable[T], errors: list[Exception]) -> Iterator[T]:
    """Items up to an error, which is for later: those before it are still to be used."""
    try:
        yield from items
    except Exception as error:
        errors.append(error)


def _while_hidden(make: Callable[[T], U], items: Iterator[T]) -> Iterator[U]:
    """Makes results in this thread, until two in a row take longer than their reader does."""
    # The device works while the reader waits here, so that this costs no time as long as it is
    # the shorter part. Threads would take turns with the reader in one interpreter: handing over
    # a small batch costs more than making it.
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


def with_last(batches: Iterable[T]) -> Iterator[tuple[T, bool]]:
    """Batches, and whether each is the last: the next is at hand already."""
    before: list[T] = []
    batches = iter(batches)
    while True:
        try:
            batch = next(batches)
        except StopIteration:
            break
        except Exception:
            if before:  # it is whole, whatever has become of the next
                yield before.pop(), False
            raise
        if before:
            yield before.pop(), False
        before.append(batch)
    if before:
        yield before.pop(), True
