"""Finds dimensions along which the examples of a batch with few rows are split over the devices.

These are the tokens of a sequence, the rows of a pair matrix, the height of an image, or the nodes
and edges of a graph. An operation that needs more of an example than a device has gathers it, or
exchanges halos with the neighbouring devices.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations

from jax.extend.core import Literal
from jax.sharding import PartitionSpec as P

from ...core._sequence_parts import divided_into
from ..program._graph import Graph
from ..tree._overrides import spec_axes
from ._batch import BatchNodes, Split, SplitSet
from ._classes import Classes
from ._strategy import DEFAULT, Program, batch_dims, parts, used_axes

# The axes of a mesh that examples may be split over, those of a batch first.
_AXES = ("data", "fsdp", "model")
_Places = frozenset[tuple[int, int]]


def needs_split(program: Program, count: int) -> bool:
    """Whether a batch cannot be split over `count` devices by rows, but its examples may be."""
    several = any(len(value.dims) > 1 for value in program.examples)
    return count > 1 and several and not batch_dims(program, count).is_split


def split_tokens(program: Program, count: int, trace: Callable[[], Program]) -> Program:
    """The program with all dimensions of examples in place of rows; `trace` traces it again.

    If they cannot be split, it has the reason as `batch.whole`.
    """
    if not _why_indivisible(program, count):
        program = trace_in_parts(count, trace)
    inner = Inner(program, count)
    free = tuple(inner.free(place for places in inner.components.values() for place in places))
    if free:
        return replace(program, batch=BatchNodes(free, sequence=True))
    why = _why_indivisible(program, count) or "an operation of the program needs all of it"
    looped = inner.classes.of(program.graph.stacks)
    if any(inner.classes[node] in looped for node in inner.even()):
        why = "the program iterates over the sequence"
    return replace(program, batch=replace(program.batch, whole=why))


def is_sequence(program: Program, count: int) -> bool:
    """Whether a program with split examples has one dimension to split in each array, as tokens."""
    components = Inner(program, count).components.values()
    places = [place for several in components for place, _ in several]
    return program.batch.sequence and len(set(places)) == len(places)


def trace_in_parts(count: int, trace: Callable[[], Program]) -> Program:
    """Traces a program again: attention and losses have a dimension for the parts."""
    with divided_into(count):
        return trace()


def _why_indivisible(program: Program, count: int) -> str:
    """The reason if `count` devices divide no dimension of an example, and `""` if they do."""
    inner = Inner(program, count)
    if inner.even():
        return ""
    sequence = set(inner.reached())
    if not sequence:
        return "none of its dimensions is a sequence"
    nodes = {node for value in program.examples for node in value.dims[1:]}
    sizes = sorted({program.graph.sizes[node] for node in nodes.intersection(sequence)})
    return f"{' and '.join(f'{size:,}' for size in sizes)} tokens do not divide either"


@dataclass(frozen=True)
class Inner:
    """The dimensions of the examples of a program, for splitting them over `count` devices.

    Those that belong to parameters are left out.
    """

    program: Program
    count: int

    @property
    def graph(self) -> Graph:
        return self.program.graph

    @cached_property
    def classes(self) -> Classes:
        return Classes(self.graph, self.count, soft=True, apart=self.program.owned)

    @cached_property
    def _anywhere(self) -> Classes:
        """Classes of dimensions that are linked, whether they divide or not."""
        return Classes(self.graph, 1, soft=True, least=2, apart=self.program.owned)

    @cached_property
    def _held(self) -> frozenset[int]:
        return self.classes.of(self.program.owned)

    @cached_property
    def _rigid(self) -> frozenset[int]:
        """The classes with a dimension of which an operation needs all, or that a loop is over."""
        return self.classes.of(self.graph.blocked - self.graph.near)

    @cached_property
    def components(self) -> dict[int, _Places]:
        """Dimensions of the batch's arrays, as places, by their class wherever they divide."""
        found: dict[int, set[tuple[int, int]]] = {}
        for place, value in enumerate(self.program.batch_arrays):
            for d, node in enumerate(value.dims):
                if d and self.graph.sizes[node] > 1 and value in self.program.examples:
                    found.setdefault(self._anywhere[node], set()).add((place, d))
        return {root: frozenset(places) for root, places in found.items()}

    def node(self, place: tuple[int, int]) -> int:
        array, d = place
        return self.program.batch_arrays[array].dims[d]

    def reached(self, places: Iterable[tuple[int, int]] | None = None) -> list[int]:
        """The nodes that are linked to dimensions of the batch, and belong to no parameter."""
        if places is None:
            places = (place for several in self.components.values() for place in several)
        roots = self._anywhere.of(map(self.node, places))
        nodes = (node for node in range(len(self.graph.sizes)) if self._anywhere[node] in roots)
        return [node for node in nodes if self.classes[node] not in self._held]

    def even(self, places: Iterable[tuple[int, int]] | None = None) -> list[int]:
        """Those that the devices divide."""
        sizes, divides = self.graph.sizes, self.classes.divides
        return [node for node in self.reached(places) if sizes[node] > 1 and divides(node)]

    def free(self, places: Iterable[tuple[int, int]] | None = None) -> list[int]:
        """Those that can be split."""
        return [node for node in self.even(places) if self.classes[node] not in self._rigid]

    def choices(self) -> list[_Places]:
        """Sets of dimensions to split, of which each array of the batch has at most one class."""
        free = {root: p for root, p in self.components.items() if self.free(p)}
        arrays = {root: {place for place, _ in places} for root, places in free.items()}
        choices: dict[_Places, None] = {}
        for root in free:
            taken, used = set(free[root]), set(arrays[root])
            for other in free:
                if other != root and used.isdisjoint(arrays[other]):
                    taken |= free[other]
                    used |= arrays[other]
            # Of several dimensions of an array, the first is split.
            choices[
                frozenset((place, min(d for p, d in taken if p == place)) for place in used)
            ] = None
        return list(choices)


