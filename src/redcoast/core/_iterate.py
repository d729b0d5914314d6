"""Iterators that prepare the next items before the current one is used."""

import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from typing import TypeVar

T = TypeVar("T")
U = TypeVar("U")


def map_in_threads(
    make: Callable[[T], U], items: Iterable[T], *, workers: int, ahead: int, name: str
) -> Generator[U, None, None]:
    """Yields `make(item)` for each item, in order, and makes up to `ahead` results early in threads
    called `name`."""
    pool = ThreadPoolExecutor(workers, thread_name_prefix=name)
    # Also called, once, when the process ends with this iterator open: what it needs is gone by the
    # time that the iterator is deleted.
    end = weakref.finalize(pool, pool.shutdown, wait=False, cancel_futures=True)
    pending: deque[Future[U]] = deque()
    errors: list[Exception] = []
    try:
        for item in until_error(items, errors):
            # Threads do not inherit context variables, such as JAX's settings.
            pending.append(pool.submit(copy_context().run, make, item))
            if len(pending) > ahead:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
        if errors:
            raise errors[0]
    finally:
        # The reader may stop early, and then needs no unfinished results.
        end()


def until_error(items: Iterable[T], errors: list[Exception]) -> Iterator[T]:
    """Yields the items before an error, which is stored, so that they can still be used."""
    try:
        yield from items
    except Exception as error:
        errors.append(error)


def with_last(items: Iterable[T]) -> Iterator[tuple[T, bool]]:
    """Yields each item after the next one has been made, and whether it is the last."""
    for item, _, last in with_next(items):
        yield item, last


def with_next(items: Iterable[T]) -> Iterator[tuple[T, T | None, bool]]:
    """Yields each item, the next one, and whether it is the last.

    There is no next one after the last, or if an error follows.
    """
    # The item that was read last. A list, because an item may be `None`.
    before: list[T] = []
    items = iter(items)
    while True:
        try:
            item = next(items)
        except StopIteration:
            break
        except Exception:
            if before:  # an error of the next item does not concern it
                yield before.pop(), None, False
            raise
        if before:
            yield before.pop(), item, False
        before.append(item)
    if before:
        yield before.pop(), None, True
