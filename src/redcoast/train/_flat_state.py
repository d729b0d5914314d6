"""The arrays of a state between steps, whose tree is made only if somebody looks at it."""

import jax
from jaxtyping import PyTree

from ..core._pytree import Static, join


class FlatState:
    """The arrays of a state that a compiled step returned.

    To make a tree of many modules takes longer than a small step. A loop that passes this to the
    next step saves the time. `maker` is the compiled step.
    """

    def __init__(self, arrays: list[jax.Array], static: Static, maker: object):
        self.arrays, self.static, self.maker = arrays, static, maker
        self._tree: PyTree = None

    @property
    def tree(self) -> PyTree:
        """The state."""
        # Joining a large model takes longer than a small step, and `fit` looks at few of its
        # states.
        if self._tree is None:
            self._tree = join(self.arrays, self.static)
        return self._tree


def as_tree(state: PyTree) -> PyTree:
    """The state, which may be flat."""
    return state.tree if isinstance(state, FlatState) else state
