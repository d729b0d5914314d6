"""Calls functions that may write into an earlier result that is still in use."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

T = TypeVar("T")

# One lock for all loops of the process, except inside a function that has its turn; see below.
_turn: ContextVar[threading.Lock] = ContextVar("turn", default=threading.Lock())  # noqa: B039


_loops: set[object] = set()  # those whose batches are made in threads


@contextmanager
def working_in_threads() -> Iterator[None]:
    """Inside, a loop makes batches in threads."""
    loop = object()
    _loops.add(loop)
    try:
        yield
    finally:
        _loops.discard(loop)


def threads_at_work() -> bool:
    """Whether batches of any loop are made in threads, perhaps of the same examples."""
    return bool(_loops)


class InTurn:
    """Calls a user's function from several threads, but only one at a time if its results share
    memory.

    A function that fills one buffer at each call returns a batch that its next call overwrites. Its
    results are copied, and no other such function is called until they are: the training data and
    the evaluation may share a buffer. A function whose results have no other references is called
    by several threads at once, and nothing is copied.

    - `reads_places`: whether all results so far were views of memory with a place for each example,
        as `have_places` says. Without threads, none of them is written into while it is used.
    """

    def __init__(self) -> None:
        self.reads_places = True
        self._reuses: bool | None = None  # whether it is known to keep references to its results

    def __call__(self, call: Callable[[bool], tuple[T, bool]]) -> T:
        """Returns the result of `call(reuses)`, which returns `(result, whether it was copied)`.

        `reuses` is whether an earlier result had to be copied. The call is repeated if its result
        had to be copied while another thread may have called the function.
        """
        if self._reuses is False:
            result, copied = call(False)
            if not copied:
                return result
            self._reuses = True
        with _turn.get():
            # The function may load batches itself, whose threads take turns among themselves.
            token = _turn.set(threading.Lock())
            try:
                result, copied = call(bool(self._reuses))
            finally:
                _turn.reset(token)
            # Without a copy, `False`: from here on, the function is called without a lock.
            self._reuses = self._reuses or copied
        return result
