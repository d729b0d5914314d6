"""Finds dimensions along which the examples of a batch with few rows are split over the devices.

These are the tokens of a sequence, the rows of a pair matrix, the height of an image, or the nodes
and edges of a graph. An operation that needs more of an example than a device has gathers it, or
exchanges halos with the neighbouring devices.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, combinations

from ...core._target import divided_into
from ...distributed._mesh import BATCH_AXES
from .._mesh_axes import parts, used_axes
from ..program._batch import BatchNodes, Split, SplitNodes
from ..program._batch_dims import batch_dims
from ..program._classes import Classes
from ..program._graph import Graph
from ..program._program import Program

# A dimension of one of the batch's arrays: the place of the array, and the dimension.
_Place = tuple[int, int]


def needs_split(program: Program, count: int) -> bool:
    """Whether a batch cannot be split over `count` devices by rows, but its examples may be."""
    has_inner = any(len(value.nodes) > 1 for value in program.examples)
    return count > 1 and has_inner and not batch_dims(program, count).is_split


def split_tokens(program: Program, count: int, trace: Callable[[], Program]) -> Program:
    """The program with all dimensions of examples in place of rows; `trace` traces it again.

    If they cannot be split, it has the reason as `batch.why_whole`.
    """
    if not _why_indivisible(program, count):
        # Only a program whose sizes divide is traced again, which takes as long as the first trace.
        program = trace_in_parts(count, trace)
    inner = ExampleDims(program, count)
    free = tuple(inner.free(inner.places))
    if free:
        return replace(program, batch=BatchNodes(free, splits_examples=True))
    why = _why_indivisible(program, count) or "an operation of the program needs all of it"
    # A loop over positions, as of a recurrence, needs one after the other.
    looped = inner.classes.of(program.graph.stacks)
    if not looped.isdisjoint(inner.classes.of(inner.even(inner.places))):
        why = "the program iterates over the sequence"
    return replace(program, batch=replace(program.batch, why_whole=why))


def is_sequence(program: Program, count: int) -> bool:
    """Whether a program with split examples has one dimension to split in each array, as tokens."""
    places = ExampleDims(program, count).places
    return program.batch.splits_examples and len(dict(places)) == len(places)


def trace_in_parts(count: int, trace: Callable[[], Program]) -> Program:
    """Traces a program again: attention and losses have a dimension for the parts."""
    with divided_into(count):
        return trace()


def _why_indivisible(program: Program, count: int) -> str:
    """The reason if `count` devices divide no dimension of an example, and `""` if they do."""
    inner = ExampleDims(program, count)
    if inner.even(inner.places):
        return ""
    sequence = set(inner.reached(inner.places))
    if not sequence:
        return (
            "none of its dimensions is a sequence, but for those that arrays of the model have. If "
            "one is a table of positions, add `table[jnp.arange(size)]` instead of the table"
        )
    sizes: set[int] = set()
    for value in program.examples:
        for node in sequence.intersection(value.nodes[1:]):
            sizes.add(program.graph.sizes[node])
    numbers = " and ".join(map("{:,}".format, sorted(sizes)))
    return f"{numbers} tokens do not divide either"


class ExampleDims:
    """The dimensions of the examples of a program, for splitting them over `count` devices.

    Those that belong to parameters are left out. `components` are dimensions of the batch's arrays
    that are linked, whether they divide or not, and `places` all of them.
    """

    def __init__(self, program: Program, count: int):
        self.program, self.graph = program, program.graph
        self.classes = Classes(program.graph, count, soft=True, only_hard=program.owned)
        self._anywhere = Classes(program.graph, 1, soft=True, least=2, only_hard=program.owned)
        components: dict[int, list[_Place]] = {}
        for array, value in enumerate(program.batch_arrays):
            if value not in program.examples:
                continue
            # The first dimension counts examples.
            for d, node in enumerate(value.nodes[1:], start=1):
                if program.graph.sizes[node] > 1:
                    components.setdefault(self._anywhere[node], []).append((array, d))
        self.components = list(components.values())
        self.places = list(chain(*self.components))

    def reached(self, places: Iterable[_Place]) -> list[int]:
        """The nodes that are linked to dimensions of the batch, and belong to no parameter."""
        arrays = self.program.batch_arrays
        roots = self._anywhere.of(arrays[array].nodes[d] for array, d in places)
        of_parameters = self.classes.of(self.program.owned)
        reached: list[int] = []
        for node in range(len(self.graph.sizes)):
            if self._anywhere[node] in roots and self.classes[node] not in of_parameters:
                reached.append(node)
        return reached

    def even(self, places: Iterable[_Place]) -> list[int]:
        """Those that the devices divide."""
        sizes, divides = self.graph.sizes, self.classes.divides
        return [node for node in self.reached(places) if sizes[node] > 1 and divides(node)]

    def free(self, places: Iterable[_Place]) -> list[int]:
        """Those that can be split: no operation needs all of them, and no loop is over them."""
        rigid = _rigid(self.graph, self.classes)
        return [node for node in self.even(places) if self.classes[node] not in rigid]

    def choices(self) -> list[tuple[_Place, ...]]:
        """Sets of dimensions to split, of which each array of the batch has at most one class."""
        # Of several dimensions of an array in a component, the first is split.
        firsts: list[dict[int, int]] = []  # by component, the dimension of each of its arrays
        for places in self.components:
            if self.free(places):
                firsts.append(dict(sorted(places, reverse=True)))
        choices: dict[tuple[_Place, ...], None] = {}
        for first in firsts:
            # With it, the dimensions of arrays that it has none of.
            split = dict(first)
            for other in firsts:
                if split.keys().isdisjoint(other):
                    split |= other
            choices[tuple(sorted(split.items()))] = None
        return list(choices)


def _rigid(graph: Graph, classes: Classes) -> frozenset[int]:
    """The classes with a dimension of which an operation needs all, or that a loop is over."""
    return classes.of(graph.blocked - graph.near)


def constrained_split(program: Program, sizes: Mapping[str, int]) -> Split:
    """What the program itself asks for, by constraints on arrays of its batch; empty if it does
    not split examples."""
    first = program.traced.arrays
    inputs = program.scope.jaxpr.invars[first : first + program.traced.batch]
    places_by_axes: dict[tuple[str, ...], list[_Place]] = {}
    splits_examples = False
    for constraint in program.graph.constraints:
        (operand,) = constraint.source[-1].invars
        if operand not in inputs:
            continue
        array = inputs.index(operand)
        for d, axes in enumerate(constraint.axes):
            over = used_axes(axes or (), sizes)
            if over:
                places_by_axes.setdefault(over, []).append((array, d))
                splits_examples |= d > 0
    if not splits_examples:
        return ()
    return tuple(zip(places_by_axes, map(tuple, places_by_axes.values()), strict=True))


# The program, traced with a number of parts of its sequences.
ProgramInParts = Callable[[int], Program]


def splits_of_one(in_parts: ProgramInParts, sizes: Mapping[str, int]) -> Iterator[Split]:
    """Ways to split one dimension of the examples, over the batch's axes or all axes."""
    for axes in _axes(sizes):
        for places in _choices(in_parts, axes, sizes):
            yield ((axes, places),)
        # Rows are split over some of the axes, and a dimension over the others.
        for first, rest in _halves(axes):
            if not batch_dims(in_parts(1), parts(first, sizes)).is_split:
                continue
            rows: list[_Place] = []
            for array, value in enumerate(in_parts(1).batch_arrays):
                if value.nodes and value.nodes[0] in in_parts(1).batch.of_inputs:
                    rows.append((array, 0))
            for places in _choices(in_parts, rest, sizes):
                yield (first, tuple(rows)), (rest, places)
        program = in_parts(1)
        if not program.batch.not_rows:
            continue
        # The first dimensions of all arrays differ, as those of the nodes and edges of one graph.
        classes = Classes(program.graph, parts(axes, sizes), soft=True)
        rigid = set(_rigid(program.graph, classes))
        for value in program.parameters:
            rigid |= classes.of(value.nodes)
        leading: list[_Place] = []
        for array, value in enumerate(program.batch_arrays):
            first = value.nodes[:1]
            if any(map(classes.divides, first)) and rigid.isdisjoint(classes.of(first)):
                leading.append((array, 0))
        if leading:
            yield ((axes, tuple(leading)),)


