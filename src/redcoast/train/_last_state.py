"""States between steps, which are put together only if somebody looks at them, and the partition
of the state that a step returned last, which is taken apart once.

Flattening a tree of many modules takes more Python than a small step: with a state of 57 arrays in
nine layers, a call of a compiled step makes 3,590 function calls, and 306 if the arrays are known
from the last one. Whatever can be changed in place is compared at each call.
"""

import dataclasses
import itertools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx
import jax
from jaxtyping import PyTree

from ..core._pytree import ARRAYS, Arrays, Static, join, split

# A reference to a module, an array or a constant of a state, and its arrays: those of a module
# until it is deleted, and not an array itself, which would be kept alive.
_Part = tuple[Callable[[], object], Arrays | None]


class Outline:
    """The structure of a state above its immutable modules, which are identified as a whole."""

    def __init__(self, state: PyTree):
        # What cannot change in place is the same if it is the same object.
        is_whole = lambda x: isinstance(x, eqx.Module) and is_frozen(jax.tree.structure(x))
        parts, self.structure = jax.tree.flatten(state, is_leaf=is_whole)
        # The number of arrays in each part; `None` if it is an array itself.
        self.counts: list[int | None] = []
        for part in parts:
            count = None
            if not isinstance(part, ARRAYS):
                arrays, _ = split(part)
                count = len(arrays)
            self.counts.append(count)


class LastState:
    """The parts of one state and their arrays."""

    def __init__(self, outline: Outline, state: PyTree, arrays: Arrays):
        self._outline = outline
        self._parts: list[_Part] = []
        own_parts = self._parts

        def forget(_: object) -> None:
            # Without a reference to `self`, which would keep itself alive.
            own_parts.clear()

        rest: Iterator[PyTree] = iter(arrays)
        parts = outline.structure.flatten_up_to(state)
        for part, count in zip(parts, outline.counts, strict=True):
            if count is None:
                # Weakly, or the memory of a state would stay as long as its step.
                self._parts.append((weakref.ref(next(rest)), None))
            elif isinstance(part, eqx.Module):
                own = list(itertools.islice(rest, count))
                self._parts.append((weakref.ref(part, forget), own))
            else:
                self._parts.append((lambda constant=part: constant, []))

    def arrays_of(self, state: PyTree) -> Arrays | None:
        """The arrays of a state if it has the same parts; otherwise `None`."""
        try:
            parts = self._outline.structure.flatten_up_to(state)
        except ValueError:  # it has another structure
            return None
        if len(parts) != len(self._parts):  # a part was deleted
            return None
        arrays: Arrays = []
        for part, (reference, own) in zip(parts, self._parts, strict=True):
            # The user has replaced it since, such as by `eqx.tree_at`.
            if reference() is not part:
                return None
            if own is None:
                arrays.append(part)
            else:
                arrays.extend(own)
        return arrays


def is_frozen(structure: Any) -> bool:
    """Returns whether no node of a tree can be changed in place, unlike lists and dicts."""
    if structure.node_data() is None:
        return True
    kind = structure.node_data()[0]
    frozen = issubclass(kind, tuple | eqx.Module | eqx.nn.State | type(None))
    if dataclasses.is_dataclass(kind):
        frozen = frozen or vars(kind)["__dataclass_params__"].frozen
    return frozen and all(map(is_frozen, structure.children()))


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
    if isinstance(state, FlatState):
        return state.tree
    return state
