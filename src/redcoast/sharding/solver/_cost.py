"""The cost of sharding classes of dimensions, as an optimization problem over sets.

The seconds of a step are in four parts: arithmetic, memory traffic, communication that hides behind
arithmetic, and communication that the next operation waits for. Programs are compared by the time
of a step in which the third hides (`Seconds.of_step`), without memory traffic. Another way to use a
mesh than its axes ask for must also be faster where nothing hides (`Seconds.serial`). The search
among classes adds all parts, so that it does not repeat arithmetic and keep whole activations on
all devices of `model` for communication that may hide.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from ..program._batch_dims import BatchDims
from ..program._classes import Classes
from ..program._graph import Graph, Nodes, Value
from ._hardware import Hardware
from ._planned_collectives import gathered_bytes, of_batch, of_model

Choice = frozenset[int]  # of classes
TimeKind = Literal["arithmetic", "memory", "hideable", "exposed"]  # of a step's time, see `Seconds`
# The part of the shorter of arithmetic and communication that does not hide behind the longer: the
# first gather and the last scatter of a step, and products that wait while both use the memory.
NOT_HIDDEN = 0.1


@dataclass(frozen=True)
class Seconds:
    """The time of a step in parts, of which `hideable` is communication beside arithmetic."""

    arithmetic: int | float  # contractions
    memory: int | float  # what is read from and written to memory
    hideable: int | float  # all-gathers of weights, and sums of their gradients
    exposed: int | float  # communication whose result the next operation waits for

    @property
    def communication(self) -> int | float:
        return self.hideable + self.exposed

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
    """The choice of a set of classes without conflicts, and the cost of each set.

    `against` has, for each class, those that it cannot be chosen with. For each part of a step's
    time and each set of classes, `costs` has the seconds if at least one of them is chosen, and
    those if none is: arithmetic is divided if any dimension of a product is sharded.
    """

    against: Mapping[int, set[int]]
    costs: dict[tuple[TimeKind, Choice], tuple[float, float]] = field(default_factory=dict)

    def add(self, kind: TimeKind, classes: Choice, if_any: float, if_none: float) -> None:
        """Adds a cost: `if_any` if at least one of the classes is chosen, else `if_none`."""
        before_any, before_none = self.costs.get((kind, classes), (0.0, 0.0))
        self.costs[kind, classes] = before_any + if_any, before_none + if_none

    def seconds(self, chosen: Choice) -> Seconds:
        """The time of a step if these classes are chosen."""
        sums: Counter[TimeKind] = Counter()
        for (kind, classes), (if_any, if_none) in self.costs.items():
            if chosen.isdisjoint(classes):
                sums[kind] += if_none  # pyright: ignore
            else:
                sums[kind] += if_any  # pyright: ignore
        return Seconds(sums["arithmetic"], sums["memory"], sums["hideable"], sums["exposed"])


def price(
    graph: Graph,
    classes: Classes,
    batch: BatchDims,
    against: Mapping[int, set[int]],
    gathered: Sequence[Value],
    hardware: Hardware,
    *,
    model: int,
    fsdp: int,
    gradient_shards: int,
) -> Problem:
    """The problem of choosing among the classes of `against`.

    - `gathered`: the arrays that are sharded in storage: over `fsdp`, and over `model` if they are
        not tensor-parallel.
    - `model`, `fsdp`: the numbers of devices along these axes.
    - `gradient_shards`: the number of devices that each store a different shard of a gradient.
    """
    problem = Problem(against)

    def add_shared(kind: TimeKind, nodes: Nodes, seconds: int | float) -> None:
        """Adds seconds that the devices of `model` share if one of the nodes is chosen."""
        problem.add(kind, classes.of(nodes).intersection(against), seconds / model, seconds)

    # What hides is decided by the kind of communication, before any class is chosen.
    model_speed, batch_speed = hardware.model_bandwidth, hardware.batch_bandwidth
    for collective in of_model(graph, classes, batch, model, hardware):
        root = collective.root
        if root is not None and root in against:
            problem.add("exposed", frozenset([root]), collective.bytes / model_speed, 0.0)
    for collective in of_batch(graph, batch, gradient_shards, hardware):
        kind: TimeKind = "exposed"
        # Other layers need not wait for the gradients of one, but those of a table of lookups are
        # the last that a step computes.
        if collective.cause == "gradients" and not graph.rule_at(collective.source).is_lookup:
            kind = "hideable"
        # An array that is tensor-parallel as well is reduced in parts.
        add_shared(kind, collective.nodes, collective.bytes / batch_speed)
    for work in graph.works:
        seconds = work.flops / batch.parts(work.nodes) / hardware.flops
        add_shared("arithmetic", work.nodes, seconds)
    for nodes, size in graph.memory_traffic.items():
        add_shared("memory", nodes, size / batch.parts(nodes) / hardware.memory_bandwidth)
    # A table whose rows are looked up is gathered before a step computes anything, unless products
    # have its rows too: tied embeddings are gathered like other weights.
    linked = Classes(graph, 1)
    indexed: set[int] = set()
    for summed in graph.partial_sums.values():
        if not summed.backward and graph.rule_at(summed.source).is_lookup:
            indexed.add(linked[summed.node])
    for work in graph.works:
        for dims in work.of:
            indexed -= linked.of(dims)
    for value in gathered:
        # Devices of one `model` group gather different parts, so each sends a part of the bytes.
        over_fsdp = gathered_bytes(graph, value, fsdp) / batch_speed / model
        over_model = gathered_bytes(graph, value, model) / model_speed
        kind = "hideable"
        if not indexed.isdisjoint(linked.of(value.nodes)):
            kind = "exposed"
        # A tensor-parallel array is gathered over `fsdp` alone.
        own = classes.of(value.nodes).intersection(against)
        problem.add(kind, own, over_fsdp, over_fsdp + over_model)
    return problem