def splits_of_two(in_parts: ProgramInParts, sizes: Mapping[str, int]) -> Iterator[Split]:
    """Ways to split two dimensions of the examples, each over some of the axes."""
    for axes in _axes(sizes):
        for first, rest in _halves(axes):
            for places in _choices(in_parts, first, sizes):
                for other in _choices(in_parts, rest, sizes):
                    if set(places).isdisjoint(other):
                        yield (first, places), (rest, other)


def _axes(sizes: Mapping[str, int]) -> list[tuple[str, ...]]:
    """The axes of a batch, and all axes, without those of size 1."""
    of_batch, of_all = used_axes(BATCH_AXES, sizes), used_axes((*BATCH_AXES, "model"), sizes)
    return list(filter(None, dict.fromkeys((of_batch, of_all))))


def _choices(
    in_parts: ProgramInParts, axes: tuple[str, ...], sizes: Mapping[str, int]
) -> list[tuple[_Place, ...]]:
    count = parts(axes, sizes)
    return ExampleDims(in_parts(count), count).choices()


def example_parts(split: Split, sizes: Mapping[str, int]) -> int:
    """The number of parts into which examples are split."""
    inside: list[str] = []
    for axes, places in split:
        if is_inside(places):
            inside.extend(axes)
    return parts(inside, sizes)


