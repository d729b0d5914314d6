"""Why arrays are tensor-parallel, FSDP-sharded or replicated."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import itemgetter
from typing import Any

from ...core._errors import several
from .._mesh_axes import parts, used_axes
from ..program._program import LARGE_CONSTANT, Constant
from ..solver._layout import STORAGE_AXES, StorageLayout, is_large
from ..solver._split_examples import example_parts, is_inside, is_sequence
from ..solver._strategy import Decision, is_fsdp_possible
from ..tree._leaf_plans import ON_STAGES, OVERRIDE, STORED, Reason
from ..tree._leaves import LARGE, Leaf, flat_leaves
from ..tree._overrides import multiples_near
from ._data import ClosedOver, Hindrance
from ._text import grouped, shortened


def batch_sentences(decision: Decision, others: Mapping[str, int]) -> str:
    """What happens to the batch, and to arrays in it that are not rows; empty without one."""
    sentence = _sentence(decision)
    if not others:
        return sentence
    # Arrays of one size are likely of one kind, such as the edges of a graph.
    by_size = grouped(others, others.__getitem__)
    texts: list[str] = []
    for size, names in by_size.items():
        texts.append(f"{shortened(names)} ({size:,})")  # `x (512)`
    listed = several(texts, 6, noun=" sizes")
    rows = f"It has {_sizes(decision)} rows."
    return f"{sentence} {rows} Arrays in it that are not split with them: {listed}."


def batch_sizes(decision: Decision) -> tuple[int, ...]:
    """The sizes of the batch dimension."""
    program = decision.program
    nodes = program.batch.of_inputs
    if program.batch.splits_examples:
        # The dimensions that are split are those of the sequence.
        nodes = [value.nodes[0] for value in program.examples]
    return tuple(sorted(set(map(program.graph.sizes.__getitem__, nodes))))


def _sentence(decision: Decision) -> str:
    """What happens to the batch, and why if it is unusual."""
    batch = decision.program.batch
    if not batch.of_inputs:
        return ""
    if batch.sets:
        return _split_sentence(decision)
    batch_axes = used_axes(decision.batch_axes, decision.sizes)
    used = decision.used_batch_axes
    over = f"{' x '.join(batch_axes)} = {parts(batch_axes, decision.sizes)}"
    split = "replicated"
    if used:
        split = f"split over {_listed(used)}"
    unsplit = ""
    if batch.why_whole:
        unsplit = f" Its examples are not split: {batch.why_whole}."
    # Rows do not divide, and tokens do.
    if batch.splits_examples:
        return (
            f"A batch of {_sizes(decision)} does not divide over {over}, so its sequences are "
            f"split over {_listed(used)}. Attention gathers keys and values."
        )
    if "model" in decision.batch_axes:
        return f"Data parallelism over {_listed(used)}: tensor parallelism would cost more."
    if "fsdp" in decision.model_axes:
        alone = "every device has the full batch"
        if used:
            alone = "the batch is split over data alone"
        why = "The batch is small for this model"
        if is_fsdp_possible(decision.program, decision.sizes):
            why = "FSDP would need more memory than the devices have"
        return f"{why}, so fsdp is used for tensor parallelism as well, and {alone}.{unsplit}"
    if not batch_axes:
        return f"The batch is {split}: data and fsdp have one device each."
    if used == batch_axes:
        return f"The batch is {split}."
    return f"A batch of {_sizes(decision)} does not divide over {over}, so it is {split}.{unsplit}"


def split_examples(decision: Decision) -> dict[str, str]:
    """The axes that examples are split over along dimensions of their own, and what that is."""
    program = decision.program
    if not program.batch.splits_examples:
        return {}
    if not program.batch.sets:
        return dict.fromkeys(decision.used_batch_axes, "context parallel")
    along_sequence = is_sequence(program, example_parts(program.batch.split, decision.sizes))
    use = "domain parallel"
    if along_sequence:
        use = "context parallel"
    uses: dict[str, str] = {}
    for over, places in program.batch.split:
        if is_inside(places):
            uses |= dict.fromkeys(over, use)
    return uses


def _split_sentence(decision: Decision) -> str:
    """Along which dimensions a batch is split, over which axes."""
    arrays = decision.program.batch_arrays
    texts = []
    for over, places in decision.program.batch.split:
        by_dim: dict[int, set[int]] = {}  # the sizes of each dimension, in all arrays
        for place, d in places:
            by_dim.setdefault(d, set()).add(arrays[place].shape[d])
        along = []
        for d in sorted(by_dim):
            sizes = sorted(by_dim[d], reverse=True)
            along.append(f"dimension {d} ({_with_commas(sizes)})")
        texts.append(f"along {_listed(along)} over {_listed(used_axes(over, decision.sizes))}")
    _, places = decision.program.batch.split[0]
    first, _ = places[0]
    rows = arrays[first].shape[0]
    return (
        f"A batch of {rows} is split {_listed(texts)}. Operations that need more of an example "
        "than a device has gather it."
    )


def _with_commas(sizes: Sequence[int]) -> str:
    """`2,048, 1,024 and 512`."""
    return _listed(list(map("{:,}".format, sizes)))


def _sizes(decision: Decision) -> str:
    return _listed(list(map(str, batch_sizes(decision))))


def not_rows(batch: Sequence[Any], decision: Decision) -> dict[str, int]:
    """Arrays of the batch that are not split with it, and the size of their first dimension.

    `batch` is the first of a function's arguments, as a sequence of one.
    """
    leaves = flat_leaves(tuple(batch))
    sizes: dict[str, int] = {}
    for place in decision.program.batch.not_rows:
        leaf = leaves[place]
        # The first key of the path is the place in the sequence.
        sizes["/".join(leaf.path[1:])] = leaf.shape[0]
    return sizes


def _listed(names: Sequence[str]) -> str:
    """`a, b and c`."""
    if len(names) < 2:
        return "".join(names)
    *first, last = names
    return f"{', '.join(first)} and {last}"


_NUMBER = re.compile(r"\d+")
Members = list[tuple[Leaf, int]]  # arrays, and the dimension of each that is split


@dataclass(frozen=True)
class ArraysTogether:
    """Arrays that are sharded along one dimension of the program, or several such sets alike."""

    names: str
    reason: Reason


def _find_sets(leaves: Sequence[Leaf], decision: Decision) -> dict[int, ArraysTogether]:
    """For each class of tensor-parallel dimensions its arrays; layers alike share a set."""
    arrays = list(zip(leaves, decision.program.parameters, decision.parallel_dims, strict=True))
    for place, (constant, value, d) in enumerate(decision.constants):
        path = (f"closed over {constant.name}",)
        leaf = Leaf(len(leaves) + place, path, constant.shape, constant.dtype)
        arrays.append((leaf, value, d))
    members: dict[int, Members] = {}
    for leaf, value, d in arrays:
        if d is not None:
            root = decision.classes[value.nodes[d]]
            members.setdefault(root, []).append((leaf, d))
    over = " x ".join(decision.used_model_axes)
    sets: dict[int, ArraysTogether] = {}

    def without_layers(root: int) -> tuple[object, ...]:
        keys = [(_NUMBER.sub("*", leaf.name), leaf.shape, d) for leaf, d in members[root]]
        return tuple(sorted(keys))

    # Layers alike are one line of the table: `layers/{0..11}/{up,down}`.
    for roots in grouped(members, without_layers).values():
        alike = _set([members[root] for root in roots], over)
        sets |= dict.fromkeys(roots, alike)
    return sets


def _set(alike: Sequence[Members], over: str) -> ArraysTogether:
    """The arrays of sets that differ only in the indices of their layers."""
    # In the order of the tree, in which the sets of layers alternate.
    members = sorted(chain(*alike), key=lambda member: member[0].index)
    names = shortened([leaf.name for leaf, _ in members], limit=6, width=200)
    first = alike[0]
    if len(first) == 1:
        return ArraysTogether(names, Reason("tensor-parallel", f"over {over}, with no other array"))
    sizes = sorted({leaf.shape[d] for leaf, d in first}, reverse=True)
    # Usually one size; a fused matrix has a multiple of it.
    along = " and ".join(map("{:,}".format, sizes[:4]))
    text = f"along {along} over {over}"
    if len(alike) > 1:
        text += f" ({len(alike)} sets of {len(first)})"
    return ArraysTogether(names, Reason("tensor-parallel", text, names))


@dataclass(frozen=True)
class Reasons:
    """The reasons for a decision; `place` is the place of an array in the tree.

    `sets` and `indivisible_links` are by the classes of dimensions. The links belong to a class
    that divides, each with the first linked size that does not.
    """

    leaves: Sequence[Leaf]
    decision: Decision
    sets: Mapping[int, ArraysTogether]
    indivisible_links: Mapping[int, int]

    def of_array(self, layout: StorageLayout, place: int) -> Reason:
        """Why an array is stored as it is."""
        if place in layout.overrides:
            return OVERRIDE
        spec, value = layout.specs[place], self.decision.program.parameters[place]
        d = self.decision.parallel_dims[place]
        entries = tuple(spec)
        if place in self.decision.layered:
            entries = entries[1:]  # the first counts layers
        if d is not None:
            return self.sets[self.decision.classes[value.nodes[d]]].reason
        if any(entries):
            return Reason("fsdp", self.not_computed(place) or STORED)
        if place in self.decision.layered:
            return ON_STAGES
        if place in layout.replicated:
            text = f"{self.not_computed(place)}, and the devices have room for it"
        elif parts(STORAGE_AXES, self.decision.sizes) == 1:
            text = "fsdp and model have one device each"
        elif not is_large(self.decision.program, value):
            text = f"small, fewer than {LARGE:,} elements"
            # If all devices divide the batch, no array is tensor-parallel, whatever its size.
            if "model" not in self.decision.batch_axes:
                text = self.indivisible(place, self.decision.n) or text
        elif not layout.stored_in_parts[place]:
            text = "the budget leaves room for it"
        else:
            text = self.indivisible(place, least=2) or self.not_stored(place)
        return Reason("replicated", text)

    def not_computed(self, place: int) -> str:
        """Why an array is not tensor-parallel; empty where nothing is."""
        # Nothing is tensor-parallel, so that only sizes are of interest.
        n = self.decision.n
        if n == 1 or "model" in self.decision.batch_axes:
            return self.indivisible(place, n)
        # A size of 1 is no reason.
        indivisible = self.indivisible(place, 2)
        if not indivisible:
            return "tensor parallelism would cost more"
        divisible: set[int] = set()
        for size, inner in self._free_dims(place):
            if not inner:
                divisible.add(size)
        if not divisible:
            return indivisible
        along = _with_commas(sorted(divisible, reverse=True))
        return f"{indivisible}, and tensor parallelism along {along} would cost more"

    def indivisible(self, place: int, least: int) -> str:
        """The largest size that rules out tensor parallelism; empty if there is none.

        It is one that the program takes a dimension apart into, or the size of a dimension of at
        least `least` elements.
        """
        reasons: list[tuple[int, str]] = []
        for size, inner in self._free_dims(place):
            is_small = inner == size < least
            if inner == 0 or is_small:
                continue
            why = self._does_not_divide(inner, self.decision.used_model_axes)
            if inner != size and size % inner == 0:
                why = f"{size} is {inner} x {size // inner}, and {why}"
            reasons.append((size, why))
        _, largest = max(reasons, key=itemgetter(0), default=(0, ""))
        return largest

    def _free_dims(self, place: int) -> list[tuple[int, int]]:
        """The sizes of the dimensions that are not blocked and not tensor-parallel, each with the
        size that rules out tensor parallelism along it, which is 0 if it divides."""
        dims: list[tuple[int, int]] = []
        for d, node, size in self._dims(place):
            inner = self.indivisible_links.get(self.decision.classes[node], 0)
            if size % self.decision.n:
                inner = size
            if d != self.decision.parallel_dims[place]:
                dims.append((size, inner))
        return dims

    def not_stored(self, place: int) -> str:
        """Why an array is not FSDP-sharded either."""
        _, _, largest = max(self._dims(place), key=itemgetter(2), default=(0, 0, 0))
        if not largest:
            return "it has no dimension that can be sharded"
        sizes = self.decision.sizes
        # The smallest axis is the one that a size would most likely divide over.
        axis = min(used_axes(("fsdp", "model"), sizes), key=sizes.__getitem__)
        return self._does_not_divide(largest, (axis,))

    def _dims(self, place: int) -> list[tuple[int, int, int]]:
        """The dimensions that are not blocked, with their nodes and sizes."""
        program, classes = self.decision.program, self.decision.classes
        value = program.parameters[place]
        blocked = classes.of(program.graph.blocked)
        dims = []
        for d, (node, size) in enumerate(zip(value.nodes, value.shape, strict=True)):
            if classes[node] not in blocked:
                dims.append((d, node, size))
        return dims

    def _does_not_divide(self, size: int, over: Sequence[str]) -> str:
        n = parts(over, self.decision.sizes)
        devices = f"{' x '.join(over)} = {n}"
        if len(over) == 1:
            devices = f"{over[0]}={n}"
        return f"{size} does not divide over {devices} ({multiples_near(size, n)} would)"


def find_reasons(leaves: Sequence[Leaf], decision: Decision) -> Reasons:
    classes, graph = decision.classes, decision.program.graph
    links: dict[int, int] = {}
    for a, b in graph.links:
        for node, linked in ((a, b), (b, a)):
            # A size of 1 is broadcast, so that it rules nothing out.
            is_indivisible = not classes.divides(linked) and graph.sizes[linked] > 1
            if classes.divides(node) and is_indivisible:
                links.setdefault(classes[node], graph.sizes[linked])
    return Reasons(leaves, decision, _find_sets(leaves, decision), links)


def hindrances(reasons: Reasons) -> tuple[Hindrance, ...]:
    """For tensor-parallel arrays, the sizes that rule out another dimension."""
    names: dict[str, list[str]] = {}  # by the reason
    for place, d in enumerate(reasons.decision.parallel_dims):
        why = reasons.indivisible(place, reasons.decision.n)
        if d is not None and why:
            names.setdefault(why, []).append(reasons.leaves[place].name)
    return tuple(Hindrance(shortened(paths), why) for why, paths in names.items())


def closed_over(reasons: Reasons) -> tuple[ClosedOver, ...]:
    """The large arrays that the function closes over, which are in no state."""
    # Computed with in parts, though each device has all of it.
    split: set[Constant] = set()
    for constant, _, d in reasons.decision.constants:
        if d is not None:
            split.add(constant)
    arrays: list[ClosedOver] = []
    for constant in reasons.decision.program.constants:
        if constant.bytes < LARGE_CONSTANT:
            continue
        axes = ()
        if constant in split:
            axes = reasons.decision.used_model_axes
        sizes, dtype = tuple(constant.shape), str(constant.dtype)
        arrays.append(ClosedOver(constant.name, sizes, dtype, constant.bytes, axes))
    return tuple(arrays)
