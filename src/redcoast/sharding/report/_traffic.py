"""The estimated communication of a plan, by mesh axis and by cause."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import chain

from ...core._control_flow import Call, control_flow, open_jaxpr
from ...distributed._mesh import PIPE
from .._mesh_axes import parts, used_axes
from ..operations import atom_bytes
from ..pipeline._stages import Pipeline
from ..program._graph import Source, SourcePath, Work, path_of
from ..solver._figures import Pipelining
from ..solver._hardware import all_gather, all_reduce, scatters_over
from ..solver._layout import StorageLayout
from ..solver._memory_access import reads_narrow
from ..solver._planned_collectives import gathered_bytes, of_batch, of_model
from ..solver._strategy import Decision, bytes_of_given_batch, gradient_shards
from ..tree._overrides import axes_of_spec, spec_axes
from ._constraint_traffic import Axes, constraint_reshards, product_traffic
from ._data import Traffic, TrafficKind
from ._reasons import Reasons
from ._sent import Sent, sent_to_hosts
from ._text import grouped, shortened

Cause = tuple[Axes, TrafficKind, str]


def all_sent(layout: StorageLayout, reasons: Reasons) -> list[Sent]:
    """What each device communicates in a step."""
    decision = reasons.decision
    # Specs of arrays say what a stage has, and not the program that one stage runs.
    of_stage = replace(reasons, decision=decision.of_stage)
    of_microbatch = [
        *_tensor_parallel(of_stage),
        *_gathers_of_sequence(of_stage.decision),
        *_over_batch(of_stage, bool(layout.update_specs)),
        *sent_to_hosts(decision),
        *_for_constraints(decision),
        *_between_stages(decision),
    ]
    # Gradients are summed over devices before they are added to those of other microbatches.
    sent = [replace(each, bytes=each.bytes * layout.accumulate) for each in of_microbatch]
    return [*sent, *_gathers(layout, reasons), *_updated_gathers(layout)]


def traffic(entries: Iterable[Sent]) -> tuple[Traffic, ...]:
    """The bytes that each device communicates in a step by their causes, the largest first."""
    sums: defaultdict[Cause, float] = defaultdict(float)
    for entry in entries:
        sums[entry.axes, entry.kind, entry.cause] += entry.bytes
    ordered = sorted(sums.items(), key=lambda item: (-item[1], item[0]))
    return tuple(Traffic(*cause, round(size)) for cause, size in ordered if size > 0)


def _between_stages(decision: Decision) -> Iterator[Sent]:
    pipeline = decision.pipeline
    if pipeline is None:
        return
    cause = "from each stage of the pipeline to the next, and back"
    yield Sent((PIPE,), "activations", cause, _sent_between(decision, pipeline))
    # The results of the last stage go to all stages, and the gradients of the first stage's.
    carried, returned = pipeline.carried_bytes
    gradients = returned * pipeline.ticks / pipeline.microbatches
    size = all_reduce(pipeline.stages, (carried + gradients) / decision.batch.count)
    cause = "what enters and leaves the pipeline, on all stages"
    yield Sent((PIPE,), "activations", cause, size)


def _sent_between(decision: Decision, pipeline: Pipeline) -> float:
    """Bytes that a device sends to the next stage in a step, and back."""
    size = sum(pipeline.carried_bytes) / decision.batch.count
    return size * pipeline.ticks / pipeline.microbatches


def pipelining(decision: Decision) -> Pipelining | None:
    """How the program runs as a pipeline, if it does."""
    pipeline = decision.pipeline
    if pipeline is None:
        return None
    sent = round(_sent_between(decision, pipeline))
    stages, count = pipeline.stages, pipeline.microbatches
    return Pipelining(stages, pipeline.layers, count, pipeline.bubble, sent)


def _for_constraints(decision: Decision) -> Iterator[Sent]:
    """What is sent to reach the shardings that the program itself asks for."""
    for constraint, change, times in constraint_reshards(decision):
        over = used_axes(axes_of_spec(change.before), decision.sizes)
        cause = "shardings that the program asks for"
        yield Sent(over, "activations", cause, change.sent * times, constraint.source)
    for product in product_traffic(decision):
        cause = "products of arrays in shardings that the program asks for"
        yield Sent(product.axes, "activations", cause, product.bytes, product.work.source)


def _tensor_parallel(reasons: Reasons) -> Iterator[Sent]:
    """All-reduces of sums over tensor-parallel dimensions, and all-gathers after them."""
    decision = reasons.decision
    graph, classes = decision.program.graph, decision.classes
    sums_whole: set[SourcePath] = set()
    for product in product_traffic(decision):
        if product.sums_whole:
            sums_whole.add(path_of(product.work.source))
    for collective in of_model(graph, classes, decision.batch, decision.n, decision.hardware):
        if collective.root not in decision.chosen:
            continue
        if not collective.backward and path_of(collective.source) in sums_whole:
            continue
        # Overrides may shard two dimensions of an array, of which one counts.
        names = "arrays of overrides"
        if collective.root in reasons.sets:
            names = reasons.sets[collective.root].names
        what, size = "all-reduces", collective.bytes
        is_scattered = scatters_over(decision.hardware, decision.n)
        if is_scattered and decision.is_along_sequence(collective.nodes):
            # The other half of an all-reduce is an all-gather, which `_gathers_of_sequence` has.
            what, size = "reduce-scatters", size / 2
        cause = f"{what} of activations, {_way(collective.backward)}: {names}"
        if collective.cause == "gathered":
            cause = f"all-gathers after tensor-parallel arrays: {names}"
        yield Sent(decision.used_model_axes, "activations", cause, size, collective.source)


def _over_batch(reasons: Reasons, in_parts: bool) -> Iterator[Sent]:
    """Sums over the batch, and all-gathers of it. With `in_parts`, each device updates a part."""
    decision, pipeline = reasons.decision, reasons.decision.pipeline
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
        "transposed": "all-to-alls of tables of all pairs, which are transposed",
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
    # XLA reduce-scatters a gradient to the shards that its array is stored or updated in.
    shards = gradient_shards(decision.used_batch_axes, decision.sizes)
    if in_parts:
        shards = decision.batch.count
    graph = decision.program.graph
    for collective in of_batch(graph, decision.batch, shards, decision.hardware):
        size = collective.bytes
        # Devices of one `model` group send different parts of it.
        if decision.is_parallel(collective.nodes):
            size = size / decision.n
        others = f"sums over the {what}, {_way(collective.backward)}"
        cause = causes.get(collective.cause, others)
        kind: TrafficKind = "activations"
        if collective.cause == "gradients":
            kind = "gradients"
            equations = map(id, collective.source)
            if pipeline is not None and not pipeline.scans.keys().isdisjoint(equations):
                # A stage sums the gradients of its microbatches first, and none in the bubble.
                size = size * pipeline.microbatches / pipeline.ticks
        yield Sent(spread, kind, cause, size, collective.source)
    cause = "all-gathers of the batch, which is given split over fsdp too"
    size = bytes_of_given_batch(decision.program, decision.batch_axes, decision.sizes)
    yield Sent(("fsdp",), "activations", cause, size)


def _way(backward: bool) -> str:
    if backward:
        return "backward"
    return "forward"


def _updated_gathers(layout: StorageLayout) -> Iterator[Sent]:
    """All-gathers of what each device has updated a part of."""
    sizes = layout.decision.sizes
    for place, spec in layout.update_specs.items():
        own, stored = axes_of_spec(spec), axes_of_spec(layout.specs[place])
        over = tuple(axis for axis in sizes if axis in own and axis not in stored)
        size = layout.decision.program.parameters[place].bytes / parts(stored, sizes)
        sent = all_gather(parts(over, sizes), size)
        yield Sent(over, "parameters", "all-gathers of updated parameters", sent)


def _gathers(layout: StorageLayout, reasons: Reasons) -> Iterator[Sent]:
    """FSDP-sharded arrays are all-gathered, over the axes of their storage alone."""
    decision = layout.decision
    program, axes = decision.program, decision.sizes
    arrays: list[tuple[Axes, str, float, Source]] = []
    stored_as = zip(layout.specs, program.parameters, decision.parallel_dims, strict=True)
    for place, (spec, value, d) in enumerate(stored_as):
        entries = list(map(spec_axes, spec))
        used = set(chain(*entries))
        # Axes that it is computed with in parts, or that each stage has its own layers along.
        kept: set[str] = set()
        # Specs have no trailing entries that are None.
        if d is not None and d < len(entries):
            kept.update(entries[d])
        is_layered = place in decision.layered
        if is_layered:
            kept |= used & {PIPE}
        over = tuple(axis for axis in axes if axis in used - kept)
        # A stage gathers its layers once, before its first microbatch.
        size = gathered_bytes(program.graph, value, parts(over, axes), at_once=is_layered)
        size /= parts(tuple(kept), axes)  # a device has only a part of it in use
        # The compiler for CPUs gathers what is the same in all microbatches before the first.
        if program.graph.is_looped(value) or decision.hardware.compiler != "cpu":
            size *= layout.accumulate
        source = program.graph.first_use_of(value).source
        if decision.hardware.compiler == "tpu" and source and reads_narrow(source[-1]):
            size /= 2  # it is converted to bfloat16 before it is gathered
        arrays.append((over, reasons.leaves[place].name, size, source))
    for over, gathered in grouped(arrays, lambda array: array[0]).items():
        names = shortened([name for _, name, _, _ in gathered])
        cause = f"all-gathers of parameters: {names}"
        for _, _, size, source in gathered:
            yield Sent(over, "parameters", cause, size, source)


def _gathers_of_sequence(decision: Decision) -> Iterator[Sent]:
    """All-gathers of the operands of products, and of the cotangents of their sums.

    A product reads its operands as a whole along the sequence, and its sums are divided along it: a
    reduce-scatter and an all-gather in place of an all-reduce (arXiv:2205.05198, section 4.2.2). A
    rematerialised block gathers again for all products, and sums only what these depend on.
    """
    if not decision.splits_sequence:
        return
    graph = decision.program.graph
    over, works = decision.used_model_axes, list[Work]()
    for work in graph.works:
        if work.forward and graph.rule_at(work.source).is_product:
            works.append(work)
    gathered: set[SourcePath] = set()
    for work in works:
        for side, dims in enumerate(work.of):
            # Products of one array with several matrices gather it once.
            identity = _identity(work, side)
            if identity in gathered or not decision.is_along_sequence(dims):
                continue
            gathered.add(identity)
            size = atom_bytes(work.source[-1].invars[side]) * work.times * work.forwards
            size /= decision.batch.parts((*work.rows, *dims))
            cause = "all-gathers of the sequence, forward"
            yield Sent(over, "activations", cause, all_gather(decision.n, size), work.source)
    by_path = {path_of(work.source): work for work in works}
    for summed in graph.partial_sums.values():
        if summed.backward or not summed.value.grad or not decision.is_chosen(summed.node):
            continue
        times, dims = summed.times, summed.value.nodes
        if decision.is_along_sequence(dims):
            work = by_path.get(path_of(summed.source))
            if work is not None:
                times, dims = work.times, (*work.rows, *dims)  # without rematerialisation
            size = summed.value.bytes * times / decision.batch.parts(dims)
            cause = "all-gathers of the sequence, backward"
            yield Sent(over, "activations", cause, all_gather(decision.n, size), summed.source)


def _identity(work: Work, side: int) -> SourcePath:
    """Identifies an operand of a product: the calls around it, and the variable.

    What is an argument of a call, as of `jnp.einsum`, is the variable outside of it.
    """
    *around, equation = work.source
    atom = equation.invars[side]
    while around:
        call = control_flow(around[-1])
        if not isinstance(call, Call) or atom not in open_jaxpr(call.jaxpr).invars:
            break
        atom = around.pop().invars[open_jaxpr(call.jaxpr).invars.index(atom)]
    return path_of((*around, atom))
