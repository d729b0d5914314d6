"""Why arrays are tensor-parallel, FSDP-sharded or replicated."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from ...core._errors import several
from ..program._constants import LARGE_CONSTANT
from ..solver._split_examples import example_parts, is_sequence
from ..solver._strategy import (
    Decision,
    constant_dims,
    is_fsdp_possible,
    parts,
    split_axes,
    used_axes,
)
from ..tree._leaf_plans import Reason
from ..tree._leaves import Leaf, flat_leaves
from ..tree._overrides import multiples_near
from ._data import ClosedOver, Hindrance
from ._text import grouped, shortened


def batch_axes(decision: Decision, axes: Mapping[str, int]) -> tuple[str, ...]:
    """The axes that the batch is split over."""
    return used_axes(split_axes(decision.program, decision.strategy.batch, axes), axes)


def batch_sentences(decision: Decision, axes: Mapping[str, int], others: Mapping[str, int]) -> str:
    """What happens to the batch, and to arrays in it that are not rows; empty without one."""
    by_size = grouped(others, others.__getitem__)
    named = [f"{shortened(names)} ({size:,})" for size, names in by_size.items()]
    sizes, listed = _sizes(decision), several(named, 6, noun=" sizes")
    also = f" It has {sizes} rows. Arrays in it that are not split with them: {listed}."
    return _sentence(decision, axes) + (also if named else "")


def batch_sizes(decision: Decision) -> tuple[int, ...]:
    """The sizes of the batch dimension."""
    program = decision.program
    if program.batch.sequence:
        return tuple(sorted({value.shape[0] for value in program.examples}))
    return tuple(sorted({program.graph.sizes[d] for d in program.batch.given}))


def _sentence(decision: Decision, axes: Mapping[str, int]) -> str:
    """What happens to the batch, and why if it is unusual."""
    strategy, used = decision.strategy, batch_axes(decision, axes)
    wanted = used_axes(strategy.batch, axes)
    split = f"split over {_listed(used)}" if used else "replicated"
    batch, over = decision.program.batch, f"{' x '.join(wanted)} = {parts(wanted, axes)}"
    unsplit = f" Its examples are not split: {batch.whole}." if batch.whole else ""
    if not batch.given:
        return ""
    if batch.sets:
        return _split_sentence(decision, axes)
    if batch.sequence:
        return (
            f"A batch of {_sizes(decision)} does not divide over {over}, so its sequences are "
            f"split over {_listed(used)}. Attention gathers keys and values."
        )
    if "model" in strategy.batch:
        return f"Data parallelism over {_listed(used)}: tensor parallelism would cost more."
    if "fsdp" in strategy.model:
        alone = "the batch is split over data alone" if used else "every device has the full batch"
        why = "The batch is small for this model"
        if is_fsdp_possible(decision.program, axes):
            why = "FSDP would need more memory than the devices have"
        return f"{why}, so fsdp is used for tensor parallelism as well, and {alone}.{unsplit}"
    if not wanted:
        return f"The batch is {split}: data and fsdp have one device each."
    if used == wanted:
        return f"The batch is {split}."
    return f"A batch of {_sizes(decision)} does not divide over {over}, so it is {split}.{unsplit}"


def split_examples(decision: Decision, axes: Mapping[str, int]) -> dict[str, str]:
    """The axes that examples are split over along dimensions of their own, and what that is."""
    program = decision.program
    if not program.batch.sets:
        return {}
    along_sequence = is_sequence(program, example_parts(program.batch.split, axes))
    use = "context parallel" if along_sequence else "domain parallel"
    inside = (over for over, places in program.batch.split if any(d for _, d in places))
    return {axis: use for over in inside for axis in over}


def _split_sentence(decision: Decision, axes: Mapping[str, int]) -> str:
    """Along which dimensions a batch is split, over which axes."""
    arrays, texts = decision.program.batch_arrays, []
    for over, places in decision.program.batch.split:
        by_dim: dict[int, list[int]] = {}
        for place, d in places:
            by_dim.setdefault(d, []).append(arrays[place].shape[d])
        along = [f"dimension {d} ({_sizes_of(sizes)})" for d, sizes in sorted(by_dim.items())]
        texts.append(f"along {_listed(along)} over {_listed(used_axes(over, axes))}")
    rows = arrays[decision.program.batch.split[0][1][0][0]].shape[0]
    return (
        f"A batch of {rows} is split {_listed(texts)}. Operations that need more of an example "
        "than a device has gather it."
    )


def _sizes_of(sizes: Sequence[int]) -> str:
    return _listed([f"{size:,}" for size in sorted(set(sizes), reverse=True)])


def _sizes(decision: Decision) -> str:
    return _listed(list(map(str, batch_sizes(decision))))


def not_rows(batch: Sequence[Any], decision: Decision) -> dict[str, int]:
    """Arrays of the batch that are not split with it, and the size of their first dimension.

    `batch` is the first of a function's arguments, as a sequence of one.
    """
    given = flat_leaves(tuple(batch))
    left_out = [given[place] for place in decision.program.batch.left_out]
    return {"/".join(leaf.path[1:]): leaf.shape[0] for leaf in left_out}


def _listed(names: Sequence[str]) -> str:
    """`a, b and c`."""
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


Members = list[tuple[Leaf, int]]  # arrays, and the dimension of each that is split


@dataclass(frozen=True)
class Set:
    """Arrays that are sharded along one dimension of the program, or several such sets alike."""

    names: str
    reason: Reason


def _find_sets(
    leaves: Sequence[Leaf], decision: Decision, axes: Mapping[str, int]
) -> dict[int, Set]:
    """For each class of tensor-parallel dimensions its arrays; layers alike share a set."""
    split = list(zip(leaves, decision.program.parameters, decision.computed, strict=True))
    for place, (one, value, d) in enumerate(constant_dims(decision)):
        leaf = Leaf(len(leaves) + place, (f"closed over {one.name}",), one.shape, one.dtype)
        split.append((leaf, value, d))
    members: dict[int, Members] = {}
    for leaf, value, d in split:
        if d is not None:
            members.setdefault(decision.classes[value.dims[d]], []).append((leaf, d))
    alike = grouped(members, lambda root: _relative(members[root]))
    over, sets = " x ".join(used_axes(decision.strategy.model, axes)), {}
    for roots in alike.values():
        sets |= dict.fromkeys(roots, _set([members[root] for root in roots], over))
    return sets


def _set(found: Sequence[Members], over: str) -> Set:
    count, size = len(found), len(found[0])
    # In the order of the tree, in which the sets of layers alternate.
    leaves = sorted((leaf for members in found for leaf, _ in members), key=lambda leaf: leaf.index)
    names = shortened([leaf.name for leaf in leaves], limit=6, width=200)
    if size == 1:
        return Set(names, Reason("tensor-parallel", f"over {over}, with no other array"))
    sizes = sorted({leaf.shape[d] for leaf, d in found[0]}, reverse=True)
    along = " and ".join(f"{size:,}" for size in sizes[:4])
    sets = f" ({count} sets of {size})" if count > 1 else ""
    return Set(names, Reason("tensor-parallel", f"along {along} over {over}{sets}", names))


def _relative(members: Members) -> Any:
    """A key that is the same for two sets that differ only in the indices of their layers."""
    paths = [re.split(r"(\d+)", leaf.name) for leaf, _ in members]
    indices = [[(tuple(p[:i:2]), int(p[i])) for i in range(1, len(p), 2)] for p in paths]
    least: dict[tuple[str, ...], int] = {}
    for before, index in chain(*indices):
        least[before] = min(least.get(before, index), index)
    numbers = [tuple(index - least[before] for before, index in some) for some in indices]
    shapes = [(leaf.shape, d) for leaf, d in members]
    return tuple(sorted(zip([tuple(p[::2]) for p in paths], numbers, shapes, strict=True)))


@dataclass(frozen=True)
class Reasons:
    """The reasons for a decision; `place` is the place of an array in the tree.

    `sets` and `indivisible_links` are by the classes of dimensions. The links belong to a class
    that divides, each with the first linked size that does not.
    """

    leaves: Sequence[Leaf]
    decision: Decision
    axes: Mapping[str, int]
    sets: Mapping[int, Set]
    indivisible_links: Mapping[int, int]

    @property
    def over(self) -> tuple[str, ...]:
        """The axes of tensor parallelism with more than one device."""
        return used_axes(self.decision.strategy.model, self.axes)

    @property
    def n(self) -> int:
        """The number of devices of these axes."""
        return parts(self.over, self.axes)

    def computed(self, place: int, d: int) -> Reason:
        """The reason for an array that is tensor-parallel along dimension `d`."""
        value = self.decision.program.parameters[place]
        return self.sets[self.decision.classes[value.dims[d]]].reason

    def not_computed(self, place: int) -> str:
        """Why an array is not tensor-parallel; empty where nothing is."""
        if self.n == 1 or "model" in self.decision.strategy.batch:
            return self.indivisible(place, self.n)
        indivisible = self.indivisible(place, 2)
        if not indivisible:
            return "tensor parallelism would cost more"
        divisible = sorted({size for _, size, inner in self._free_dims(place) if not inner})
        if not divisible:
            return indivisible
        along = _listed([f"{size:,}" for size in reversed(divisible)])
        return f"{indivisible}, and tensor parallelism along {along} would cost more"

    def indivisible(self, place: int, least: int) -> str:
        """The largest size that rules out tensor parallelism; empty if there is none.

        It is one that the program takes a dimension apart into, or the size of a dimension of at
        least `least` elements.
        """
        reasons: list[tuple[int, str]] = []
        for _, size, inner in self._free_dims(place):
            if inner and inner != size:
                of = f"{size} is {inner} x {size // inner}, and " if size % inner == 0 else ""
                reasons.append((size, of + self._does_not_divide(inner, self.over)))
            elif inner and size >= least:
                reasons.append((size, self._does_not_divide(size, self.over)))
        _, largest = max(reasons, key=lambda reason: reason[0], default=(0, ""))
        return largest

    def _free_dims(self, place: int) -> list[tuple[int, int, int]]:
        """The dimensions that are not blocked and not tensor-parallel.

        Each has its index, its size and the size that rules out tensor parallelism along it, which
        is 0 if it divides.
        """
        dims = []
        for d, node, size in self._dims(place):
            if d == self.decision.computed[place]:
                continue
            inner = self.indivisible_links.get(self.decision.classes[node], 0)
            if size % self.n:
                inner = size
            dims.append((d, size, inner))
        return dims

    def not_stored(self, place: int) -> str:
        """Why an array is not FSDP-sharded either."""
        largest = max((size for _, _, size in self._dims(place)), default=0)
        if not largest:
            return "it has no dimension that can be sharded"
        axis = min(used_axes(("fsdp", "model"), self.axes), key=self.axes.__getitem__)
        return self._does_not_divide(largest, (axis,))

    def _dims(self, place: int) -> list[tuple[int, int, int]]:
        """The dimensions that are not blocked, with their nodes and sizes."""
        program = self.decision.program
        value, classes = program.parameters[place], self.decision.classes
        blocked = classes.of(program.graph.blocked)
        dims = zip(range(len(value.dims)), value.dims, value.shape, strict=True)
        return [(d, node, size) for d, node, size in dims if classes[node] not in blocked]

    def _does_not_divide(self, size: int, over: Sequence[str]) -> str:
        n = parts(over, self.axes)
        shown = f"{' x '.join(over)}{'=' if len(over) == 1 else ' = '}{n}"
        return f"{size} does not divide over {shown} ({multiples_near(size, n)} would)"


def find_reasons(leaves: Sequence[Leaf], decision: Decision, axes: Mapping[str, int]) -> Reasons:
    classes, graph = decision.classes, decision.program.graph
    links: dict[int, int] = {}
    for a, b in graph.links:
        for one, other in ((a, b), (b, a)):
            if classes.divides(one) and not classes.divides(other) and graph.sizes[other] > 1:
                links.setdefault(classes[one], graph.sizes[other])
    return Reasons(leaves, decision, axes, _find_sets(leaves, decision, axes), links)


def hindrances(reasons: Reasons) -> tuple[Hindrance, ...]:
    """For tensor-parallel arrays, the sizes that rule out another dimension."""
    split = [place for place, d in enumerate(reasons.decision.computed) if d is not None]
    found = grouped(split, lambda place: reasons.indivisible(place, reasons.n))
    named = {why: shortened([reasons.leaves[p].name for p in found[why]]) for why in found if why}
    return tuple(Hindrance(names, why) for why, names in named.items())


def closed_over(reasons: Reasons) -> tuple[ClosedOver, ...]:
    """The large arrays that the function closes over, which are in no state."""
    split = {one for one, _, d in constant_dims(reasons.decision) if d is not None}
    large = [one for one in reasons.decision.program.constants if one.bytes >= LARGE_CONSTANT]
    over = lambda one: reasons.over if one in split else ()
    return tuple(
        ClosedOver(one.name, tuple(one.shape), str(one.dtype), one.bytes, over(one))
        for one in large
    )
