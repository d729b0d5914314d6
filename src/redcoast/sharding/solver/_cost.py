"""What splitting classes of dimensions costs, as a small problem for a search."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ..program._graph import Cut, Graph, Meeting, Sum, Value
from ._classes import Classes
from ._hardware import Hardware, all_gather, all_reduce, reduce_gradient

Choice = frozenset[int]


@dataclass(frozen=True)
class Parameter:
    """An array of the tree, and whether it is split whatever that costs."""

    value: Value
    covered: bool


@dataclass
class Problem:
    """Choose a set of groups of classes such that no two are in conflict; what each set costs.

    Groups stand for classes that decide alike. Prices are seconds per step.
    """

    groups: list[int]
    against: dict[int, set[int]]
    constant: int | float = 0.0
    single: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    # Of each set of groups: the price if one of them is chosen, and if none is.
    covers: dict[Choice, tuple[float, float]] = field(default_factory=dict)

    def price(self, chosen: Iterable[int]) -> int | float:
        chosen = frozenset(chosen)
        total = self.constant + sum(self.single.get(one, 0.0) for one in chosen)
        for groups, (hit, miss) in self.covers.items():
            total += miss if chosen.isdisjoint(groups) else hit
        return total

    def allowed(self, chosen: Iterable[int]) -> bool:
        chosen = frozenset(chosen)
        return all(chosen.isdisjoint(self.against[one]) for one in chosen)


@dataclass(frozen=True)
class Axes:
    """How many devices the batch is split over, and `model`, which classes are split over.

    Parameters are stored split over `fsdp` devices as well, and over `stored` of those that the
    batch is split over.
    """

    batch: int
    fsdp: int
    model: int
    stored: int


@dataclass(frozen=True)
class BatchDims:
    """Which nodes are split as the batch is, over `count` devices."""

    classes: Classes
    roots: frozenset[int]
    count: int

    def __getitem__(self, node: int) -> int:
        # Gradients of all rows are summed together, linked or not.
        root = self.classes[node]
        return -1 if root in self.roots else root

    def has(self, node: int) -> bool:
        return self.classes[node] in self.roots

    def parts(self, dims: Iterable[int]) -> int:
        return self.count if any(self.has(node) for node in dims) else 1


def pose(
    graph: Graph,
    classes: Classes,
    batch: BatchDims,
    parameters: Sequence[Parameter],
    group_of: Mapping[int, int],
    against: Mapping[int, set[int]],
    axes: Axes,
    hardware: Hardware,
) -> Problem:
    """The problem of choosing among `group_of`, which maps classes to groups."""
    problem = Problem(sorted(set(group_of.values())), {k: set(v) for k, v in against.items()})
    groups = lambda dims: frozenset(
        group_of[one] for node in dims if (one := classes[node]) in group_of
    )
    model, spread = hardware.model_bandwidth, hardware.batch_bandwidth
    for found in reduced(graph.sums.values(), classes, hardware):
        if (one := classes[found.node]) in group_of and classes.divides(found.node):
            local = sum_bytes(found, hardware) / batch.parts(found.dims)
            problem.single[group_of[one]] += all_reduce(axes.model, local) / model
    for found in batch_sums(graph, batch, hardware):
        whole = over_batch(found, batch, axes.stored, hardware) / spread
        _cover(problem, groups(found.dims), whole, axes.model)
    for meeting in batch_meetings(graph, batch):
        _cover(problem, groups(meeting.dims), met(meeting, batch) / spread, axes.model)
    for cut in graph.cuts:
        for one, size in cut_sides(cut, classes, batch):
            if one in group_of:
                problem.single[group_of[one]] += all_gather(axes.model, size) / model
    for work in graph.works:
        seconds = work.flops / batch.parts(work.dims) / hardware.flops
        _cover(problem, groups(work.dims), seconds, axes.model)
    for dims, moved in graph.traffic.items():
        _cover(
            problem, groups(dims), moved / batch.parts(dims) / hardware.memory_bandwidth, axes.model
        )
    for parameter in parameters:
        _store(problem, graph, parameter, groups(parameter.value.dims), axes, hardware)
    return problem


def reduced(sums: Iterable[Sum], classes: Classes | BatchDims, hardware: Hardware) -> Iterator[Sum]:
    """Partial sums, once for all uses of a value along one class if their cotangents are added."""
    seen: set[tuple[Value | None, int]] = set()
    for found in sums:
        key = found.of, classes[found.node]
        if not (found.backward and hardware.adds_first and key in seen):
            yield found
        seen.add(key)


def batch_sums(graph: Graph, batch: BatchDims, hardware: Hardware) -> Iterator[Sum]:
    """The partial sums over the batch, where it is split."""
    over = (one for one in graph.sums.values() if batch.has(one.node))
    split = (one for one in over if not any(map(batch.has, one.before)))
    return reduced(split, batch, hardware)


def batch_meetings(graph: Graph, batch: BatchDims) -> Iterator[Meeting]:
    """Where the batch meets itself, as in a table of all pairs of examples."""
    for meeting in graph.meetings:
        if batch.has(meeting.node) and any(map(batch.has, meeting.before)):
            yield meeting


def met(meeting: Meeting, batch: BatchDims) -> int | float:
    """What each device sends to gather one of the two operands."""
    return all_gather(batch.count, meeting.bytes) * meeting.times


def sum_bytes(found: Sum, hardware: Hardware) -> int | float:
    """The bytes that are reduced for one kind of partial sums in a step."""
    return found.bytes * found.times * (1 if hardware.adds_first else found.uses)


def over_batch(found: Sum, batch: BatchDims, stored: int, hardware: Hardware) -> int | float:
    """What each device sends to sum over the batch: gradients, where there is no batch left."""
    size = sum_bytes(found, hardware)
    if found.backward and batch.parts(found.dims) == 1:
        return reduce_gradient(batch.count, stored, size, hardware)
    return all_reduce(batch.count, size)


def _cover(problem: Problem, groups: Choice, seconds: int | float, parts: int) -> None:
    """`seconds`, or a part of it if one of the groups is chosen."""
    _add(problem, groups, seconds / parts, seconds)


def _add(problem: Problem, groups: Choice, hit: int | float, miss: int | float) -> None:
    if not groups:
        problem.constant += miss
        return
    before = problem.covers.get(groups, (0.0, 0.0))
    problem.covers[groups] = (before[0] + hit, before[1] + miss)


def cut_sides(cut: Cut, classes: Classes, batch: BatchDims) -> Iterator[tuple[int, int | float]]:
    """The classes that end at a cut, and the bytes that are gathered there if they are split."""
    source, target = (
        None if node is None or not classes.divides(node) else classes[node]
        for node in (cut.source, cut.target)
    )
    if source == target:
        return
    # On whichever side the split is, compilers gather the array and, backward, its cotangent.
    gathers = cut.times * (1 + cut.grad) / batch.parts(cut.dims)
    for one, size in ((source, cut.source_bytes), (target, cut.target_bytes)):
        if one is not None:
            yield one, size * gathers


def gathers(graph: Graph, value: Value) -> int:
    """How often an array is gathered in a step: layers of a scan are, again, on the way back."""
    return 1 + (value.grad and not graph.stacks.isdisjoint(value.dims))


def _store(
    problem: Problem,
    graph: Graph,
    parameter: Parameter,
    groups: Choice,
    axes: Axes,
    hardware: Hardware,
) -> None:
    """An array that is stored split is gathered where it is used, forward and backward."""
    size = parameter.value.bytes
    passes = gathers(graph, parameter.value)
    over_fsdp = passes * all_gather(axes.fsdp, size) / hardware.batch_bandwidth
    over_model = passes * all_gather(axes.model, size) / hardware.model_bandwidth
    if not parameter.covered:
        over_fsdp = over_model = 0.0
    _add(problem, groups, over_fsdp / axes.model, over_fsdp / axes.model + over_model)
