"""A tree of arrays as nodes with names, so that rules can look at neighbours."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from math import prod
from typing import Any

import jax
import jax.tree_util as jtu
import numpy as np


@dataclass(frozen=True)
class Leaf:
    """One array: where it is in the flattened tree, its path, and what it holds."""

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
    """A module, dict or list: `owner` is the object itself, `children` are in their own order."""

    path: tuple[str, ...]
    owner: Any
    ordered: bool
    children: "dict[str, Node | Leaf]" = field(default_factory=dict)


def is_array(x: Any) -> bool:
    return isinstance(x, (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct))


def is_inexact(leaf: Leaf) -> bool:
    return jax.numpy.issubdtype(leaf.dtype, np.inexact)


def children_of(x: Any) -> list[tuple[Any, Any]]:
    """The (key, child) pairs one level down; one pair with no key if `x` is a leaf."""
    pairs, _ = jtu.tree_flatten_with_path(x, is_leaf=lambda y: y is not x)
    return [(keys[0] if keys else None, child) for keys, child in pairs]


def key_name(key: Any) -> str:
    return jtu.keystr((key,), simple=True)


def flat_leaves(tree: Any) -> list[Leaf | None]:
    """One entry for each leaf in flattened order; None where the leaf is no array."""
    flat, _ = jtu.tree_flatten_with_path(tree)
    return [
        Leaf(i, tuple(map(key_name, path)), tuple(x.shape), x.dtype) if is_array(x) else None
        for i, (path, x) in enumerate(flat)
    ]


def grow(tree: Any) -> Node:
    """The nodes of `tree`; an array at the top hangs below a node without a name."""
    counter = count()
    top = _grow(tree, (), counter)
    if isinstance(top, Leaf):
        return Node((), None, False, {"": top})
    return top if top is not None else Node((), tree, False)


def leaves_below(node: "Node | Leaf") -> Iterator[Leaf]:
    if isinstance(node, Leaf):
        yield node
    else:
        for child in node.children.values():
            yield from leaves_below(child)


def _grow(x: Any, path: tuple[str, ...], counter: Iterator[int]) -> Node | Leaf | None:
    if x is None:
        return None
    pairs = children_of(x)
    if len(pairs) == 1 and pairs[0][0] is None:
        index = next(counter)
        return Leaf(index, path, tuple(x.shape), x.dtype) if is_array(x) else None
    grown = {}
    for key, child in pairs:
        name = key_name(key)
        below = _grow(child, (*path, name), counter)
        if below is not None:
            grown[name] = below
    keys = [key for key, _ in pairs]
    return Node(path, x, _ordered(keys, grown), _in_order(keys, grown))


def _ordered(keys: list[Any], grown: dict[str, Any]) -> bool:
    """Whether the order of the children is that in which they are applied."""
    if all(isinstance(key, (jtu.SequenceKey, jtu.FlattenedIndexKey)) for key in keys):
        return True
    return bool(grown) and all(name.isdigit() for name in grown)


def _in_order(keys: list[Any], grown: dict[str, Any]) -> dict[str, Any]:
    """Dict keys arrive sorted as text (`10` before `2`): sort them by their numbers."""
    if any(not isinstance(key, jtu.DictKey) for key in keys):
        return grown
    return dict(sorted(grown.items(), key=lambda item: _natural(item[0])))


def _natural(name: str) -> tuple[tuple[int, str], ...]:
    parts, digits = [], ""
    for letter in name:
        if letter.isdigit():
            digits += letter
            continue
        if digits:
            parts.append((int(digits), ""))
            digits = ""
        parts.append((-1, letter))
    if digits:
        parts.append((int(digits), ""))
    return tuple(parts)
