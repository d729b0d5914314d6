"""What devices send to each other in a step, and why: one list for the solver and the report."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Literal

from ...core._jaxpr import struct_of
from ..operations import Atom
from ..program._batch_dims import BatchDims
from ..program._classes import Classes
from ..program._graph import (
    BatchConflict,
    Dims,
    Graph,
    Halo,
    PartialSum,
    Reshard,
    Source,
    Value,
    Work,
)
from ._hardware import Hardware, all_gather, all_reduce
from ._moved_rows import is_spectrum, moved_rows


@dataclass(frozen=True)
class PlannedCollective:
    """Bytes that each device sends in a step for one array.

    `root` is the class of dimensions whose sharding over `model` is the cause; where it is None,
    the cause is that the batch is sharded, and the bytes are divided by the devices of `model` if
    one of `dims` is sharded over them. `source` is the operation.
    """

    cause: Literal[
        "partial sums",
        "gathered",
        "gradients",
        "sums over the batch",
        "written",
        "compared",
        "by index",
        "halos",
        "turned",
        "uneven",
        "moved",
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
            yield PlannedCollective("gathered", sent, False, root, cut.dims, cut.source)


def of_batch(
    graph: Graph, batch: BatchDims, stored: int, hardware: Hardware
) -> Iterator[PlannedCollective]:
    """What is sent if the batch is sharded. A gradient is stored as `stored` different shards."""
    over = [one for one in graph.partial_sums.values() if batch.has(one.node)]
    split = (one for one in over if not _is_split_before(batch, one.node, one.before))
    for one in over:
        if _is_sum_by_index(one, graph, batch):
            yield _sum_by_index(one, batch)
    # XLA uses an all-reduce if the gradient is sharded over only some of the devices.
    scatters = hardware.scatters and stored == batch.count
    gathered: set[int] = set()
    for one in _once(split, batch, hardware):
        # Results without rows are gradients.
        is_gradient = one.backward and batch.parts(one.dims) == 1
        found = batch.set_of(one.node)
        assert found is not None
        size = _sum_bytes(one, hardware) / batch.alone(one.node, one.dims)
        sent = all_reduce(batch.count if is_gradient else found.count, size)
        if is_gradient and scatters:
            sent = all_gather(batch.count, size)
        if not one.backward and _is_lookup(one, graph, batch):
            table = id(one.source[-1].invars[0])
            yield _lookup(one, batch, found.count, is_first=table not in gathered)
            gathered.add(table)
        elif is_gradient:
            yield PlannedCollective("gradients", sent, True, None, one.dims, one.source)
        else:
            cause = "sums over the batch"
            yield PlannedCollective(cause, sent, one.backward, None, one.dims, one.source)
    for meeting in _meetings_of_batch(graph, batch):
        # Operations that need all of the batch, such as a table of all pairs of examples.
        found = batch.set_of(meeting.node)
        assert found is not None
        size = meeting.bytes / batch.alone(meeting.node, meeting.dims)
        sent = all_gather(found.count, size) * meeting.times
        if meeting.node in meeting.before:
            yield PlannedCollective("written", sent, False, None, meeting.dims, meeting.source)
        else:
            yield PlannedCollective("compared", sent, False, None, meeting.dims, meeting.source)
    for halo in graph.halos:
        if batch.has(halo.node):
            yield _halo(halo, batch)
    for work in graph.works:
        sent = _turned_back(work, graph, batch)
        yield PlannedCollective("turned", sent, False, None, work.dims, work.source)
    for move, sent in moved_rows(graph, batch):
        yield PlannedCollective("moved", sent, False, None, move.dims, move.source)


def _is_lookup(one: PartialSum, graph: Graph, batch: BatchDims) -> bool:
    """Whether devices look up other rows of the batch, as those of nodes at the edges of a graph.

    Rows that look up an element of as many rows, as of their label, look up in themselves.
    """
    rows = [graph.sizes[node] for node in one.dims if batch.has(node)]
    if not rows or not one.source or one.source[-1].primitive.name != "gather":
        return False
    return graph.sizes[one.node] not in rows or one.bytes == _table_bytes(one)


def _table_bytes(one: PartialSum) -> int:
    """The bytes of the array that a gather looks up in."""
    return _bytes(one.source[-1].invars[0])


def _is_sum_by_index(one: PartialSum, graph: Graph, batch: BatchDims) -> bool:
    """Whether rows of the batch are added to others, as messages at the nodes of a graph."""
    rows = [graph.sizes[node] for node in one.before if batch.has(node)]
    adds = bool(one.source) and one.source[-1].primitive.name in ("scatter-add", "scatter_add")
    return adds and not one.backward and len(rows) > 0 and graph.sizes[one.node] not in rows


def _sum_by_index(one: PartialSum, batch: BatchDims) -> PlannedCollective:
    """Each device adds its own rows to all others, and XLA all-reduces the result.

    The cotangent of the result is all-gathered.
    """
    found = batch.set_of(one.node)
    assert found is not None
    size = one.bytes * one.times / batch.alone(one.node, one.dims)
    sent = all_reduce(found.count, size)
    if one.of is not None and one.of.grad:
        sent += all_gather(found.count, size)
    return PlannedCollective("by index", sent, False, None, one.dims, one.source)


def _lookup(one: PartialSum, batch: BatchDims, count: int, *, is_first: bool) -> PlannedCollective:
    """An array is all-gathered for all lookups in it, and its cotangent all-reduced.

    XLA alone, for rows of a batch, all-reduces the cotangent of each lookup.
    """
    size = _table_bytes(one) * one.times / batch.alone(one.node, one.dims)
    sent = 0.0
    if is_first:
        sent += all_gather(count, size)
    if one.of is not None and one.of.grad and (is_first or not batch.splits_examples):
        sent += all_reduce(count, size)
    return PlannedCollective("by index", sent, False, None, one.dims, one.source)


def _halo(halo: Halo, batch: BatchDims) -> PlannedCollective:
    cause, sent = "halos", halo.bytes
    found = batch.set_of(halo.node)
    assert found is not None
    if not found.has(halo.target):
        # Its size does not divide. The compiler may gather the array.
        cause, sent = "uneven", all_gather(found.count, 2 * halo.all_bytes)
    elif halo.whole:
        # An all-to-all sends what a device has, but for its own part. The spectrum of an example
        # stays as it is, so that the inverse transform has the second one.
        cause, sent = "turned", all_gather(found.count, halo.bytes) / found.count
        if not batch.splits_examples:
            sent *= 2
    sent = sent / batch.alone(halo.node, halo.dims) * halo.times
    return PlannedCollective(cause, sent, False, None, halo.dims, halo.source)


def _turned_back(work: Work, graph: Graph, batch: BatchDims) -> int | float:
    """Bytes that each device sends for a product of a spectrum, which is split like the field.

    The spectrum and the result are exchanged once each, and their cotangents too.
    """
    equation = work.source[-1]
    for atom, dims in zip(equation.invars, work.of, strict=False):
        node = next(filter(batch.has, dims), None)
        if node is None or not is_spectrum(atom, dims, graph, batch):
            continue
        split = batch.set_of(node)
        assert split is not None
        count = 2 * prod(map(graph.sizes.__getitem__, work.dims))
        times = work.forward / max(1, count)
        size = sum(map(_bytes, (atom, *equation.outvars))) / batch.alone(node, dims)
        return 2 * times * all_gather(split.count, size) / split.count
    return 0


def _bytes(atom: Atom) -> int:
    array = struct_of(atom)
    return array.size * array.dtype.itemsize


def _is_split_before(batch: BatchDims, node: int, before: Iterable[int]) -> bool:
    """Whether an earlier dimension of an array is sharded over the devices of a node."""
    own = batch.set_of(node)
    return own is not None and any(map(own.has, before))


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
        meets = _is_split_before(batch, meeting.node, meeting.before)
        if meets and not _is_split_before(batch, meeting.node, meeting.along):
            yield meeting


def _cut_sides(
    cut: Reshard, classes: Classes, batch: BatchDims
) -> Iterator[tuple[int, int | float]]:
    """The classes that end at a cut, and the bytes that sharding them gathers there."""
    before, after = (
        None if node is None or not classes.divides(node) else classes[node]
        for node in (cut.before, cut.after)
    )
    if before == after:
        return
    # Compilers gather the array and its cotangent on either side.
    gathers = (cut.times + cut.backward) / batch.parts(cut.dims)
    for one, size in ((before, cut.bytes_before), (after, cut.bytes_after)):
        if one is not None:
            yield one, size * gathers
