"""A plan's report in at most ten lines."""

from collections.abc import Mapping, Sequence
from math import prod
from operator import attrgetter

from ...distributed._mesh import BATCH_AXES, PIPE
from ..solver._figures import Pipelining
from ._data import NotDone, PlannedArray, PlanReport, ProgramReport, total_bytes
from ._not_done import is_tensor_parallel, parameters_of, sharded_over
from ._text import (
    WIDTH,
    grouped,
    hanging,
    mesh_text,
    offloaded_sentence,
    paragraph,
    percentages,
    recomputed_sentence,
    scaled,
    shortened,
)

MOST_LINES = 10
_DETAILS = "Details: plan.table(), plan.report"
# In the order of the first line.
_USES = (
    "pipeline parallel",
    "data parallel",
    "context parallel",
    "domain parallel",
    "FSDP",
    "parameter sharding",
    "tensor parallel",
    "replication",
)


def draw_summary(report: PlanReport) -> str:
    """How the devices are used, with the estimates for each of them; one line for one device."""
    if prod(report.mesh.values()) == 1:
        return _one_device(report)
    lines: list[str] = []
    # The most detailed version that fits: each one leaves out one thing more.
    for left_out in range(5):
        shares = _shares(report, reasons=left_out < 1, merged=left_out > 1)
        estimates = _estimates(report, short=left_out > 1)
        lines = [*_devices(report), _parameters(report), *shares, *estimates]
        for not_done in report.not_done:
            lines += _not_done(not_done, remedies=left_out < 4)
        if left_out < 3:
            lines.append(_DETAILS)
        if len(lines) <= MOST_LINES:
            return "\n".join(lines)
    return "\n".join([*lines[: MOST_LINES - 1], f"... {_DETAILS}"])


def _one_device(report: PlanReport) -> str:
    states = report.totals.optimizer_state.bytes
    size = report.totals.parameters.bytes
    text = f"1 device: {_count(parameters_of(report)):,} parameters ({scaled(size)})"
    program = report.program_or_none
    if program is None:
        if states:
            text += f", {scaled(states)} of optimizer state"
        return text
    text += f", memory about {scaled(program.memory.total)}"
    if program.device_memory_known:
        text += f" of {scaled(program.device_memory)}"
    return "\n".join([text, *_saved_memory(program)])


def _count(arrays: Sequence[PlannedArray]) -> int:
    return sum(map(attrgetter("size"), arrays))


def _devices(report: PlanReport) -> list[str]:
    # Axes that are used alike are one factor: data=2 and fsdp=4 are 8-way FSDP.
    sizes = {axis: size for axis, size in report.mesh.items() if size > 1}
    counts: dict[str, int] = dict.fromkeys(_USES, 1)
    for axis, size in sizes.items():
        counts[_use(report, axis)] *= size
    uses = " x ".join(f"{count}-way {use}" for use, count in counts.items() if count > 1)
    mesh = f"(mesh {mesh_text(sizes)})"
    line = f"{prod(sizes.values()):,} devices = {uses}"
    if len(line) > WIDTH:  # `4-way data x 2-way tensor parallel`
        line = line.replace(" parallel x", " x")
    if len(f"{line} {mesh}") > WIDTH:
        return [line, f"  {mesh}"]
    return [f"{line} {mesh}"]


def _use(report: PlanReport, axis: str) -> str:
    """What the devices along a mesh axis do; without a program, the axes are used as usual."""
    # An optimizer's state may have more parts than the parameters, which each device has whole.
    others = [array for array in report.arrays if array.role != "optimizer state"]
    sharded = sharded_over(others, axis)
    program = report.program_or_none
    is_model_axis, over_batch, has_batch = axis == "model", axis in BATCH_AXES, True
    splits: Mapping[str, str] = {}
    if program is not None:
        is_model_axis, over_batch = axis in program.model_axes, axis in program.batch_axes
        has_batch, splits = bool(program.batch), program.split_examples
        if axis == PIPE and program.pipeline is not None:
            return "pipeline parallel"
    if is_model_axis and any(map(is_tensor_parallel, sharded)):
        return "tensor parallel"
    # Arrays in parts over the devices that share the batch.
    if sharded and (over_batch or not has_batch):
        return "FSDP"
    # In parts, though all these devices compute with the same rows.
    if sharded:
        return "parameter sharding"
    if axis in splits:
        return splits[axis]
    if over_batch:
        return "data parallel"
    return "replication"


def _parameters(report: PlanReport) -> str:
    total = report.totals.parameters
    each = "all of them on each device"
    if total.factor > 1:
        less = f"{total.factor:.0f}x less"
        if total.factor < 100:
            less = f"{total.factor:.1f}x less"
        each = f"{scaled(total.bytes_per_device)} on each device ({less})"
    count = _count(parameters_of(report))
    return _labelled("Parameters", f"{count:,} ({scaled(total.bytes)}), {each}")


def _shares(report: PlanReport, *, reasons: bool, merged: bool) -> list[str]:
    """The share of the parameters in each way of sharding, with the largest arrays of each; if
    `merged`, those below 1 % in one line."""
    by_way = grouped(parameters_of(report), _way)
    counts: dict[str, int] = {}
    for way, arrays in by_way.items():
        if _count(arrays):
            counts[way] = _count(arrays)
    shares = dict(zip(counts, percentages([*counts.values()]), strict=True))
    small = [way for way in counts if not shares[way]]  # rounded to 0 %
    # A line for a single small share takes no more room than a line for all of them.
    if not merged or len(small) == 1:
        small = []
    widest = max(map(len, counts), default=0)
    lines = []
    for way in sorted(counts, key=lambda way: -shares[way]):
        if way in small:
            continue
        percent = "<1%"
        if shares[way]:
            percent = f"{shares[way]}%"
        first = f"  {percent:>5} {way:<{widest}}  "
        lines += _examples(first, by_way[way], reasons and way == "replicated")
    if small:
        lines.append(f"    <1% each: {', '.join(small)}")
    return lines


