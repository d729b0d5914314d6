"""Why arrays are computed split, or are not."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..solver._strategy import Decision, batch_dims, constant_dims, parts
from ..tree._leaves import Leaf, flat_leaves
from ._text import shortened

# Sizes of arrays that came with the batch and are no rows.
_SHOWN = 6


def batch_axes(decision: Decision, axes: Mapping[str, int]) -> list[str]:
    """The axes that the batch is split over: fewer than the plan wants if it does not divide."""
    used = [axis for axis in decision.way.batch if axes[axis] > 1]
    while used and not batch_dims(decision.program, parts(used, axes)).roots:
        used = used[:-1]
    return used


def batch_sentences(decision: Decision, axes: Mapping[str, int], others: Mapping[str, int]) -> str:
    """What happens to the batch, and to what came with it and is no rows; empty without one."""
    by_size: dict[int, list[str]] = {}
    for name, size in others.items():
        by_size.setdefault(size, []).append(name)
    named = [f"{shortened(names)} ({size:,})" for size, names in by_size.items()]
    more = f" and {len(named) - _SHOWN} more sizes" if len(named) > _SHOWN else ""
    listed = ", ".join(named[:_SHOWN]) + more
    also = f" It has {_sizes(decision)} rows; arrays in it that are not taken as rows: {listed}."
    return _sentence(decision, axes) + (also if named else "")


def _sizes(decision: Decision) -> str:
    program = decision.program
    return _listed([f"{n}" for n in sorted({program.graph.sizes[d] for d in program.batch.given})])


def _sentence(decision: Decision, axes: Mapping[str, int]) -> str:
    """What happens to the batch, and why where that is not the usual."""
    program, way = decision.program, decision.way
    if not program.batch.given:
        return ""
    wanted = [axis for axis in way.batch if axes[axis] > 1]
    used = batch_axes(decision, axes)
    split = f"split over {_listed(used)}" if used else "whole on every device"
    if "model" in way.batch:
        return f"The batch is {split}: nothing is worth computing split over model."
    if "fsdp" in way.model:
        alone = "split over data alone" if used else "whole on every device"
        return (
            "There are few examples for so many parameters: arrays are computed split over fsdp "
            f"too, and the batch is {alone}."
        )
    if not wanted:
        return f"The batch is {split}: data and fsdp have one device each."
    if used == wanted:
        return f"The batch is {split}."
    over = f"{' x '.join(wanted)} = {parts(wanted, axes)}"
    return f"A batch of {_sizes(decision)} does not divide over {over}: it is {split}."


def not_rows(batch: Sequence[Any], decision: Decision) -> dict[str, int]:
    """Arrays of the batch that are not split with it, and the size of their first dimension.

    `batch` is the first of a function's arguments, alone.
    """
    given = [leaf for leaf in flat_leaves(tuple(batch)) if leaf is not None]
    left_out = [given[place] for place in decision.program.batch.left_out]
    return {"/".join(leaf.path[1:]): leaf.shape[0] for leaf in left_out}


def _listed(names: Sequence[str]) -> str:
    """`a, b and c`."""
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


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
    for pieces, _, _ in paths:
        for place in range(1, len(pieces), 2):
            key = tuple(pieces[:place:2])
            least[key] = min(least.get(key, int(pieces[place])), int(pieces[place]))
    return tuple(sorted((*_from(parts, least), shape, d) for parts, shape, d in paths))


def _from(parts: Sequence[str], least: Mapping[tuple[str, ...], int]) -> tuple[Any, ...]:
    numbers = tuple(
        int(parts[place]) - least[tuple(parts[:place:2])] for place in range(1, len(parts), 2)
    )
    return tuple(parts[::2]), numbers


@dataclass(frozen=True)
class Reasons:
    """The reasons behind a decision; `place` is that of an array among the tree's."""

    decision: Decision
    axes: Mapping[str, int]
    sets: Mapping[int, Set]
    snags: Mapping[int, int]

    def computed(self, place: int, d: int) -> str:
        """What is split together with an array, and along what."""
        value = self.decision.program.parameters[place]
        return self.sets[self.decision.classes[value.dims[d]]].reason

    def not_computed(self, place: int) -> str:
        """Why an array is not computed split; empty where nothing is."""
        n = parts(self.decision.way.model, self.axes)
        if n == 1 or "model" in self.decision.way.batch:
            return self.indivisible(place, n)
        return self.indivisible(place, 2) or "computing it split would cost more"

    def indivisible(self, place: int, least: int) -> str:
        """A size that stands in the way of computing it split.

        That is one that the program takes a dimension apart into, or that of a dimension, if it
        is at least so large.
        """
        program, over = self.decision.program, self.decision.way.model
        n, value = parts(over, self.axes), program.parameters[place]
        for d, (node, size) in enumerate(zip(value.dims, value.shape, strict=True)):
            if node in program.graph.blocked or d == self.decision.computed[place]:
                continue
            if size % n == 0 and (inner := self.snags.get(self.decision.classes[node])):
                of = f"{size} is {inner} x {size // inner}, and " if size % inner == 0 else ""
                return of + self._trouble(inner, over)
            if size % n and size >= least:
                return self._trouble(size, over)
        return ""

    def not_stored(self, place: int) -> str:
        """Why an array is not even stored split."""
        value, blocked = (
            self.decision.program.parameters[place],
            self.decision.program.graph.blocked,
        )
        sizes = [s for node, s in zip(value.dims, value.shape, strict=True) if node not in blocked]
        axis = min((a for a in ("fsdp", "model") if self.axes[a] > 1), key=lambda a: self.axes[a])
        if not any(sizes):
            return "it has no dimension that may be split"
        return self._trouble(max(sizes), (axis,))

    def _trouble(self, size: int, over: Sequence[str]) -> str:
        n, names = parts(over, self.axes), [axis for axis in over if self.axes[axis] > 1]
        shown = f"{names[0]}={n}" if len(names) == 1 else f"{' x '.join(names)} = {n}"
        below = size // n * n
        near = f"{below} or {below + n}" if below else f"{n}"
        return f"{size} does not divide over {shown} ({near} would)"


def find_reasons(leaves: Sequence[Leaf], decision: Decision, axes: Mapping[str, int]) -> Reasons:
    return Reasons(decision, axes, find_sets(leaves, decision, axes), _snags(decision))


def hindrances(reasons: Reasons, leaves: Sequence[Leaf]) -> list[dict[str, str]]:
    """Of arrays that are computed split: why not along another dimension, if that is its size."""
    n = parts(reasons.decision.way.model, reasons.axes)
    found: dict[str, list[str]] = {}
    for place, leaf in enumerate(leaves):
        if reasons.decision.computed[place] is not None and (why := reasons.indivisible(place, n)):
            found.setdefault(why, []).append(leaf.name)
    return [{"arrays": shortened(names), "why": why} for why, names in found.items()]


def _snags(decision: Decision) -> dict[int, int]:
    """For classes that divide, the first size that they are linked to and that does not."""
    classes, graph = decision.classes, decision.program.graph
    found: dict[int, int] = {}
    for a, b in graph.links:
        for one, other in ((a, b), (b, a)):
            if classes.divides(one) and not classes.divides(other) and graph.sizes[other] > 1:
                found.setdefault(classes[one], graph.sizes[other])
    return found
