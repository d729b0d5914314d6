"""A plan's report in at most ten lines."""

from collections.abc import Sequence
from math import prod

from ...distributed._mesh import BATCH_AXES, PIPE
from ._data import NotDone, PlannedArray, PlanReport, ProgramReport
from ._not_done import is_tensor_parallel, parameters_of
from ._text import (
    WIDTH,
    grouped,
    hanging,
    paragraph,
    percentages,
    recomputed_sentence,
    scaled,
    shortened,
)

MOST_LINES = 10
_DETAILS = "Details: plan.table(), plan.report"
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
    lines = []
    for leave_out in range(5):  # the most detailed version that fits
        shares = _shares(report, reasons=leave_out < 1, merged=leave_out > 1)
        estimates = _estimates(report, short=leave_out > 1)
        lines = [*_devices(report), _parameters(report), *shares, *estimates]
        for one in report.not_done:
            lines += _not_done(one, remedies=leave_out < 4)
        lines += [_DETAILS] if leave_out < 3 else []
        if len(lines) <= MOST_LINES:
            return "\n".join(lines)
    return "\n".join([*lines[: MOST_LINES - 1], f"... {_DETAILS}"])


def _one_device(report: PlanReport) -> str:
    states, size = report.totals.optimizer_state.bytes, report.totals.parameters.bytes
    text = f"1 device: {_count(parameters_of(report)):,} parameters ({scaled(size)})"
    if (program := report.program_or_none) is None:
        return text + (f", {scaled(states)} of optimizer state" if states else "")
    limit = f" of {scaled(program.device_memory)}" if program.device_memory_known else ""
    text = f"{text}, memory about {scaled(program.memory.total)}{limit}"
    if program.recomputed is None:
        return text
    first = _labelled("Recomputed", "")
    return "\n".join([text, *hanging(first, recomputed_sentence(program.recomputed))])


def _count(arrays: Sequence[PlannedArray]) -> int:
    return sum(array.size for array in arrays)


def _devices(report: PlanReport) -> list[str]:
    sizes = {axis: size for axis, size in report.mesh.items() if size > 1}
    ways = grouped(sizes, lambda axis: _use(report, axis))
    counts = {use: prod(sizes[axis] for axis in axes) for use, axes in ways.items()}
    used = " x ".join(f"{counts[use]}-way {use}" for use in _USES if use in counts)
    mesh = "(mesh " + ", ".join(f"{axis}={size}" for axis, size in sizes.items()) + ")"
    line = f"{prod(sizes.values()):,} devices = {used}"
    line = line if len(line) <= WIDTH else line.replace(" parallel x", " x")
    return [f"{line} {mesh}"] if len(f"{line} {mesh}") <= WIDTH else [line, f"  {mesh}"]


def _use(report: PlanReport, axis: str) -> str:
    """What the devices along a mesh axis do."""
    program = report.program_or_none
    if axis == PIPE and program is not None and program.pipeline is not None:
        return "pipeline parallel"
    # Without a function, the usual axes are assumed.
    batch = BATCH_AXES if program is None else program.batch_axes
    over_model = ("model",) if program is None else program.model_axes
    over = [array for array in report.arrays if axis in array.axes]
    split = {} if program is None else program.split_examples
    if axis in over_model and any(map(is_tensor_parallel, over)):
        return "tensor parallel"
    if over:
        no_batch = program is not None and not program.batch
        return "FSDP" if axis in batch or no_batch else "parameter sharding"
    if axis in split:
        return split[axis]
    if program is not None and program.sequences and axis in batch and not split:
        return "context parallel"
    return "data parallel" if axis in batch else "replication"


def _parameters(report: PlanReport) -> str:
    total = report.totals.parameters
    factor = f"{total.factor:.{1 if total.factor < 100 else 0}f}"
    each = f"{scaled(total.bytes_per_device)} on each device ({factor}x less)"
    each = each if total.factor > 1 else "all of them on each device"
    count = _count(parameters_of(report))
    return _labelled("Parameters", f"{count:,} ({scaled(total.bytes)}), {each}")


def _shares(report: PlanReport, *, reasons: bool, merged: bool) -> list[str]:
    """The share of the parameters in each way of sharding, with the largest arrays of each; if
    `merged`, those below 1 % in one line."""
    ways = {way: x for way, x in grouped(parameters_of(report), _way).items() if _count(x)}
    shares = percentages([_count(arrays) for arrays in ways.values()])
    lines = []
    small = [way for share, way in zip(shares, ways, strict=True) if not share]
    small = small if merged and len(small) > 1 else []
    for share, way in sorted(zip(shares, ways, strict=True), key=lambda item: -item[0]):
        if way in small:
            continue
        percent, widest = f"{share}%" if share else "<1%", max(map(len, ways))
        first = f"  {percent:>5} {way:<{widest}}  "
        lines += _examples(first, ways[way], reasons and way == "replicated")
    return lines + ([f"    <1% each: {', '.join(small)}"] if small else [])


