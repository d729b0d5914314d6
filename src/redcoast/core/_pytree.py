"""Partitions of a PyTree into arrays and everything else, and leaves by path."""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from types import UnionType
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jax.sharding import Sharding
from jax.tree_util import KeyPath
from jaxtyping import PyTree

# The arrays of a tree, flat: of JAX or NumPy, tracers, or their shapes and dtypes.
Arrays = list[PyTree]
ARRAYS = (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct)
NUMBERS = (*ARRAYS, int, float, complex)


class Static:
    """The hashable, static part of a tree: everything except its arrays.

    `jax.jit` compiles once for each distinct value.
    """

    def __init__(self, structure: PyTree, leaves: tuple[PyTree, ...]):
        self.structure = structure
        self.leaves = leaves  # `None`, which is not a leaf, in the place of each array
        self.only_arrays = all(leaf is None for leaf in leaves)
        self._hash: int | None = None  # computed once, since it is asked for in each step

    def __hash__(self) -> int:
        if self._hash is None:
            self._hash = hash((self.structure, self.leaves))
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (
            isinstance(other, Static)
            # Both hashes are known already, and comparing the leaves takes long.
            and hash(self) == hash(other)
            and (self.structure, self.leaves) == (other.structure, other.leaves)
        )

    def __repr__(self) -> str:
        return str(self.structure)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SplitTree:
    """A tree as one argument of `jax.jit`, which traces its arrays and compiles for the rest."""

    arrays: Arrays
    static: Static = field(metadata={"static": True})

    @classmethod
    def of(cls, tree: PyTree) -> "SplitTree":
        return cls(*split(tree))

    def join(self) -> PyTree:
        return join(self.arrays, self.static)


def split(tree: PyTree, *, numbers: bool = False) -> tuple[Arrays, Static]:
    """Splits a tree into its arrays and its static part.

    With `numbers=True`, Python numbers count as arrays.
    """
    # Calling a jitted function takes half as long on a flat list as on a tree of modules.
    kinds = ARRAYS
    if numbers:
        kinds = NUMBERS
    leaves, structure = jax.tree.flatten(tree)
    arrays: Arrays = []
    constants: list[PyTree] = []
    for leaf in leaves:
        if isinstance(leaf, kinds):
            arrays.append(leaf)
            leaf = None
        constants.append(leaf)
    return arrays, Static(structure, tuple(constants))


def join(arrays: Arrays, static: Static) -> PyTree:
    """The inverse of `split`."""
    # As most trees. JAX unflattens them without a loop in Python.
    if static.only_arrays:
        return static.structure.unflatten(arrays)
    rest = iter(arrays)
    return static.structure.unflatten(
        [next(rest) if leaf is None else leaf for leaf in static.leaves]
    )


def abstract_array(x: PyTree, sharding: Sharding | None = None) -> jax.ShapeDtypeStruct:
    """The shape and dtype of an array, concrete or abstract, with a sharding if one is given; also
    of a number of Python."""
    if isinstance(x, int | float | complex):
        x = jax.typeof(x)
    dtype = jax.dtypes.canonicalize_dtype(x.dtype, allow_extended_dtype=True)
    weak = getattr(x, "weak_type", False)
    return jax.ShapeDtypeStruct(x.shape, dtype, sharding=sharding, weak_type=weak)


def abstract_arrays(arrays: Arrays) -> list[jax.ShapeDtypeStruct]:
    return list(map(abstract_array, arrays))


def abstract_data(batch: PyTree) -> PyTree:
    """A batch with the shapes and dtypes of its arrays and numbers; a loss reads the other leaves
    as they are."""
    return map_where(lambda x: isinstance(x, NUMBERS), abstract_array, batch)


def abstract_tree(tree: PyTree) -> PyTree:
    """The tree with the shapes and dtypes of its arrays."""
    arrays, static = split(tree)
    return join(abstract_arrays(arrays), static)


def map_where(
    holds: Callable[[PyTree], bool],
    fn: Callable[[PyTree], PyTree],
    tree: PyTree,
    *,
    is_leaf: Callable[[PyTree], bool] | None = None,
) -> PyTree:
    """Applies a function to the leaves for which a condition holds, and keeps the others."""

    def of_leaf(x: PyTree) -> PyTree:
        if holds(x):
            return fn(x)
        return x

    return jax.tree.map(of_leaf, tree, is_leaf=is_leaf)


def is_layer_state(x: object) -> bool:
    """Whether a node of a tree is the state of layers, such as running averages.

    It is an `eqx.nn.State`, or a variable of Flax NNX that is not an `nnx.Param`. Its arrays may
    be floating, but they are not parameters.
    """
    # A model has NNX's variables only if the user imported it.
    nnx = sys.modules.get("flax.nnx")
    if nnx is not None and isinstance(x, nnx.Variable):
        return not isinstance(x, nnx.Param)
    return isinstance(x, eqx.nn.State)


def layer_states(tree: PyTree) -> dict[str, PyTree]:
    """Returns the states of layers in a tree, by path."""
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_layer_state)
    return {show_path(path): x for path, x in leaves if is_layer_state(x)}


def is_none(x: object) -> bool:
    return x is None


def show_path(path: KeyPath, root: str = "") -> str:
    """Formats the path of a leaf, such as `layers/wq`; `root` stands for the empty path."""
    return jax.tree_util.keystr(path, simple=True, separator="/") or root


def show_place(path: KeyPath, of: str, root: str = "") -> str:
    """Formats the path of a leaf of data: as `show_path`, or, in a tuple or a list, as Python reads
    it: `batch[0]`, where `of` is `batch`.

    `root` stands for the empty path. Without a name in `of`, it is always as `show_path`.
    """
    indices = (jax.tree_util.SequenceKey, jax.tree_util.FlattenedIndexKey)
    if not (of and path and isinstance(path[0], indices)):
        return show_path(path, root)
    return of + "".join(map(_show_key, path))


def _show_key(key: Any) -> str:
    if isinstance(key, jax.tree_util.DictKey):
        if isinstance(key.key, str):
            return f'["{key.key}"]'
        return f"[{key.key!r}]"
    return str(key)  # `[0]` or `.name`


def leaf_paths(tree: PyTree, kinds: type | UnionType | tuple[type, ...]) -> dict[str, PyTree]:
    """Returns the leaves that are instances of `kinds`, by path, such as `layers/wq`."""
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda x: isinstance(x, kinds))
    return {show_path(path): leaf for path, leaf in leaves if isinstance(leaf, kinds)}