def asked_split(program: Program, sizes: Mapping[str, int]) -> Split:
    """What the program itself asks for, by constraints on arrays of its batch; empty if it does
    not split examples."""
    jaxpr = program.scope.jaxpr
    first = program.traced.arrays
    place_of = {var: i for i, var in enumerate(jaxpr.invars[first : first + program.traced.batch])}
    asked: dict[tuple[str, ...], list[tuple[int, int]]] = {}
    for equation in jaxpr.eqns:
        if equation.primitive.name != "sharding_constraint":
            continue
        (operand,) = equation.invars
        place = None if isinstance(operand, Literal) else place_of.get(operand)
        spec = getattr(equation.params["sharding"], "spec", None)
        for d, entry in enumerate(spec or ()):
            axes = () if entry is P.UNCONSTRAINED else used_axes(spec_axes(entry), sizes)
            if place is not None and axes:
                asked.setdefault(axes, []).append((place, d))
    split = tuple((axes, tuple(places)) for axes, places in asked.items())
    return split if any(d for _, places in split for _, d in places) else ()


# Returns the program, traced with a number of parts of its sequences.
Traces = Callable[[int], Program]


def candidates(traced: Traces, sizes: Mapping[str, int]) -> Iterator[Program]:
    """Programs with one dimension of the examples split, over the batch's axes or all axes."""
    for axes in _axes(sizes):
        for places in _choices(traced, axes, sizes):
            yield from _split(traced, ((axes, places),), sizes)
        # Rows are split over some of the axes, and a dimension over the others.
        for first, rest in _halves(axes):
            if not batch_dims(traced(1), parts(first, sizes)).is_split:
                continue
            for places in _choices(traced, rest, sizes):
                split = (first, row_places(traced(1))), (rest, places)
                yield from _split(traced, split, sizes)
        if leading := _leading(traced(1), parts(axes, sizes)):
            yield from _split(traced, ((axes, leading),), sizes)


def _leading(program: Program, count: int) -> tuple[tuple[int, int], ...]:
    """The first dimensions of all arrays, as the nodes and the edges of one graph, if they differ
    and can be split."""
    if not program.batch.left_out:
        return ()
    classes, graph = Classes(program.graph, count, soft=True), program.graph
    owned = (node for value in program.parameters for node in value.dims)
    rigid = classes.of((*owned, *(graph.blocked - graph.near)))
    arrays = [(place, value) for place, value in enumerate(program.batch_arrays) if value.dims]
    free = [
        (place, 0)
        for place, value in arrays
        if classes.divides(value.dims[0]) and classes[value.dims[0]] not in rigid
    ]
    return tuple(free)


