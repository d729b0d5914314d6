"""How the arrays of a step's state are stored, for functions that are traced inside of the step.

A mesh's axes have the type Auto inside of a step, so that the type of an array does not say how it
is sharded. Its path does: optimizers keep their arrays in trees like the model's.
"""

import functools as ft
from collections.abc import Iterator
from contextlib import contextmanager

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jax.tree_util import KeyPath
from jaxtyping import Array, PyTree

from ._axis_types import is_explicit
from ._constraint import constrain
from ._pytree import is_none
from ._tracing import traced_mesh

Shape = tuple[int, ...]
Arrays = tuple[tuple[KeyPath, Shape, PartitionSpec], ...]
# JAX's caches depend on it, so that functions are traced again for another sharding.
_specs = jax.make_user_context()


class StoredSpecs:
    """The shapes and specs of arrays by path.

    Equal ones are the same object: JAX compares them wherever it looks up a trace. A trace depends
    on them only if they `were_asked_for`.
    """

    def __init__(self, arrays: Arrays):
        self.were_asked_for = False
        self._arrays = arrays
        # An optimizer knows the end of a path alone, which is that of a parameter.
        self._by_last: dict[object, list[tuple[KeyPath, Shape, PartitionSpec]]] = {}
        for path, shape, spec in arrays:
            self._by_last.setdefault(path[-1:], []).append((path, shape, spec))

    def of(self, path: KeyPath, shape: Shape) -> PartitionSpec | None:
        """The spec of the array of this shape whose path ends so; None if there is no such array.

        Of several, it is the one with the most sharded dimensions, since an optimizer's state may
        have more than its parameter. Of those with as many, it is the one with the shortest path,
        which is the parameter's.
        """
        self.were_asked_for = True
        matching: list[tuple[int, int, int, PartitionSpec]] = []
        candidates = list(self._arrays)
        if path:
            candidates = self._by_last.get(path[-1:], [])
        for number, (whole, of_shape, spec) in enumerate(candidates):
            if of_shape == shape and whole[len(whole) - len(path) :] == path:
                sharded = len(spec) - list(spec).count(None)  # dimensions
                # No two numbers are equal, so that specs, which have no order, are not compared.
                matching.append((-sharded, len(whole), number, spec))
        if not matching:
            return None
        return min(matching)[3]


def stored_specs(shardings: PyTree, arrays: PyTree) -> StoredSpecs:
    """The specs of the arrays of a tree, from a tree with a sharding in place of each array."""
    specs: list[tuple[KeyPath, Shape, PartitionSpec]] = []
    leaves = jax.tree.leaves(arrays, is_leaf=is_none)
    of_leaves = jax.tree_util.tree_leaves_with_path(shardings, is_leaf=is_none)
    for (path, sharding), x in zip(of_leaves, leaves, strict=True):
        if isinstance(sharding, NamedSharding):
            specs.append((path, x.shape, sharding.spec))
    return _once(tuple(specs))


@ft.lru_cache(maxsize=64)
def _once(arrays: Arrays) -> StoredSpecs:
    return StoredSpecs(arrays)


@contextmanager
def stored_as(specs: StoredSpecs | None) -> Iterator[None]:
    """Functions are traced inside for arrays that are stored so."""
    with _specs(specs):
        yield


def spec_of(path: KeyPath, array: Array) -> PartitionSpec | None:
    """How an array is stored, if that is known.

    The type of an array says it on a mesh with Explicit axes. Otherwise it is known of the arrays
    of a step's state, and of arrays of the same shape at the end of their paths.
    """
    sharding = getattr(jax.typeof(array), "sharding", None)
    if isinstance(sharding, NamedSharding) and is_explicit(sharding.mesh):
        return sharding.spec
    specs = _specs.value
    if specs is None:
        return None
    return specs.of(path, array.shape)


def divided_as_stored(tree: PyTree) -> PyTree:
    """Arrays in the parts in which a step's state has those whose paths end like theirs.

    Arrays of which that is not known stay as they are.
    """
    mesh = traced_mesh()
    # Types say it on a mesh with Explicit axes.
    if mesh is None or is_explicit(mesh):
        return tree
    # Inside of `jax.shard_map`, devices have arrays of their own.
    if AxisType.Manual in jax.sharding.get_abstract_mesh().axis_types:
        return tree

    def divide(path: KeyPath, x: Array) -> Array:
        spec = spec_of(path, x)
        if spec is None or not any(spec):
            return x
        sharding = NamedSharding(mesh, spec)
        # Several states, as those of clients, may be divided over the same axes.
        return constrain(x, sharding, of_cotangent=sharding)

    return jax.tree_util.tree_map_with_path(divide, tree)