def _way(array: PlannedArray) -> str:
    if is_tensor_parallel(array):
        return "tensor-parallel"
    if array.reason.kind == "pipeline":
        return "on its stage"
    return "replicated" if array.parts == 1 else "FSDP-sharded"


def _examples(first: str, arrays: Sequence[PlannedArray], reasons: bool) -> list[str]:
    """The paths of the largest arrays; with `reasons` also the reason for the largest one."""
    room = WIDTH - len(first)
    if not reasons:
        return [first + _paths(arrays, room)]
    main = arrays[0].reason
    alike = [array for array in arrays if array.reason == main]
    others = f"; {len(arrays) - len(alike)} more" if len(alike) < len(arrays) else ""
    return hanging(first, f"{_paths(alike, room)}: {main.text}{others}")


def _paths(arrays: Sequence[PlannedArray], width: int) -> str:
    paths = [array.path or "(the array)" for array in arrays]
    texts = [shortened(paths, limit) for limit in (3, 2, 1)]
    return next((text for text in texts if len(text) <= width), _cut(texts[-1], width))


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 3] + "..."


def _estimates(report: PlanReport, *, short: bool) -> list[str]:
    program = report.program_or_none
    if program is None:
        size = scaled(report.totals.all.bytes_per_device)
        return [_labelled("Memory", f"{size} of arrays on each device; pass `fn` for estimates")]
    lines = hanging(_labelled("Batch", ""), program.batch) if program.sequences else []
    if (one := program.pipeline) is not None:
        layers = " and ".join(map(str, one.layers))
        noun = "layer" if layers == "1" else "layers"
        of_time, sent = (", ", "sent") if short else (" of the time, ", "sent between stages")
        text = (
            f"{one.stages} stages of {layers} {noun}, {one.microbatches} microbatches, bubble "
            f"{one.bubble:.0%}{of_time}{scaled(one.bytes)} {sent}"
        )
        lines += hanging(_labelled("Pipeline", ""), text)
    lines.append(_labelled("Memory", _memory(program)))
    if program.recomputed is not None:
        lines += hanging(_labelled("Recomputed", ""), recomputed_sentence(program.recomputed))
    if program.closed_over:
        lines += _closed_over(program, short=short)
    return [*lines, *_communication(program)]


def _closed_over(program: ProgramReport, *, short: bool) -> list[str]:
    """The large arrays that the function closes over, which every device has."""
    size = scaled(sum(one.bytes for one in program.closed_over))
    names = list(dict.fromkeys(one.name for one in program.closed_over))
    shown = ", ".join(names[:2])
    if len(names) > 2:
        shown += f" and {len(names) - 2} more"
    text = f"{size} replicated: {shown}"
    if not short:
        text += ". As a part of the model, they would be sharded."
    return hanging(_labelled("Closed over", ""), text)


def _memory(program: ProgramReport) -> str:
    about, limit = f"about {scaled(program.memory.total)}", scaled(program.device_memory)
    full = program.memory.total > program.device_memory
    if program.device_memory_known:
        return f"{about}, {'MORE THAN' if full else 'of'} the {limit} of each device"
    if full:
        return f"{about} on each device, MORE THAN the assumed limit of {limit}"
    return f"{about} on each device (limit unknown; {limit} assumed)"


def _communication(program: ProgramReport) -> list[str]:
    kinds = grouped(program.traffic, lambda one: one.kind)
    sizes = [sum(one.bytes for one in entries) for entries in kinds.values()]
    first = _labelled("Communication", "")
    if not sum(sizes):
        return [f"{first}none"]
    shares = sorted(zip(percentages(sizes), kinds, strict=True), key=lambda item: -item[0])
    shown = ", ".join(f"{share}% {kind}" for share, kind in shares if share)
    return hanging(first, f"about {scaled(sum(sizes))} per device and step: {shown}")


def _not_done(one: NotDone, *, remedies: bool) -> list[str]:
    if not remedies:
        return [_cut(f"Not done: {one.asked} (plan.report.not_done)", WIDTH)]
    remedy = f" {one.forced_by}" if one.forced_by else ""
    return paragraph(f"Not done: {one.asked}, because {one.why}.{remedy}", rest="  ")


def _labelled(label: str, text: str) -> str:
    return f"{label:<15}{text}"