def _way(array: PlannedArray) -> str:
    if is_tensor_parallel(array):
        return "tensor-parallel"
    if array.reason.kind == "pipeline":
        return "on its stage"
    if array.parts == 1:
        return "replicated"
    return "FSDP-sharded"


def _examples(first: str, arrays: Sequence[PlannedArray], reasons: bool) -> list[str]:
    """The paths of the largest arrays; with `reasons` also the reason for the largest one."""
    room = WIDTH - len(first)
    if not reasons:
        return [first + _paths(arrays, room)]
    main = arrays[0].reason  # of the largest array
    alike = [array for array in arrays if array.reason == main]
    text = f"{_paths(alike, room)}: {main.text}"
    others = len(arrays) - len(alike)
    if others:
        text += f"; {others} more"
    return hanging(first, text)


def _paths(arrays: Sequence[PlannedArray], width: int) -> str:
    """As many paths as fit, of at most three; a single one that does not fit is cut."""
    paths = [array.path or "(the array)" for array in arrays]
    text = ""
    for limit in (3, 2, 1):
        text = shortened(paths, limit)
        if len(text) <= width:
            return text
    return _cut(text, width)


def _cut(text: str, width: int) -> str:
    if len(text) <= width:
        return text
    return text[: width - 3] + "..."


def _estimates(report: PlanReport, *, short: bool) -> list[str]:
    program = report.program_or_none
    if program is None:
        size = scaled(report.totals.all.bytes_per_device)
        return [_labelled("Memory", f"{size} of arrays on each device; pass `fn` for estimates")]
    lines: list[str] = []
    if program.split_examples:
        lines += hanging(_labelled("Batch", ""), program.batch)
    if program.pipeline is not None:
        lines += _pipeline(program.pipeline, short=short)
    lines.append(_labelled("Memory", _memory(program)))
    lines += _saved_memory(program)
    if program.closed_over:
        lines += _closed_over(program, short=short)
    return [*lines, *_communication(program)]


def _saved_memory(program: ProgramReport) -> list[str]:
    """What is recomputed or in the memory of the host."""
    lines: list[str] = []
    if program.recomputed is not None:
        lines += hanging(_labelled("Recomputed", ""), recomputed_sentence(program.recomputed))
    if program.offloaded:
        lines += hanging(_labelled("Offloaded", ""), offloaded_sentence(program.offloaded))
    return lines


def _pipeline(pipeline: Pipelining, *, short: bool) -> list[str]:
    layers = " and ".join(map(str, pipeline.layers))
    of_stage = f"{layers} layers"
    if layers == "1":
        of_stage = "1 layer"
    stages = f"{pipeline.stages} stages of {of_stage}, {pipeline.microbatches} microbatches"
    size = scaled(pipeline.bytes)
    costs = f"bubble {pipeline.bubble:.0%} of the time, {size} sent between stages"
    if short:
        costs = f"bubble {pipeline.bubble:.0%}, {size} sent"
    return hanging(_labelled("Pipeline", ""), f"{stages}, {costs}")


def _closed_over(program: ProgramReport, *, short: bool) -> list[str]:
    """The large arrays that the function closes over, which every device has."""
    size = scaled(total_bytes(program.closed_over))
    names = list(dict.fromkeys(map(attrgetter("name"), program.closed_over)))  # each once
    shown = ", ".join(names[:2])
    if len(names) > 2:
        shown += f" and {len(names) - 2} more"
    text = f"{size} replicated: {shown}"
    if not short:
        text += ". As a part of the model, they would be sharded."
    return hanging(_labelled("Closed over", ""), text)


def _memory(program: ProgramReport) -> str:
    about = f"about {scaled(program.memory.total)}"
    limit = scaled(program.device_memory)
    is_full = program.memory.total > program.device_memory
    if program.device_memory_known and is_full:
        return f"{about}, MORE THAN the {limit} of each device"
    if program.device_memory_known:
        return f"{about}, of the {limit} of each device"
    if is_full:
        return f"{about} on each device, MORE THAN the assumed limit of {limit}"
    return f"{about} on each device (limit unknown; {limit} assumed)"


def _communication(program: ProgramReport) -> list[str]:
    sizes: dict[str, int] = {}  # by kind: gradients, activations, parameters
    for traffic in program.traffic:
        sizes[traffic.kind] = sizes.get(traffic.kind, 0) + traffic.bytes
    total = sum(sizes.values())
    first = _labelled("Communication", "")
    if not total:
        return [f"{first}none"]
    percents = percentages(list(sizes.values()))  # which add up to 100
    shares = dict(zip(sizes, percents, strict=True))
    kinds = sorted(shares, key=lambda kind: -shares[kind])
    shown = ", ".join(f"{shares[kind]}% {kind}" for kind in kinds if shares[kind])
    return hanging(first, f"about {scaled(total)} per device and step: {shown}")


def _not_done(not_done: NotDone, *, remedies: bool) -> list[str]:
    if not remedies:
        return [_cut(f"Not done: {not_done.asked} (plan.report.not_done)", WIDTH)]
    text = f"Not done: {not_done.asked}, because {not_done.why}."
    if not_done.forced_by:
        text += f" {not_done.forced_by}"
    return paragraph(text, rest="  ")


def _labelled(label: str, text: str) -> str:
    return f"{label:<15}{text}"
