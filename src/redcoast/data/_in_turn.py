"""Calls functions that may write into what they returned before, while it is still used."""

import threading
from collections.abc import Callable
from contextvars import ContextVar
from typing import TypeVar

T = TypeVar("T")

_turn: ContextVar[threading.Lock] = ContextVar("turn", default=threading.Lock())  # noqa: B039


class InTurn:
    """Calls a function of the user from several threads, one call at a time where it has to be.

    A function that fills one buffer at each call returns a batch that its next call overwrites. Its
    results are copied, and no other such function is called until they are: the training data and
    the evaluation may have one buffer. A function whose results nobody else refers to is called by
    several threads at once, and nothing is copied.
    """

    def __init__(self) -> None:
        self._reuses: bool | None = None  # whether it is known to return what it holds

    def __call__(self, call: Callable[[bool], tuple[T, bool]]) -> T:
        """Returns the result of `call(reuses)`, which returns `(result, whether it was copied)`.

        `reuses` is whether an earlier result had to be copied. The call is repeated if its result
        had to be, and another thread may have called the function at the same time.
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
            self._reuses = self._reuses or copied
        return result
