"""The arrays of a tree as leaves with paths, and as a tree of nodes with names."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from math import prod
from typing import Any

import jax
import jax.tree_util as jtu
import numpy as np

# Arrays with fewer elements per layer are not sharded: communication would cost more than it saves.
LARGE = 4096


@dataclass(frozen=True)
class Leaf:
    """One array: its index in the flattened tree, path, shape and dtype."""

    index: int
    path: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: Any

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


def is_array(x: Any) -> bool:
    return isinstance(x, (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct))


def is_inexact_leaf(leaf: Leaf) -> bool:
    return jax.numpy.issubdtype(leaf.dtype, np.inexact)


def children_of(x: Any) -> list[tuple[Any, Any]]:
    """The (key, child) pairs one level down, or one pair with the key None if `x` is a leaf."""
    pairs, _ = jtu.tree_flatten_with_path(x, is_leaf=lambda y: y is not x)
    return [(keys[0] if keys else None, child) for keys, child in pairs]


def key_name(key: Any) -> str:
    return jtu.keystr((key,), simple=True)


def flat_leaves(tree: Any) -> list[Leaf]:
    """The leaves that are arrays, in flattened order."""
    flat, _ = jtu.tree_flatten_with_path(tree)
    return [
        Leaf(i, tuple(map(key_name, path)), tuple(x.shape), x.dtype)
        for i, (path, x) in enumerate(flat)
        if is_array(x)
    ]


def to_nodes(tree: Any) -> Node:
    """The nodes of `tree`. A tree that is one array becomes a node with one child named ""."""
    top = _to_nodes(tree, (), count())
    if isinstance(top, Leaf):
        return Node((), None, False, {"": top})
    return top if top is not None else Node((), tree, False)


def leaves_below(node: "Node | Leaf") -> Iterator[Leaf]:
    if isinstance(node, Leaf):
        yield node
    else:
        for child in node.children.values():
            yield from leaves_below(child)


def _to_nodes(x: Any, path: tuple[str, ...], counter: Iterator[int]) -> Node | Leaf | None:
    if x is None:
        return None
    pairs = children_of(x)
    if len(pairs) == 1 and pairs[0][0] is None:
        index = next(counter)
        return Leaf(index, path, tuple(x.shape), x.dtype) if is_array(x) else None
    children = {}
    for key, child in pairs:
        name = key_name(key)
        below = _to_nodes(child, (*path, name), counter)
        if below is not None:
            children[name] = below
    keys = [key for key, _ in pairs]
    if all(isinstance(key, jtu.DictKey) for key in keys):
        # JAX sorts dict keys as text, `10` before `2`.
        children = dict(sorted(children.items(), key=lambda item: _natural(item[0])))
    listed = all(isinstance(key, (jtu.SequenceKey, jtu.FlattenedIndexKey)) for key in keys)
    numbered = bool(children) and all(name.isdigit() for name in children)
    return Node(path, x, listed or numbered, children)


def _natural(name: str) -> tuple[tuple[int, str], ...]:
    """A sort key that compares numbers in a name by their value, and after other characters."""
    pieces = re.findall(r"\d+|\D", name)
    return tuple((int(piece), "") if piece.isdecimal() else (-1, piece) for piece in pieces)
