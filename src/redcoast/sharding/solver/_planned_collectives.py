"""What devices send to each other in a step, and why: one list for the solver and the report."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from ..program._graph import BatchConflict, Dims, Graph, PartialSum, Reshard, Source, Value
from ._classes import Classes
from ._hardware import Hardware, all_gather, all_reduce

_ALL_ROWS = -1  # in place of the class of rows


@dataclass(frozen=True)
class BatchDims:
    """The nodes that are sharded like the batch, over `count` devices."""

    classes: Classes
    roots: frozenset[int]
    count: int

    def __getitem__(self, node: int) -> int:
        root = self.classes[node]
        if root in self.roots:
            # Gradients of all rows are summed together, whether the rows are linked or not.
            return _ALL_ROWS
        return root

    def has(self, node: int) -> bool:
        return self.classes[node] in self.roots

    def parts(self, dims: Iterable[int]) -> int:
        return self.count if any(self.has(node) for node in dims) else 1


@dataclass(frozen=True)
class PlannedCollective:
    """Bytes that each device sends in a step for one array.

    `root` is the class of dimensions whose sharding over `model` is the cause; where it is None,
    the cause is that the batch is sharded, and the bytes are divided by the devices of `model` if
    one of `dims` is sharded over them. `source` is the operation.
    """

    cause: Literal[
        "partial sums", "gathered", "gradients", "sums over the batch", "written", "compared"
    ]
    bytes: int | float
    backward: bool
    root: int | None
    dims: Dims
    source: Source


def of_model(
    graph: Graph, classes: Classes, batch: BatchDims, n: int, hardware: Hardware
) -> Iterator[PlannedCollective]:
    """What is sent if a class of dimensions is sharded over the `n` devices of `model`.

    Partial sums along it are all-reduced, and arrays that it does not stay sharded in are
    all-gathered.
    """
    for one in _once(graph.partial_sums.values(), classes, hardware):
        if classes.divides(one.node):
            size = all_reduce(n, _sum_bytes(one, hardware) / batch.parts(one.dims))
            root = classes[one.node]
            yield PlannedCollective("partial sums", size, one.backward, root, one.dims, one.source)
    for cut in graph.reshards:
        for root, size in _cut_sides(cut, classes, batch):
            sent = all_gather(n, size)
            yield PlannedCollective("gathered", sent, False, root, cut.dims, cut.operation)


def of_batch(
    graph: Graph, batch: BatchDims, stored: int, hardware: Hardware
) -> Iterator[PlannedCollective]:
    """What is sent if the batch is sharded. A gradient is stored as `stored` different shards."""
    over = (one for one in graph.partial_sums.values() if batch.has(one.node))
    split = (one for one in over if not any(map(batch.has, one.before)))
    # XLA uses an all-reduce if the gradient is sharded over only some of the devices.
    scatters = hardware.scatters and stored == batch.count
    for one in _once(split, batch, hardware):
        # Results without rows are gradients.
        is_gradient = one.backward and batch.parts(one.dims) == 1
        sent = all_reduce(batch.count, _sum_bytes(one, hardware))
        if is_gradient and scatters:
            sent = all_gather(batch.count, _sum_bytes(one, hardware))
        if is_gradient:
            yield PlannedCollective("gradients", sent, True, None, one.dims, one.source)
        else:
            cause = "sums over the batch"
            yield PlannedCollective(cause, sent, one.backward, None, one.dims, one.source)
    for meeting in _meetings_of_batch(graph, batch):
        # Operations that need all of the batch, such as a table of all pairs of examples.
        sent = all_gather(batch.count, meeting.bytes) * meeting.times
        if meeting.node in meeting.before:
            yield PlannedCollective("written", sent, False, None, meeting.dims, meeting.source)
        else:
            yield PlannedCollective("compared", sent, False, None, meeting.dims, meeting.source)


def _once(
    sums: Iterable[PartialSum], classes: Classes | BatchDims, hardware: Hardware
) -> Iterator[PartialSum]:
    """Partial sums, one for all uses of a value if the compiler adds their cotangents first."""
    seen: set[tuple[Value | None, int]] = set()
    for one in sums:
        key = one.of, classes[one.node]
        if not (one.backward and hardware.adds_first and key in seen):
            yield one
        seen.add(key)


def _sum_bytes(one: PartialSum, hardware: Hardware) -> int | float:
    """Bytes that are reduced in a step for one partial sum."""
    if hardware.adds_first:
        return one.bytes * one.times
    return one.bytes * one.times * one.uses


def _meetings_of_batch(graph: Graph, batch: BatchDims) -> Iterator[BatchConflict]:
    for meeting in graph.batch_conflicts:
        meets = batch.has(meeting.node) and any(map(batch.has, meeting.before))
        if meets and not any(map(batch.has, meeting.along)):
            yield meeting


def _cut_sides(
    cut: Reshard, classes: Classes, batch: BatchDims
) -> Iterator[tuple[int, int | float]]:
    """The classes that end at a cut, and the bytes that sharding them gathers there."""
    source, target = (
        None if node is None or not classes.divides(node) else classes[node]
        for node in (cut.source, cut.target)
    )
    if source == target:
        return
    # Compilers gather the array, and its cotangent in the backward pass, on either side.
    gathers = cut.times * (1 + cut.grad) / batch.parts(cut.dims)
    for one, size in ((source, cut.source_bytes), (target, cut.target_bytes)):
        if one is not None:
            yield one, size * gathers
