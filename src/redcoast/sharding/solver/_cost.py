"""The cost of sharding classes of dimensions, as an optimization problem over sets.

The seconds of a step are in four parts: arithmetic, memory traffic, communication that hides behind
arithmetic, and communication that the next operation waits for. Ways to use a mesh are compared by
the time of a step in which the third hides (`Seconds.of_step`), without memory traffic. The search
among classes adds all parts, so that it does not repeat arithmetic and keep whole activations on
all devices of `model` for communication that may hide.
"""

from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from ...core._control_flow import Call, CallKind, Scan, While, control_flow
from ..program._batch_dims import BatchDims
from ..program._classes import Classes
from ..program._graph import Dims, Graph, Value
from ._hardware import Hardware, all_gather
from ._planned_collectives import of_batch, of_model

Choice = frozenset[int]  # of groups
Part = Literal["arithmetic", "memory", "hideable", "exposed"]  # of a step's time, see `Seconds`
# The part of the shorter of arithmetic and communication that does not hide behind the longer: the
# first gather and the last scatter of a step, and products that wait while both use the memory.
NOT_HIDDEN = 0.1


@dataclass(frozen=True)
class Parameter:
    """An array of the tree, and whether it is sharded in storage whatever that costs."""

    value: Value
    sharded: bool


@dataclass(frozen=True)
class Seconds:
    """The time of a step in parts, of which `hideable` is communication beside arithmetic.

    **Attributes:**

    - `arithmetic`: Contractions.
    - `memory`: What is read from and written to memory.
    - `hideable`: All-gathers of weights, and sums of their gradients.
    - `exposed`: Communication whose result the next operation waits for.
    """

    arithmetic: int | float
    memory: int | float
    hideable: int | float
    exposed: int | float

    @property
    def communication(self) -> int | float:
        return self.hideable + self.exposed

    @property
    def total(self) -> int | float:
        """What the search makes least: all parts, so that it divides memory traffic too."""
        return self.serial + self.memory

    @property
    def serial(self) -> int | float:
        """The time of arithmetic and communication if nothing overlaps."""
        return self.arithmetic + self.communication

    def of_step(self, *, overlaps: bool) -> int | float:
        """The time of arithmetic and communication, where the compiler overlaps them or not."""
        if not overlaps:
            return self.serial
        both = self.arithmetic, self.hideable
        return max(both) + NOT_HIDDEN * min(both) + self.exposed


@dataclass(frozen=True)
class Problem:
    """The choice of a set of groups without conflicts, and the cost of each set.

    A group is a set of classes that are decided together, and `against` has those that it cannot be
    chosen with. For each part of a step's time and each set of groups, `costs` has the seconds if
    at least one of the groups is chosen, and those if none is.
    """

    groups: list[int]
    against: Mapping[int, set[int]]
    costs: dict[tuple[Part, Choice], tuple[float, float]] = field(default_factory=dict)

    def add(self, part: Part, groups: Choice, hit: int | float, miss: int | float) -> None:
        """Adds a cost: `hit` if at least one of the groups is chosen, and otherwise `miss`."""
        before_hit, before_miss = self.costs.get((part, groups), (0.0, 0.0))
        self.costs[part, groups] = before_hit + hit, before_miss + miss

    def add_shared(self, part: Part, groups: Choice, seconds: int | float, count: int) -> None:
        """Adds `seconds`, which are divided by `count` if one of the groups is chosen."""
        self.add(part, groups, seconds / count, seconds)

    def seconds(self, chosen: Choice) -> Seconds:
        """The time of a step if these groups are chosen."""
        sums: Counter[Part] = Counter()
        for (part, groups), (hit, miss) in self.costs.items():
            sums[part] += miss if chosen.isdisjoint(groups) else hit  # pyright: ignore
        return Seconds(sums["arithmetic"], sums["memory"], sums["hideable"], sums["exposed"])


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
    members: dict[Hashable, list[int]] = defaultdict(list)  # those that look alike
    for root in candidates:
        # The colors of neighbours distinguish classes that look alike by themselves.
        around = Counter(map(colors.__getitem__, against[root]))
        # Sorted, so that the order of neighbours makes no difference.
        members[colors[root], tuple(sorted(around.items()))].append(root)
    groups: list[list[int]] = []
    for alike in members.values():
        # Those that are in conflict are apart: each is in the first group that has none such.
        first = len(groups)
        for root in alike:
            for apart in groups[first:]:
                if against[root].isdisjoint(apart):
                    apart.append(root)
                    break
            else:
                groups.append([root])
    group_of: dict[int, int] = {}
    for number, apart in enumerate(groups):
        group_of |= dict.fromkeys(apart, number)
    return group_of


