"""Notices arrays of earlier states that loggers keep, and that later steps have deleted."""

import gc
import weakref
from collections import deque

import jax
from jaxtyping import PyTree

from ..core._donation import is_concrete, is_deleted
from ..core._frames import warn


class KeptArrays:
    """Weak references to the arrays of the last states that loggers were given.

    A logger may keep the last state, which it replaces when it is called again. One that still
    keeps the state before it will find its arrays deleted.
    """

    def __init__(self) -> None:
        self._states = deque[list[weakref.ref[jax.Array]]](maxlen=2)
        self._has_warned = False

    def see(self, state: PyTree, names: str) -> None:
        """Takes the next state; warns, once, if the loggers of these names keep an earlier one."""
        if self._has_warned:
            return
        # Of the two states before this one, the older must not be kept any more.
        if len(self._states) == 2:
            if _keeps_deleted(self._states[0]):
                gc.collect()  # garbage in reference cycles is kept by nobody
            if _keeps_deleted(self._states[0]):
                self._has_warned = True
                warn(
                    f"`log` ({names}) keeps arrays of an earlier state, which have been deleted: "
                    "each step takes over the memory of the state before it. Keep a copy, such as "
                    "`jax.device_get(state.model)`."
                )
        arrays = filter(is_concrete, jax.tree.leaves(state))
        self._states.append([weakref.ref(x) for x in arrays])


def _keeps_deleted(references: list[weakref.ref[jax.Array]]) -> bool:
    """Whether an array still exists whose memory was taken over by a later step."""
    arrays = (reference() for reference in references)
    return any(x is not None and is_deleted(x) for x in arrays)
