"""How the arrays of a step's state are stored, for functions that are traced inside of the step.

A mesh's axes have the type Auto inside of a step, so that the type of an array does not say how it
is sharded. Its path does: optimizers keep their arrays in trees like the model's.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import jax
from jax.sharding import NamedSharding, PartitionSpec
from jax.tree_util import KeyPath
from jaxtyping import PyTree

Shape = tuple[int, ...]
# JAX's caches depend on it, so that functions are traced again for another sharding.
_specs = jax.make_user_context()


class StoredSpecs:
    """The shapes and specs of arrays by path. Equal ones have the same hash, computed once."""

    def __init__(self, arrays: Sequence[tuple[KeyPath, Shape, PartitionSpec]]):
        self._arrays = tuple(arrays)
        self._hash = hash(self._arrays)
        self._by_last: dict[object, list[tuple[KeyPath, Shape, PartitionSpec]]] = {}
        for path, shape, spec in self._arrays:
            self._by_last.setdefault(path[-1:], []).append((path, shape, spec))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, StoredSpecs) and self._arrays == other._arrays

    def of(self, path: KeyPath, shape: Shape) -> PartitionSpec | None:
        """The spec of the array of this shape whose path ends so; None if there is no such array.

        Of several, it is the one with the shortest path: that of a parameter is shorter than those
        of the optimizer's state.
        """
        matching: list[tuple[int, int, PartitionSpec]] = []
        candidates = self._arrays
        if path:
            candidates = self._by_last.get(path[-1:], [])
        for number, (whole, of_shape, spec) in enumerate(candidates):
            if of_shape == shape and whole[len(whole) - len(path) :] == path:
                matching.append((len(whole), number, spec))
        if not matching:
            return None
        return min(matching)[2]


def stored_specs(shardings: PyTree, arrays: PyTree) -> StoredSpecs:
    """The specs of the arrays of a tree, from a tree with a sharding in place of each array."""
    specs: list[tuple[KeyPath, Shape, PartitionSpec]] = []
    leaves = jax.tree.leaves(arrays, is_leaf=_is_none)
    of_leaves = jax.tree_util.tree_leaves_with_path(shardings, is_leaf=_is_none)
    for (path, sharding), x in zip(of_leaves, leaves, strict=True):
        if isinstance(sharding, NamedSharding):
            specs.append((path, x.shape, sharding.spec))
    return StoredSpecs(specs)


def _is_none(x: object) -> bool:
    return x is None


@contextmanager
def stored_as(specs: StoredSpecs | None) -> Iterator[None]:
    """Functions are traced inside for arrays that are stored so."""
    with _specs(specs):
        yield


def spec_of(path: KeyPath, shape: Shape) -> PartitionSpec | None:
    """How the current trace's step stores the array of this shape whose path ends so, if it is
    known."""
    specs = _specs.value
    if specs is None:
        return None
    return specs.of(path, shape)
