"""Which arrays are computed split together, by name."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..choice.dataflow import Decision, constant_dims
from ..nodes import Leaf
from .braces import shortened

Members = list[tuple[Leaf, int]]  # arrays, and the dimension of each that is split


@dataclass(frozen=True)
class Set:
    """Arrays that are split along one dimension of the program, or several such sets alike."""

    names: str
    reason: str


def find_sets(
    leaves: Sequence[Leaf], decision: Decision, axes: Mapping[str, int]
) -> dict[int, Set]:
    """For each class of dimensions that is computed split, its arrays; layers alike share a set."""
    members: dict[int, Members] = {}
    parameters = decision.program.parameters
    for leaf, value, d in zip(leaves, parameters, decision.computed, strict=True):
        if d is not None:
            members.setdefault(decision.classes[value.dims[d]], []).append((leaf, d))
    for place, (one, value, d) in enumerate(constant_dims(decision)):
        if d is not None:
            leaf = Leaf(len(leaves) + place, (f"closed over {one.name}",), one.shape, one.dtype)
            members.setdefault(decision.classes[value.dims[d]], []).append((leaf, d))
    alike: dict[Any, list[int]] = {}
    for root, found in members.items():
        alike.setdefault(_relative(found), []).append(root)
    over = " x ".join(axis for axis in decision.way.model if axes[axis] > 1)
    sets: dict[int, Set] = {}
    for roots in alike.values():
        one = _set([members[root] for root in roots], over)
        sets.update(dict.fromkeys(roots, one))
    return sets


def _set(found: Sequence[Members], over: str) -> Set:
    count, size = len(found), len(found[0])
    # In the order of the tree, in which the sets of layers mix.
    leaves = sorted((leaf for members in found for leaf, _ in members), key=lambda leaf: leaf.index)
    names = shortened([leaf.name for leaf in leaves], limit=6, width=200)
    if size == 1:
        return Set(names, f"computed split over {over}, with no other array")
    sizes = sorted({leaf.shape[d] for leaf, d in found[0]}, reverse=True)
    along = " and ".join(f"{size:,}" for size in sizes[:4])
    sets = f" ({count} sets of {size})" if count > 1 else ""
    return Set(names, f"computed split over {over}, together along {along}{sets}: {names}")


def _relative(members: Members) -> Any:
    """The same for two sets if their paths differ only by where they are in lists of layers."""
    paths = [(re.split(r"(\d+)", leaf.name), leaf.shape, d) for leaf, d in members]
    least: dict[tuple[str, ...], int] = {}
    for parts, _, _ in paths:
        for place in range(1, len(parts), 2):
            key = tuple(parts[:place:2])
            least[key] = min(least.get(key, int(parts[place])), int(parts[place]))
    return tuple(sorted((*_from(parts, least), shape, d) for parts, shape, d in paths))


def _from(parts: Sequence[str], least: Mapping[tuple[str, ...], int]) -> tuple[Any, ...]:
    numbers = tuple(
        int(parts[place]) - least[tuple(parts[:place:2])] for place in range(1, len(parts), 2)
    )
    return tuple(parts[::2]), numbers
