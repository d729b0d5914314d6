"""What devices send where an operation moves rows of the batch, such as a slice or a concatenation.

The results are split again. The figures are those of XLA's partitioning, in bytes that each device
sends; a part is what a device has of an array.
"""

from collections.abc import Iterator

import jax.numpy as jnp

from ...core._control_flow import Scan, control_flow
from ...core._jaxpr import struct_of
from ..operations import Atom, is_cumulative
from ..program._batch_dims import BatchDims
from ..program._graph import Graph, Nodes, Reshard, SourcePath, path_of
from ._hardware import all_gather, all_reduce

# The parts of its operand that a device sends for a slice that is split again, and of each operand
# and its cotangent for a concatenation: the halos that XLA exchanges.
_SLICED = 1.25
_CONCATENATED, _CONCATENATED_BACK = 1.75, 2.5

_Slices = dict[SourcePath, Reshard]  # by the path of the result, in the calls around it


def moved_rows(graph: Graph, batch: BatchDims) -> Iterator[tuple[Reshard, int | float]]:
    """The moves of rows, with the bytes that each device sends for them in a step."""
    if batch.count == 1:
        return  # each device has all rows
    slices: _Slices = {}
    for move in graph.moves:
        equation = move.source[-1]
        if graph.rule_at(move.source).is_slice:
            slices[path_of((*move.source[:-1], equation.outvars[0]))] = move
    # A roll is two slices and a concatenation, of which XLA sends the smaller slice only.
    shifted: set[Reshard] = set()  # the parts of rolled arrays that go to another device
    free: set[Reshard] = set()
    for move in graph.moves:
        parts = _rolled_parts(graph, move, slices)
        if parts:
            shifted.add(parts[0])
            free.update((*parts[1:], move))
    for move in graph.moves:
        operand = move.source[-1].invars[0]
        if move.before is None or is_spectrum(operand, (move.before,), graph, batch):
            continue
        if move in shifted:
            sent = 0.0
            if batch.has(move.before):
                devices, others = batch.around(move.before, (*move.rows, *move.operand.nodes))
                size = min(move.result.bytes, move.operand.bytes / devices) / others
                # The cotangent of the smaller slice is summed over the devices.
                back = size + all_reduce(devices, move.result.bytes / others)
                sent = size * move.times + back * move.backward
            yield move, sent
        elif move not in free:
            yield move, _sent(move, graph, batch)


def is_spectrum(atom: Atom, nodes: Nodes, graph: Graph, batch: BatchDims) -> bool:
    """Whether an array is a spectrum of split examples, which is split along another dimension than
    the field. `nodes` are some of it."""
    is_complex = jnp.issubdtype(struct_of(atom).dtype, jnp.complexfloating)
    if not batch.splits_examples or not is_complex:
        return False
    for split in filter(None, map(batch.set_of, nodes)):
        if any(halo.whole and split.has(halo.target) for halo in graph.halos):
            return True
    return False


def _rolled_parts(graph: Graph, move: Reshard, slices: _Slices) -> list[Reshard]:
    """The slices of an array that a concatenation puts in another order, the smallest first."""
    equation = move.source[-1]
    if not graph.rule_at(move.source).is_concatenation:
        return []
    parts: list[Reshard] = []
    for atom in equation.invars:
        path = path_of((*move.source[:-1], atom))
        if path in slices:
            parts.append(slices[path])
    arrays = {part.source[-1].invars[0] for part in parts}
    if len(parts) < len(equation.invars) or len(arrays) != 1:
        return []
    if sum(part.result.bytes for part in parts) != parts[0].operand.bytes:
        return []
    return sorted(parts, key=lambda part: part.result.bytes)


def _sent(move: Reshard, graph: Graph, batch: BatchDims) -> int | float:
    equation, rule = move.source[-1], graph.rule_at(move.source)
    is_scan = isinstance(control_flow(equation), Scan)
    if rule.is_concatenation and move.operand.bytes == move.result.bytes:
        return 0  # the other operands are empty, as in a roll by no element
    if is_scan and move.after is not None:
        return _sent_for_batches(move, graph, batch)
    stays_split = batch.has(move.after)
    if move.before is None or not batch.has(move.before):
        if not stays_split:
            return 0
        # A part of each device's cotangent belongs to an array that all have.
        devices, others = batch.around(move.after, (*move.rows, *move.result.nodes))
        return all_gather(devices, move.operand.bytes / others) * move.backward
    dims = move.operand.nodes
    if batch.splits_alike(move.before, dims[: dims.index(move.before)]):
        return 0  # an earlier dimension is the split one, as of a matrix of all pairs of rows
    devices, others = batch.around(move.before, (*move.rows, *dims))
    whole, result = move.operand.bytes / others, move.result.bytes / others
    part = whole / devices
    if is_scan or is_cumulative(equation):
        return all_gather(devices, whole) * (move.times + move.backward)
    if rule.shuffled:
        # The operand and its indices are sorted by another split, and what is sorted is gathered.
        # The cotangents are added at their places.
        turned = 4 * all_gather(devices, part)
        forward = all_gather(devices, whole) + turned
        return forward * move.times + all_reduce(devices, whole) * move.backward
    if not stays_split:
        forward = all_gather(devices, whole)
        if rule.is_slice:
            forward = min(forward, all_reduce(devices, result))
        return forward * move.times
    if rule.is_concatenation:
        return part * (_CONCATENATED * move.times + _CONCATENATED_BACK * move.backward)
    if rule.is_slice:
        strides = equation.params.get("strides")
        if strides is not None and move.before is not None and move.after is not None:
            # Every second or third row is taken, and as many from each part.
            rows, stride = graph.sizes[move.before], strides[move.operand.nodes.index(move.before)]
            if graph.sizes[move.after] * stride == rows and rows // devices % stride == 0:
                return 0
        gathered = all_gather(devices, result)
        forward = min(gathered, _SLICED * part)
        return forward * move.times + min(gathered, part) * move.backward
    return part * (move.times + move.backward)


def _sent_for_batches(move: Reshard, graph: Graph, batch: BatchDims) -> int | float:
    """What devices send so that each has rows of each batch that a scan goes over, or all rows."""
    batches, of_batch, *_ = move.operand.nodes
    rows = [node for node, parts in graph.groupings if parts == (batches, of_batch)]
    rows = list(filter(batch.has, rows))
    if batch.has(batches) or not rows:
        return 0
    devices, others = batch.around(rows[0], (*move.rows, *move.operand.nodes))
    whole = move.operand.bytes / others
    if not batch.has(of_batch):
        return all_gather(devices, whole) * move.times
    part = whole / devices
    return (graph.sizes[batches] - 1) * part * (move.times + move.backward)
