"""The cost of sharding classes of dimensions, as an optimization problem over sets."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..program._graph import Graph, Value
from ._batch_dims import BatchDims
from ._classes import Classes
from ._hardware import Hardware, all_gather
from ._planned_collectives import of_batch, of_model

Choice = frozenset[int]


@dataclass(frozen=True)
class Parameter:
    """An array of the tree, and whether it is sharded in storage whatever that costs."""

    value: Value
    sharded: bool


@dataclass
class Problem:
    """The choice of a set of groups without conflicts, and the cost of each set.

    A group is a set of classes that are decided together. Costs are seconds per step: `constant`,
    `single` for each chosen group, and for each key of `covers`, a set of groups, one cost if at
    least one of them is chosen and another one if none is.
    """

    groups: list[int]
    against: dict[int, set[int]]
    constant: int | float = 0.0
    single: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    covers: dict[Choice, tuple[float, float]] = field(default_factory=dict)

    def cost(self, chosen: Iterable[int]) -> int | float:
        chosen = frozenset(chosen)
        total = self.constant + sum(self.single.get(one, 0.0) for one in chosen)
        for groups, (hit, miss) in self.covers.items():
            total += miss if chosen.isdisjoint(groups) else hit
        return total


@dataclass(frozen=True)
class Axes:
    """The numbers of devices that arrays are sharded over.

    The batch is sharded over `batch` devices, and the chosen classes over `model`. Parameters are
    also sharded in storage over `fsdp` devices, and over `stored` of those that share the batch.
    """

    batch: int
    fsdp: int
    model: int
    stored: int


def group(
    graph: Graph,
    classes: Classes,
    candidates: Sequence[int],
    against: Mapping[int, set[int]],
    parameters: Sequence[Parameter],
) -> dict[int, int]:
    """The group of each candidate, numbered in the order of the program.

    The corresponding classes of repeated layers are grouped, so that they are decided together.
    """
    colors = _colors(graph, classes, candidates, parameters)
    # The colors of neighbours distinguish classes that look alike by themselves.
    around = lambda one: tuple(sorted(Counter(colors[o] for o in against[one]).items()))
    members: dict[Any, list[int]] = defaultdict(list)
    for one in candidates:
        members[colors[one], around(one)].append(one)
    sets = [apart for alike in members.values() for apart in _without_conflicts(alike, against)]
    return {one: number for number, apart in enumerate(sets) for one in apart}


def _colors(
    graph: Graph, classes: Classes, candidates: Sequence[int], parameters: Sequence[Parameter]
) -> dict[int, int]:
    """A number for each candidate, equal for candidates with the same parameters and costs."""
    marks: dict[int, Counter[Any]] = {one: Counter() for one in candidates}
    for parameter in parameters:
        shape = tuple(sorted(parameter.value.shape))
        for node, size in zip(parameter.value.dims, parameter.value.shape, strict=True):
            if (one := classes[node]) in marks:
                marks[one][("parameter", shape, size, parameter.sharded)] += 1
    for found in graph.partial_sums.values():
        if (one := classes[found.node]) in marks:
            marks[one][("sum", found.bytes, found.times, found.backward)] += 1
    for cut in graph.reshards:
        for node, size in ((cut.source, cut.source_bytes), (cut.target, cut.target_bytes)):
            if node is not None and (one := classes[node]) in marks:
                marks[one][("cut", size, cut.times, node == cut.source)] += 1
    known: dict[Any, int] = {}
    number = lambda mark: known.setdefault(frozenset(mark.items()), len(known))
    return {one: number(mark) for one, mark in marks.items()}


def _without_conflicts(alike: Sequence[int], against: Mapping[int, set[int]]) -> list[list[int]]:
    """Partitions classes that are alike into sets without conflicts."""
    sets: list[list[int]] = []
    for one in alike:
        for members in sets:
            if against[one].isdisjoint(members):
                members.append(one)
                break
        else:
            sets.append([one])
    return sets


def build_problem(
    graph: Graph,
    classes: Classes,
    batch: BatchDims,
    parameters: Sequence[Parameter],
    group_of: Mapping[int, int],
    against: Mapping[int, set[int]],
    axes: Axes,
    hardware: Hardware,
) -> Problem:
    """The problem of choosing among the groups that `group_of` maps classes to."""
    problem = Problem(sorted(set(group_of.values())), {k: set(v) for k, v in against.items()})
    groups = lambda dims: frozenset(group_of[x] for x in classes.of(dims) if x in group_of)
    model_speed, batch_speed = hardware.model_bandwidth, hardware.batch_bandwidth
    for one in of_model(graph, classes, batch, axes.model, hardware):
        if one.root is not None and one.root in group_of:
            problem.single[group_of[one.root]] += one.bytes / model_speed
    for one in of_batch(graph, batch, axes.stored, hardware):
        _add_shared(problem, groups(one.dims), one.bytes / batch_speed, axes.model)
    for work in graph.works:
        seconds = work.flops / batch.parts(work.dims) / hardware.flops
        _add_shared(problem, groups(work.dims), seconds, axes.model)
    for dims, moved in graph.memory_traffic.items():
        seconds = moved / batch.parts(dims) / hardware.memory_bandwidth
        _add_shared(problem, groups(dims), seconds, axes.model)
    for value in (parameter.value for parameter in parameters if parameter.sharded):
        size = gathers(graph, value) * value.bytes
        over_fsdp = all_gather(axes.fsdp, size) / batch_speed / axes.model
        over_model = all_gather(axes.model, size) / model_speed
        _add(problem, groups(value.dims), over_fsdp, over_fsdp + over_model)
    return problem


def _add_shared(problem: Problem, groups: Choice, seconds: int | float, parts: int) -> None:
    """Adds `seconds`, which are divided by `parts` if one of the groups is chosen."""
    _add(problem, groups, seconds / parts, seconds)


def _add(problem: Problem, groups: Choice, hit: int | float, miss: int | float) -> None:
    if not groups:
        problem.constant += miss
        return
    before = problem.covers.get(groups, (0.0, 0.0))
    problem.covers[groups] = (before[0] + hit, before[1] + miss)


def gathers(graph: Graph, value: Value) -> int:
    """How often an array is gathered in a step: layers of a scan also in the backward pass."""
    return 1 + (value.grad and not graph.stacks.isdisjoint(value.dims))