def is_inside(places: Iterable[_Place]) -> bool:
    """Whether any of some dimensions is one of examples, and not the first, which counts them."""
    return any(d > 0 for _, d in places)


def _halves(axes: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], tuple[str, ...]]]:
    """The ways to divide axes between two dimensions."""
    for count in range(1, len(axes)):
        for first in combinations(axes, count):
            yield first, tuple(axis for axis in axes if axis not in first)


def apply_split(program: Program, split: Split, sizes: Mapping[str, int]) -> Program | None:
    """The program with dimensions of its batch split over axes; None if a dimension does not
    divide, or the batch has other arrays."""
    arrays, rows = program.batch_arrays, set(program.batch.of_inputs)
    sets: list[SplitNodes] = []
    of_inputs: list[int] = []
    not_rows = dict.fromkeys(program.batch.not_rows)
    for axes, places in split:
        inner = ExampleDims(program, parts(axes, sizes))
        leading: list[int] = []
        other_places: list[_Place] = []
        for array, d in places:
            not_rows.pop(array, None)
            # Another batch than that of the plan may have fewer arrays or dimensions.
            if array >= len(arrays) or d >= len(arrays[array].nodes):
                continue
            if d == 0:
                leading.append(arrays[array].nodes[0])
            else:
                other_places.append((array, d))
        nodes = [*leading, *inner.free(other_places)]
        if not any(map(inner.classes.divides, nodes)):
            return None
        created = _followers(inner, nodes)
        if not rows.isdisjoint(leading):
            created = (*program.batch.of_created, *created)
        classes = inner.classes
        roots = classes.of(filter(classes.divides, (*nodes, *created)))
        sets.append(SplitNodes(tuple(nodes), classes, roots, parts(axes, sizes), axes))
        of_inputs += nodes
    batch = replace(
        program.batch,
        of_inputs=tuple(of_inputs),
        of_created=(),
        not_rows=tuple(not_rows),
        splits_examples=True,
        sets=tuple(sets),
        split=split,
    )
    return replace(program, batch=batch)


def _followers(inner: ExampleDims, nodes: Sequence[int]) -> tuple[int, ...]:
    """Dimensions of created arrays, and of arrays closed over, that take the place of split ones.

    An interpolation is a product with a matrix that the program creates, whose other dimension is
    that of the result. A lookup of the nodes of a graph has a dimension of edges instead.
    """
    graph, classes, program = inner.graph, inner.classes, inner.program
    split_roots = set(classes.of(nodes))
    of_arguments: set[int] = set()
    for value in (*program.batch_arrays, *program.parameters):
        of_arguments.update(value.nodes)
    batch = program.batch
    created = classes.of(batch.candidates | (batch.never - of_arguments))
    excluded = classes.of(of_arguments) | _rigid(graph, classes)
    followers: list[int] = []
    for partial_sum in graph.partial_sums.values():
        if partial_sum.backward or classes[partial_sum.node] not in split_roots:
            continue
        # The result of the sum, if none of its dimensions is split already.
        dims = list(filter(classes.divides, partial_sum.value.nodes))
        if not split_roots.isdisjoint(classes.of(dims)):
            continue
        for node in dims:
            root = classes[node]
            # A dimension of the inputs is split only if it was asked for.
            if graph.sizes[node] > 1 and root in created and root not in excluded:
                split_roots.add(root)
                followers.append(node)
                break
    return tuple(followers)
