"""The estimated communication of a plan, by mesh axis and by cause."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain

from ...distributed._mesh import PIPE
from .._mesh_axes import parts, used_axes
from ..program._graph import Source
from ..program._program import Staged
from ..solver._cost import gathers
from ..solver._figures import Pipelining
from ..solver._hardware import Hardware, all_gather, all_reduce
from ..solver._planned_collectives import of_batch, of_model
from ..solver._strategy import Decision, batch_gathers, stored
from ..tree._leaf_plans import LeafPlan
from ..tree._overrides import spec_axes
from ._data import Traffic, TrafficKind
from ._reasons import Reasons
from ._sent import Axes, Sent
from ._sent_whole import sent_as_asked, sent_to_hosts
from ._text import grouped, shortened

Cause = tuple[Axes, TrafficKind, str]


def all_sent(plans: Sequence[LeafPlan], reasons: Reasons, hardware: Hardware) -> list[Sent]:
    """What each device communicates in a step."""
    decision = reasons.decision
    entries = list(_of_program(reasons, hardware))
    if decision.program.staged is not None:
        entries = _of_one_stage(entries, decision.program.staged, reasons, hardware)
    # Not scaled to one stage: specs of arrays say what a stage has.
    entries += _gathers(plans, decision)
    entries += sent_to_hosts(decision)
    entries += sent_as_asked(decision)
    entries += _between_stages(decision)
    return entries


def _of_one_stage(
    entries: Sequence[Sent], staged: Staged, reasons: Reasons, hardware: Hardware
) -> list[Sent]:
    """What a device of one stage communicates, of what the program without stages would.

    `entries` are those of the whole program. A stage has a part of what is inside its layers, and
    all of what is outside them.
    """
    decision = replace(reasons.decision, program=staged.outside)
    total = _by_cause(entries)
    outside = _by_cause(_of_program(replace(reasons, decision=decision), hardware))
    of_stage: list[Sent] = []
    for entry in entries:
        cause = _cause(entry)
        share = staged.share
        if entry.kind == "gradients":
            # The gradients of a stage are summed over its microbatches first.
            share = 1 / staged.stages
        size = outside[cause] + (total[cause] - outside[cause]) * share
        # Each entry of a cause is scaled by the same factor, so that lines keep their shares.
        of_stage.append(replace(entry, bytes=entry.bytes * size / max(1, total[cause])))
    return of_stage


def _by_cause(entries: Iterable[Sent]) -> defaultdict[Cause, float]:
    """The bytes of each cause; 0 for one that does not occur."""
    sums: defaultdict[Cause, float] = defaultdict(float)
    for entry in entries:
        sums[_cause(entry)] += entry.bytes
    return sums


def _cause(entry: Sent) -> Cause:
    return entry.axes, entry.kind, entry.cause


def traffic(entries: Iterable[Sent]) -> tuple[Traffic, ...]:
    """The bytes that each device communicates in a step by their causes, the largest first."""
    sums = _by_cause(entries)
    ordered = sorted(sums.items(), key=lambda item: (-item[1], item[0]))
    return tuple(Traffic(*cause, round(size)) for cause, size in ordered if size > 0)


def _of_program(reasons: Reasons, hardware: Hardware) -> Iterator[Sent]:
    yield from _tensor_parallel(reasons, hardware)
    yield from _over_batch(reasons, hardware)


def _between_stages(decision: Decision) -> Iterator[Sent]:
    staged = decision.program.staged
    if staged is None:
        return
    cause = "from each stage of the pipeline to the next, and back"
    yield Sent((PIPE,), "activations", cause, sent_between(decision))
    # The results of the last stage go to all stages, and the gradients of the first stage's.
    shards = decision.batch.count
    gradients = staged.returned * staged.ticks / staged.microbatches
    size = all_reduce(staged.stages, (staged.carried + gradients) / shards)
    cause = "what enters and leaves the pipeline, on all stages"
    yield Sent((PIPE,), "activations", cause, size)


def sent_between(decision: Decision) -> float:
    """Bytes that a device sends to the next stage in a step, and back."""
    staged = decision.program.staged
    assert staged is not None
    shards = decision.batch.count
    return (staged.carried + staged.returned) / shards * staged.ticks / staged.microbatches


def pipelining(decision: Decision) -> Pipelining | None:
    """How the program runs as a pipeline, if it does."""
    staged = decision.program.staged
    if staged is None:
        return None
    sent = round(sent_between(decision))
    return Pipelining(staged.stages, staged.layers, staged.microbatches, staged.bubble, sent)


def _tensor_parallel(reasons: Reasons, hardware: Hardware) -> Iterator[Sent]:
    """All-reduces of sums over tensor-parallel dimensions, and all-gathers after them."""
    decision = reasons.decision
    graph, classes = decision.program.graph, decision.classes
    for collective in of_model(graph, classes, decision.batch, decision.n, hardware):
        if collective.root not in decision.chosen:
            continue
        # Overrides may shard two dimensions of an array, of which one counts.
        names = "arrays of overrides"
        if collective.root in reasons.sets:
            names = reasons.sets[collective.root].names
        cause = f"all-reduces of activations, {_way(collective.backward)}: {names}"
        if collective.cause == "gathered":
            cause = f"all-gathers after tensor-parallel arrays: {names}"
        yield Sent(reasons.over, "activations", cause, collective.bytes, collective.source)


def _over_batch(reasons: Reasons, hardware: Hardware) -> Iterator[Sent]:
    """Sums over the batch, and all-gathers of it."""
    decision = reasons.decision
    spread = used_axes(decision.batch_axes, decision.sizes)
    of_tokens = decision.program.batch.splits_examples
    what = "batch"
    if of_tokens:
        what = "sequence"
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
    stored_over = stored(decision.batch_axes, decision.sizes)
    graph = decision.program.graph
    for collective in of_batch(graph, decision.batch, stored_over, hardware):
        size = collective.bytes
        # Devices of one `model` group send different parts of it.
        if decision.is_parallel(collective.dims):
            size = size / decision.n
        others = f"sums over the {what}, {_way(collective.backward)}"
        cause = causes.get(collective.cause, others)
        kind: TrafficKind = "activations"
        if collective.cause == "gradients":
            kind = "gradients"
        yield Sent(spread, kind, cause, size, collective.source)
    cause = "all-gathers of the batch, which is given split over fsdp too"
    size = batch_gathers(decision.program, decision.batch_axes, decision.sizes)
    yield Sent(("fsdp",), "activations", cause, size)


def _way(backward: bool) -> str:
    return "backward" if backward else "forward"


def _gathers(plans: Sequence[LeafPlan], decision: Decision) -> Iterator[Sent]:
    """FSDP-sharded arrays are all-gathered, over the axes of their storage alone."""
    program, axes = decision.program, decision.sizes
    layered = frozenset[int]()
    if program.staged is not None:
        layered = program.staged.layered
    arrays: list[tuple[Axes, str, float, Source]] = []
    computed = zip(plans, program.parameters, decision.computed, strict=True)
    for place, (row, value, d) in enumerate(computed):
        entries = list(map(spec_axes, row.spec))
        used = set(chain(*entries))
        # Axes that it is computed with in parts, or that each stage has its own layers along.
        kept: set[str] = set()
        # Specs have no trailing entries that are None.
        if d is not None and d < len(entries):
            kept.update(entries[d])
        times = gathers(program.graph, value)
        if place in layered:
            kept |= used & {PIPE}
            times = 1  # a stage gathers its layers once, before its first microbatch
        over = tuple(axis for axis in axes if axis in used - kept)
        part = value.bytes * times / parts(tuple(kept), axes)
        size = all_gather(parts(over, axes), part)
        # A scan uses one layer of an array at a time.
        source = program.graph.first_use.get(value.dims)
        if source is None:
            source = program.graph.first_use.get(value.dims[1:], ())
        arrays.append((over, row.leaf.name, size, source))
    for over, gathered in grouped(arrays, lambda array: array[0]).items():
        names = shortened([name for _, name, _, _ in gathered])
        cause = f"all-gathers of parameters: {names}"
        for _, _, size, source in gathered:
            yield Sent(over, "parameters", cause, size, source)
