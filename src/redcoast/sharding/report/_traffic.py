"""The estimated communication of a plan, by mesh axis and by cause."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod

from ...distributed._mesh import PIPE
from ..program._graph import Source
from ..solver._batch_dims import BatchDims
from ..solver._cost import gathers
from ..solver._figures import Pipelining
from ..solver._hardware import Hardware, all_gather, all_reduce
from ..solver._planned_collectives import of_batch, of_model
from ..solver._strategy import (
    Decision,
    any_tensor_parallel,
    batch_gathers,
    batch_of,
    parts,
    stored,
    used_axes,
)
from ..tree._leaf_plans import LeafPlan
from ..tree._overrides import spec_axes
from ._data import Traffic, TrafficKind
from ._reasons import Reasons
from ._sent import Axes, Sent
from ._sent_whole import sent_as_asked, sent_to_hosts
from ._text import grouped, shortened


def all_sent(plans: Sequence[LeafPlan], reasons: Reasons, hardware: Hardware) -> list[Sent]:
    """What each device communicates in a step."""
    decision, axes = reasons.decision, reasons.axes
    entries = list(_of_program(reasons, hardware))
    if (staged := decision.program.staged) is not None:
        reasons = replace(reasons, decision=replace(decision, program=staged.outside))
        outside: dict[tuple[Axes, TrafficKind, str], float] = defaultdict(float)
        total: dict[tuple[Axes, TrafficKind, str], float] = defaultdict(float)
        for one in entries:
            total[one.axes, one.kind, one.cause] += one.bytes
        for one in _of_program(reasons, hardware):
            outside[one.axes, one.kind, one.cause] += one.bytes
        scaled: list[Sent] = []
        for one in entries:
            key = one.axes, one.kind, one.cause
            # The gradients of a stage are summed over its microbatches first.
            share = staged.share
            if one.kind == "gradients":
                share = 1 / staged.stages
            size = outside[key] + (total[key] - outside[key]) * share
            scaled.append(replace(one, bytes=one.bytes * size / max(1, total[key])))
        entries = scaled
    entries += _gathers(plans, decision, axes)
    entries += sent_to_hosts(decision, axes)
    entries += sent_as_asked(decision, axes)
    entries += _between_stages(decision, axes)
    return entries


def traffic(entries: Iterable[Sent]) -> tuple[Traffic, ...]:
    """The bytes that each device communicates in a step by their causes, the largest first."""
    sums: dict[tuple[Axes, TrafficKind, str], float] = defaultdict(float)
    for one in entries:
        sums[one.axes, one.kind, one.cause] += one.bytes
    ordered = sorted(sums.items(), key=lambda item: (-item[1], item[0]))
    return tuple(Traffic(*key, round(size)) for key, size in ordered if size > 0)


def _of_program(reasons: Reasons, hardware: Hardware) -> Iterator[Sent]:
    batch = batch_of(reasons.decision, reasons.axes)
    yield from _tensor_parallel(reasons, batch, hardware)
    yield from _over_batch(reasons, batch, hardware)


def _between_stages(decision: Decision, axes: Mapping[str, int]) -> Iterator[Sent]:
    if (staged := decision.program.staged) is None:
        return
    cause = "from each stage of the pipeline to the next, and back"
    yield Sent((PIPE,), "activations", cause, sent_between(decision, axes))
    # The results of the last stage go to all stages, and the gradients of the first stage's.
    shards = batch_of(decision, axes).count
    gradients = staged.returned * staged.ticks / staged.microbatches
    size = all_reduce(staged.stages, (staged.carried + gradients) / shards)
    cause = "what enters and leaves the pipeline, on all stages"
    yield Sent((PIPE,), "activations", cause, size)


def sent_between(decision: Decision, axes: Mapping[str, int]) -> float:
    """Bytes that a device sends to the next stage in a step, and back."""
    staged = decision.program.staged
    assert staged is not None
    shards = batch_of(decision, axes).count
    return (staged.carried + staged.returned) / shards * staged.ticks / staged.microbatches


def pipelining(decision: Decision, axes: Mapping[str, int]) -> Pipelining | None:
    """How the program runs as a pipeline, if it does."""
    if (one := decision.program.staged) is None:
        return None
    sent = round(sent_between(decision, axes))
    return Pipelining(one.stages, one.layers, one.microbatches, one.bubble, sent)


def _tensor_parallel(reasons: Reasons, batch: BatchDims, hardware: Hardware) -> Iterator[Sent]:
    """All-reduces of sums over tensor-parallel dimensions, and all-gathers after them."""
    decision = reasons.decision
    graph, classes = decision.program.graph, decision.classes
    for one in of_model(graph, classes, batch, reasons.n, hardware):
        if one.root not in decision.chosen:
            continue
        # Overrides may shard two dimensions of an array, of which one counts.
        names = "arrays of overrides"
        if one.root in reasons.sets:
            names = reasons.sets[one.root].names
        cause = f"all-reduces of activations, {_way(one.backward)}: {names}"
        if one.cause == "gathered":
            cause = f"all-gathers after tensor-parallel arrays: {names}"
        yield Sent(reasons.over, "activations", cause, one.bytes, one.source)


def _over_batch(reasons: Reasons, batch: BatchDims, hardware: Hardware) -> Iterator[Sent]:
    """Sums over the batch, and all-gathers of it."""
    decision, graph = reasons.decision, reasons.decision.program.graph
    spread = used_axes(decision.strategy.batch, reasons.axes)
    of_tokens = decision.program.batch.sequence
    what = "sequence" if of_tokens else "batch"
    causes = {
        "gradients": f"gradients, summed over the {what}",
        "written": "all-gathers of the batch, written by index",
        "compared": "all-gathers of the batch, compared with itself",
        "by index": "rows of the batch, looked up and added by index",
        "halos": "halos of convolutions and windows",
        "turned": "all-to-alls around Fourier transforms",
        "uneven": "all-gathers of examples, where a size does not divide",
        "moved": "rows of the batch, which other devices need",
    }
    if decision.program.batch.sets:
        what = "split examples"
        causes["gradients"] = "gradients, summed over the batch"
        causes["compared"] = "all-gathers of examples, compared with themselves"
        causes["written"] = "all-gathers of examples, written by index"
        causes["moved"] = "parts of examples, which other devices need"
    elif of_tokens:
        causes |= dict.fromkeys(("written", "compared"), "all-gathers of keys and values")
    for one in of_batch(graph, batch, stored(decision.strategy, reasons.axes), hardware):
        size = one.bytes
        if any_tensor_parallel(decision, one.dims):
            size = size / reasons.n
        cause = causes.get(one.cause, f"sums over the {what}, {_way(one.backward)}")
        kind: TrafficKind = "activations"
        if one.cause == "gradients":
            kind = "gradients"
        yield Sent(spread, kind, cause, size, one.source)
    cause = "all-gathers of the batch, which is given split over fsdp too"
    size = batch_gathers(decision.program, decision.strategy, reasons.axes)
    yield Sent(("fsdp",), "activations", cause, size)


def _way(backward: bool) -> str:
    return "backward" if backward else "forward"


def _gathers(
    plans: Sequence[LeafPlan], decision: Decision, axes: Mapping[str, int]
) -> Iterator[Sent]:
    """FSDP-sharded arrays are all-gathered, over the axes of their storage alone."""
    found: list[tuple[Axes, str, float, Source]] = []
    parameters, staged = decision.program.parameters, decision.program.staged
    first_use = decision.program.graph.first_use
    layered = frozenset() if staged is None else staged.layered
    for place, (row, value, d) in enumerate(zip(plans, parameters, decision.computed, strict=True)):
        kept = set() if d is None else set(spec_axes([*row.spec, *[None] * len(value.dims)][d]))
        used = {axis for entry in row.spec for axis in spec_axes(entry)}
        kept |= {PIPE} & used if place in layered else set()
        over = tuple(axis for axis in axes if axis in used - kept)
        # A stage gathers its layers once, before its first microbatch.
        times = 1 if place in layered else gathers(decision.program.graph, value)
        part = value.bytes * times / prod(axes[axis] for axis in kept)
        size = all_gather(parts(over, axes), part)
        # A scan uses one layer of an array at a time.
        source = first_use.get(value.dims, first_use.get(value.dims[1:], ()))
        found.append((over, row.leaf.name, size, source))
    for over, gathered in grouped(found, lambda one: one[0]).items():
        names = shortened([name for _, name, _, _ in gathered])
        for _, _, size, source in gathered:
            yield Sent(over, "parameters", f"all-gathers of parameters: {names}", size, source)
