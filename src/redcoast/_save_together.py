"""Several processes save together, or learn soon that one of them could not."""

import itertools
import time
from typing import Any

import jax

from ._exchange import exchange, key_value_store

_rounds = itertools.count()


class Together:
    """The saves of all processes, which each begins as often as the others do.

    With Orbax's own barrier, the failure of one process would keep the others waiting for twenty
    minutes, since it never gets there.
    """

    def __init__(self) -> None:
        self._key = self._next()

    def _next(self) -> str:
        return f"redcoast/save/{next(_rounds)}"

    def begin(self) -> None:
        self._key = self._next()

    def fail(self, reason: str) -> None:
        """Tells the others, whose barriers then fail too."""
        if jax.process_count() > 1:
            key = f"{self._key}/failed/{jax.process_index()}"
            key_value_store().key_value_set(key, reason, allow_overwrite=True)

    def barrier(self, *, key: str, timeout_ms: int) -> None:
        """What Orbax calls in its thread where all processes have to have come."""
        store, here = key_value_store(), f"{self._key}/{key}"
        store.key_value_set(f"{here}/{jax.process_index()}", "here")
        end = time.monotonic() + timeout_ms / 1000
        for other in range(jax.process_count()):
            while not _arrived(store, f"{here}/{other}"):
                if failed := [text for _, text in store.key_value_dir_get(f"{self._key}/failed")]:
                    raise OSError(f"Another process could not save: {failed[0]}")
                if time.monotonic() > end:
                    raise TimeoutError(f"Process {other} is not done saving.")

    def outcome(self, failed: str | None) -> str | None:
        """Why the save failed, on any of the processes, if it did."""
        return next((text for text in exchange("a save", failed) if text), None)


def _arrived(store: Any, key: str) -> bool:
    try:
        store.blocking_key_value_get(key, 500)
    except jax.errors.JaxRuntimeError as error:
        if "DEADLINE_EXCEEDED" not in str(error):
            raise
        return False
    return True
