"""The arrays of a tree as leaves with paths, and as a tree of nodes with names."""

import re
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from itertools import count
from math import prod
from typing import Any, TypeGuard

import jax
import jax.tree_util as jtu
import numpy as np
from jaxtyping import PyTree

ArrayLike = jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct

# Arrays with fewer elements per layer are not FSDP-sharded: communication would cost more than it
# saves.
LARGE = 4096


@dataclass(frozen=True)
class Leaf:
    """One array: its index in the flattened tree, path, shape and dtype."""

    index: int
    path: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: Any  # of NumPy, or of JAX's keys

    @property
    def name(self) -> str:
        return "/".join(self.path)

    @property
    def size(self) -> int:
        return prod(self.shape)

    @property
    def bytes(self) -> int:
        return self.size * self.dtype.itemsize


@dataclass(frozen=True)
class Node:
    """A module, dict or list.

    `owner` is the object itself. `ordered` is whether its children are applied in their order.
    """

    path: tuple[str, ...]
    owner: Any
    ordered: bool
    children: "dict[str, Node | Leaf]" = field(default_factory=dict)


def is_array(x: object) -> TypeGuard[ArrayLike]:
    return isinstance(x, ArrayLike)


def is_inexact_leaf(leaf: Leaf) -> bool:
    return jax.numpy.issubdtype(leaf.dtype, np.inexact)


def key_name(key: Hashable) -> str:
    return jtu.keystr((key,), simple=True)


def flat_leaves(tree: PyTree) -> list[Leaf]:
    """The leaves that are arrays, in flattened order."""
    leaves: list[Leaf] = []
    flat, _ = jtu.tree_flatten_with_path(tree)
    for index, (path, x) in enumerate(flat):
        if is_array(x):
            leaves.append(Leaf(index, tuple(map(key_name, path)), tuple(x.shape), x.dtype))
    return leaves


def to_nodes(tree: PyTree) -> Node:
    """The nodes of `tree`. A tree that is one array becomes a node with one child named ""."""
    root = _to_nodes(tree, (), count())
    if isinstance(root, Leaf):
        return Node((), None, False, {"": root})
    if root is None:
        return Node((), tree, False)
    return root


def leaves_below(node: "Node | Leaf") -> Iterator[Leaf]:
    if isinstance(node, Leaf):
        yield node
    else:
        for child in node.children.values():
            yield from leaves_below(child)


def _to_nodes(x: PyTree, path: tuple[str, ...], indices: Iterator[int]) -> Node | Leaf | None:
    """The node of a subtree; None if it has no array. Leaves take their index from `indices`."""
    if x is None:
        return None
    # One level down: a leaf is its own only child, with an empty path of keys.
    flat, _ = jtu.tree_flatten_with_path(x, is_leaf=lambda y: y is not x)
    if len(flat) == 1 and not flat[0][0]:
        index = next(indices)  # counts leaves that are not arrays too
        if not is_array(x):
            return None
        return Leaf(index, path, tuple(x.shape), x.dtype)
    children: dict[str, Node | Leaf] = {}
    keys: list[Hashable] = []
    for (key, *_), child in flat:
        keys.append(key)
        name = key_name(key)
        node = _to_nodes(child, (*path, name), indices)
        if node is not None:
            children[name] = node
    # Dicts are unordered for JAX, and modules have the order of their fields.
    key_types = set(map(type, keys))
    if key_types == {jtu.DictKey}:
        # JAX sorts dict keys as text, `10` before `2`.
        children = {name: children[name] for name in sorted(children, key=_by_numbers)}
    is_list = key_types <= {jtu.SequenceKey, jtu.FlattenedIndexKey}
    # Names such as "0" and "1", of an `nn.Sequential` in Flax, are those of layers in order.
    is_numbered = bool(children) and all(map(str.isdigit, children))
    return Node(path, x, is_list or is_numbered, children)


def _by_numbers(name: str) -> list[tuple[int, str]]:
    """A sort key that compares numbers in a name by their value, and after other characters."""
    key: list[tuple[int, str]] = []
    for part in re.findall(r"\d+|\D", name):
        if part.isdecimal():
            key.append((int(part), ""))
        else:
            key.append((-1, part))
    return key