def _colors(
    graph: Graph, classes: Classes, candidates: Sequence[int], parameters: Sequence[Parameter]
) -> dict[int, int]:
    """A number for each candidate, equal for candidates with the same parameters and costs."""
    marks: dict[int, Counter[Hashable]] = {root: Counter() for root in candidates}

    def mark(node: int, what: Hashable) -> None:
        if (root := classes[node]) in marks:
            marks[root][what] += 1

    for parameter in parameters:
        shape = tuple(sorted(parameter.value.shape))
        for node, size in zip(parameter.value.dims, parameter.value.shape, strict=True):
            mark(node, ("parameter", shape, size, parameter.sharded))
    # What a class costs: equal layers cost the same, bytes for bytes.
    for summed in graph.partial_sums.values():
        mark(summed.node, ("sum", summed.value.bytes, summed.times, summed.backward))
    for cut in graph.reshards:
        if cut.before is not None:
            mark(cut.before, ("cut", cut.operand.bytes, cut.times, True))
        if cut.after is not None:
            mark(cut.after, ("cut", cut.result.bytes, cut.times, cut.after == cut.before))
    known: dict[Hashable, int] = {}
    colors: dict[int, int] = {}
    for root, marked in marks.items():
        colors[root] = known.setdefault(frozenset(marked.items()), len(known))
    return colors


def price(
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
    problem = Problem(sorted(set(group_of.values())), against)

    def groups_of(dims: Dims) -> Choice:
        roots = classes.of(dims)
        return frozenset(map(group_of.__getitem__, roots.intersection(group_of)))

    # What hides is decided by the kind of communication, before any class is chosen.
    model_speed, batch_speed = hardware.model_bandwidth, hardware.batch_bandwidth
    for collective in of_model(graph, classes, batch, axes.model, hardware):
        if collective.root is not None and collective.root in group_of:
            groups = frozenset([group_of[collective.root]])
            problem.add("exposed", groups, collective.bytes / model_speed, 0.0)
    for collective in of_batch(graph, batch, axes.stored, hardware):
        part: Part = "exposed"
        # Other layers need not wait for the gradients of one, but those of a table of lookups are
        # the last that a step computes.
        is_lookup = collective.source[-1].primitive.name == "gather"
        if collective.cause == "gradients" and not is_lookup:
            part = "hideable"
        # An array that is tensor-parallel as well is reduced in parts.
        groups, seconds = groups_of(collective.dims), collective.bytes / batch_speed
        problem.add_shared(part, groups, seconds, axes.model)
    for work in graph.works:
        seconds = work.flops / batch.parts(work.dims) / hardware.flops
        problem.add_shared("arithmetic", groups_of(work.dims), seconds, axes.model)
    for dims, moved in graph.memory_traffic.items():
        seconds = moved / batch.parts(dims) / hardware.memory_bandwidth
        problem.add_shared("memory", groups_of(dims), seconds, axes.model)
    # A table whose rows are looked up is gathered before a step computes anything, unless products
    # have its rows too: tied embeddings are gathered like other weights.
    linked = Classes(graph, 1)
    indexed: set[int] = set()
    for summed in graph.partial_sums.values():
        if summed.operation == "gather" and not summed.backward:
            indexed.add(linked[summed.node])
    for work in graph.works:
        for dims in work.of:
            indexed -= linked.of(dims)
    for parameter in parameters:
        value = parameter.value
        if not parameter.sharded:
            continue
        size = gathers(graph, value) * value.bytes
        # Devices of one `model` group gather different parts, so each sends a part of the bytes.
        over_fsdp = all_gather(axes.fsdp, size) / batch_speed / axes.model
        over_model = all_gather(axes.model, size) / model_speed
        part = "hideable"
        if not indexed.isdisjoint(linked.of(value.dims)):
            part = "exposed"
        # A tensor-parallel array is gathered over `fsdp` alone.
        problem.add(part, groups_of(value.dims), over_fsdp, over_fsdp + over_model)
    return problem


def gathers(graph: Graph, value: Value) -> int:
    """How often an array is gathered in a step.

    Layers of a scan and rematerialised ones are gathered in the backward pass too. What a loop
    closes over is gathered before it.
    """
    if not value.grad:
        return 1
    # The compiler gathers the layers of a scan without a loop once.
    if not graph.unrolled.isdisjoint(value.dims):
        return 1
    if not graph.stacks.isdisjoint(value.dims):
        return 2
    for equation in graph.first_use.get(value.dims, ()):
        match control_flow(equation):
            case Scan() | While():
                return 1  # it closes over the array
            case Call(kind=CallKind.REMAT):
                return 2
    return 1