def candidates_of_two(traced: Traces, sizes: Mapping[str, int]) -> Iterator[Program]:
    """Programs with two dimensions of the examples split, each over some of the axes."""
    for axes in _axes(sizes):
        for first, rest in _halves(axes):
            for one in _choices(traced, first, sizes):
                for other in _choices(traced, rest, sizes):
                    if set(one).isdisjoint(other):
                        yield from _split(traced, ((first, one), (rest, other)), sizes)


def _axes(sizes: Mapping[str, int]) -> list[tuple[str, ...]]:
    both = used_axes(DEFAULT.batch, sizes), used_axes(_AXES, sizes)
    return [axes for axes in dict.fromkeys(both) if axes]


def _choices(
    traced: Traces, axes: tuple[str, ...], sizes: Mapping[str, int]
) -> list[tuple[tuple[int, int], ...]]:
    count = parts(axes, sizes)
    return [tuple(sorted(places)) for places in Inner(traced(count), count).choices()]


def _split(traced: Traces, split: Split, sizes: Mapping[str, int]) -> Iterator[Program]:
    found = apply_split(traced(example_parts(split, sizes)), split, sizes)
    if found is not None:
        yield found


def example_parts(split: Split, sizes: Mapping[str, int]) -> int:
    """The number of parts into which examples are split."""
    inside = [axes for axes, places in split if any(d for _, d in places)]
    return parts([axis for axes in inside for axis in axes], sizes)


def _halves(axes: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], tuple[str, ...]]]:
    """The ways to divide axes between two dimensions."""
    for count in range(1, len(axes)):
        for first in combinations(axes, count):
            yield first, tuple(axis for axis in axes if axis not in first)


def row_places(program: Program) -> tuple[tuple[int, int], ...]:
    """The rows, as places of dimensions of the batch's arrays."""
    nodes = set(program.batch.given)
    arrays = enumerate(program.batch_arrays)
    return tuple((place, 0) for place, value in arrays if value.dims and value.dims[0] in nodes)


def apply_split(program: Program, split: Split, sizes: Mapping[str, int]) -> Program | None:
    """The program with dimensions of its batch split over axes; None if a dimension does not
    divide, or the batch has other arrays."""
    arrays, rows, sets = program.batch_arrays, set(program.batch.given), []
    for axes, places in split:
        known = [
            (place, d) for place, d in places if place < len(arrays) and d < len(arrays[place].dims)
        ]
        count = parts(axes, sizes)
        inner = Inner(program, count)
        leading = [inner.node(place) for place in known if not place[1]]
        given = [*leading, *inner.free([place for place in known if place[1]])]
        if not any(map(inner.classes.divides, given)):
            return None
        made = program.batch.made if rows.intersection(leading) else ()
        sets.append(SplitSet(axes, tuple(given), (*made, *_followers(inner, given))))
    given = tuple(node for one in sets for node in one.given)
    places = {place for _, several in split for place, _ in several}
    left_out = tuple(place for place in program.batch.left_out if place not in places)
    batch = replace(
        program.batch,
        left_out=left_out,
        given=given,
        made=(),
        sequence=True,
        sets=tuple(sets),
        split=split,
    )
    return replace(program, batch=batch)


def _followers(inner: Inner, given: Sequence[int]) -> tuple[int, ...]:
    """Dimensions of created arrays, and of arrays closed over, that take the place of split ones.

    An interpolation is a product with a matrix that the program creates, whose other dimension is
    that of the result. A lookup of the nodes of a graph has a dimension of edges instead.
    """
    graph, classes, program = inner.graph, inner.classes, inner.program
    roots = set(classes.of(given))
    owned = {node for value in (*program.batch_arrays, *program.parameters) for node in value.dims}
    others = classes.of(owned | (graph.blocked - graph.near))
    made = classes.of(graph.created | (graph.of_parameters - owned))
    found: list[int] = []
    for one in graph.partial_sums.values():
        dims = [node for node in one.dims if classes.divides(node)]
        if one.backward or classes[one.node] not in roots or roots.intersection(classes.of(dims)):
            continue
        for node in dims:
            root = classes[node]
            if graph.sizes[node] > 1 and root in made and root not in others:
                roots.add(root)
                found.append(node)
                break
    return tuple(found)
