"""The estimated communication of a plan, by mesh axis and by cause."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from math import prod

from ..solver._cost import (
    BatchDims,
    batch_meetings,
    batch_sums,
    cut_sides,
    gathers,
    met,
    over_batch,
    reduced,
    sum_bytes,
)
from ..solver._hardware import Hardware, all_gather, all_reduce
from ..solver._strategy import (
    Decision,
    batch_dims,
    batch_gathers,
    is_split,
    parts,
    stored,
    used_axes,
)
from ..tree._overrides import spec_axes
from ..tree._rows import Row
from ._data import Traffic, TrafficKind
from ._reasons import Reasons
from ._text import grouped, shortened

Axes = tuple[str, ...]
Entries = Iterator[tuple[Axes, TrafficKind, str, int | float]]


def traffic(rows: Sequence[Row], reasons: Reasons, hardware: Hardware) -> tuple[Traffic, ...]:
    """The bytes that each device communicates in a step, the largest cause first."""
    decision, axes = reasons.decision, reasons.axes
    batch = batch_dims(decision.program, parts(decision.strategy.batch, axes))
    found: dict[tuple[Axes, TrafficKind, str], float] = defaultdict(float)
    for over, kind, cause, size in chain(
        _tensor_parallel(reasons, batch, hardware),
        _over_batch(reasons, batch, hardware),
        _gathers(rows, decision, axes),
    ):
        found[over, kind, cause] += size
    ordered = sorted(found.items(), key=lambda item: (-item[1], item[0]))
    return tuple(Traffic(*key, round(size)) for key, size in ordered if size > 0)


def _tensor_parallel(reasons: Reasons, batch: BatchDims, hardware: Hardware) -> Entries:
    """All-reduces of sums over tensor-parallel dimensions, and all-gathers after them."""
    decision, classes = reasons.decision, reasons.decision.classes
    graph = decision.program.graph
    for found in reduced(graph.sums.values(), classes, hardware):
        if is_split(decision, (found.node,)):
            names = reasons.sets[classes[found.node]].names
            cause = f"all-reduces of activations, {_way(found.backward)}: {names}"
            size = sum_bytes(found, hardware) / batch.parts(found.dims)
            yield reasons.over, "activations", cause, all_reduce(reasons.n, size)
    for root, size in chain(*(cut_sides(cut, classes, batch) for cut in graph.cuts)):
        if root in decision.chosen:
            cause = f"all-gathers after tensor-parallel arrays: {reasons.sets[root].names}"
            yield reasons.over, "activations", cause, all_gather(reasons.n, size)


def _over_batch(reasons: Reasons, batch: BatchDims, hardware: Hardware) -> Entries:
    """Sums over the batch, and all-gathers of it."""
    decision, graph = reasons.decision, reasons.decision.program.graph
    spread = used_axes(decision.strategy.batch, reasons.axes)
    tokens = decision.program.batch.sequence
    what = "sequence" if tokens else "batch"
    count = lambda dims: reasons.n if is_split(decision, dims) else 1
    for found in batch_sums(graph, batch, hardware):
        size = over_batch(found, batch, stored(decision.strategy, reasons.axes), hardware)
        size = size / count(found.dims)
        if found.backward and batch.parts(found.dims) == 1:
            yield spread, "gradients", f"gradients, summed over the {what}", size
        else:
            yield spread, "activations", f"sums over the {what}, {_way(found.backward)}", size
    for meeting in batch_meetings(graph, batch):
        compared = "all-gathers of the batch, compared with itself"
        cause = "all-gathers of keys and values" if tokens else compared
        yield spread, "activations", cause, met(meeting, batch) / count(meeting.dims)
    cause = "all-gathers of the batch, which is given split over fsdp too"
    size = batch_gathers(decision.program, decision.strategy, reasons.axes)
    yield ("fsdp",), "activations", cause, size


def _way(backward: bool) -> str:
    return "backward" if backward else "forward"


def _gathers(rows: Sequence[Row], decision: Decision, axes: Mapping[str, int]) -> Entries:
    """FSDP-sharded arrays are all-gathered, over the axes of their storage alone."""
    found: list[tuple[Axes, str, float]] = []
    for row, value, d in zip(rows, decision.program.parameters, decision.computed, strict=True):
        kept = set() if d is None else set(spec_axes([*row.spec, *[None] * len(value.dims)][d]))
        used = {axis for entry in row.spec for axis in spec_axes(entry)}
        over = tuple(axis for axis in axes if axis in used - kept)
        size = value.bytes * gathers(decision.program.graph, value)
        size = all_gather(parts(over, axes), size / prod(axes[axis] for axis in kept))
        found.append((over, row.leaf.name, size))
    for over, gathered in grouped(found, lambda one: one[0]).items():
        cause = f"all-gathers of parameters: {shortened([name for _, name, _ in gathered])}"
        yield over, "parameters", cause, sum(size for _, _, size in gathered)
