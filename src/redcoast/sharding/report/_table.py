"""A plan's report as a table of its arrays."""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from ...core._errors import several
from ..tree._leaf_plans import Kind
from ..tree._overrides import spec_axes
from . import _data as data
from ._text import (
    WIDTH,
    braced,
    coupling_sentence,
    grouped,
    hanging,
    in_columns,
    megabytes,
    paragraph,
    recomputed_sentence,
)

# For each axis, at most so many causes, and none with less than this share of the communication.
_SHOWN, _LITTLE = 6, 0.01

_ALSO_FSDP = (
    "Large tensor-parallel arrays are FSDP-sharded over fsdp as well, along their largest "
    "remaining dimension."
)
_UNKNOWN = (
    "Not understood: {}. Their inputs are assumed to be replicated: they are all-gathered before, "
    "and may be sharded again after."
)
_COUPLED = "`accumulate`, or batches of another size, would change the loss."
_COLUMNS = ("path", "shape", "spec", "MB/device")
_LONGEST = {1: 22, 2: 22}
_LABELS: dict[Kind, str] = {
    "tensor-parallel": "Tensor-parallel",
    "fsdp": "FSDP-sharded",
    "replicated": "Replicated",
    "follows": "Optimizer state",
    "override": "Override",
    "pipeline": "On its stage",
}


class _Group(NamedTuple):
    """Arrays that differ only in their paths: their pattern, the first one and all their bytes."""

    paths: str
    first: data.PlannedArray
    bytes_per_device: int


def draw_table(report: data.PlanReport) -> str:
    """All arrays below the reason for their sharding, similar ones in one line, and the sums."""
    program = report.program_or_none
    mesh = ", ".join(f"{axis}={size}" for axis, size in report.mesh.items())
    others = (size for axis, size in report.mesh.items() if axis != "data")
    one = max(others) == 1 and all(array.parts == 1 for array in report.arrays)
    groups = groups_of(report, by_reason=not one)
    sections = [("", groups)] if one else _sections(groups)
    lines = [f"Plan over the mesh {mesh}", "", *_body(sections), ""]
    if one:
        lines += ["All arrays are replicated: fsdp and model have one device each.", ""]
    elif any(x.reason.kind == "tensor-parallel" and "fsdp" in x.axes for x in report.arrays):
        instead = program is not None and "fsdp" in program.model_axes
        lines += [] if instead else [*paragraph(_ALSO_FSDP), ""]
    lines += _totals(report.totals)
    lines += [] if program is None else _program(program)
    return "\n".join(lines)


def groups_of(report: data.PlanReport, *, by_reason: bool = True) -> list[_Group]:
    """The arrays of a plan; those that differ only in parts of their paths are one group.

    The usual state of an optimizer, which is sharded like the parameters, is left out.
    """
    usual = lambda x: x.role == "optimizer state" and (x.reason.kind == "follows" or x.bytes <= 64)
    arrays = [array for array in report.arrays if not usual(array)]
    kind = lambda x: (x.shape, x.spec, x.dtype, x.reason if by_reason else None)
    found = []
    for alike in grouped(range(len(arrays)), lambda place: kind(arrays[place])).values():
        for pattern, places in braced([arrays[place].path for place in alike]):
            first, size = alike[places[0]], sum(arrays[alike[p]].bytes_per_device for p in places)
            found.append((first, _Group(pattern, arrays[first], size)))
    return [group for _, group in sorted(found, key=lambda item: item[0])]


def _sections(groups: Sequence[_Group]) -> list[tuple[str, list[_Group]]]:
    """Groups by reason: tensor-parallel ones first, then FSDP-sharded and replicated ones."""
    found = grouped(groups, lambda group: (group.first.reason, group.first.parts == 1)).values()
    rank = lambda x: 2 if x.parts == 1 else int(x.reason.kind == "fsdp")
    sections = []
    for members in sorted(found, key=lambda members: rank(members[0].first)):
        first = members[0].first
        label = "Replicated" if first.parts == 1 else _LABELS[first.reason.kind]
        heading = label if label == "Override" else f"{label}: {first.reason.text}"
        sections.append((heading, members))
    return sections


def _body(sections: Sequence[tuple[str, list[_Group]]]) -> list[str]:
    drawn = [
        (heading, [_cells(group, heading) for group in groups]) for heading, groups in sections
    ]
    cells = [_COLUMNS, *(row for _, rows in drawn for row in rows)]
    longest = [max(map(len, column)) for column in zip(*cells, strict=True)]
    widths = [min(width, _LONGEST.get(i, width)) for i, width in enumerate(longest)]
    widths[0] = min(widths[0], WIDTH - sum(widths[1:]) - 2 * (len(widths) - 1))
    lines = in_columns(_COLUMNS, widths)
    for heading, rows in drawn:
        lines += paragraph(heading, rest="    ") if heading else []
        lines += [line for row in rows for line in in_columns(row, widths)]
    return lines


def _cells(group: _Group, heading: str) -> tuple[str, ...]:
    path = ("  " if heading else "") + (group.paths or "(the array)")
    entries = ", ".join("+".join(spec_axes(entry)) or "-" for entry in group.first.spec)
    spec = f"({entries})" if entries else "replicated"
    return path, str(group.first.shape), spec, megabytes(group.bytes_per_device)


def _totals(totals: data.Totals) -> list[str]:
    parameters, states = totals.parameters, totals.optimizer_state
    lines = [_total("parameters", parameters)]
    if states.arrays:
        times = states.bytes / max(1, parameters.bytes)
        # If few parameters are trained, it is a small fraction.
        shown = f"{times:.1f}" if times > 0.05 else f"{times:.2g}"
        lines.append(_total("optimizer state", states))
        lines.append(f"{'':<17}(sharded like the parameters; {shown}x their size)")
    if totals.other.bytes > 1e6:
        lines.append(_total("other", totals.other))
    return [*lines, _total("all", totals.all)] if len(lines) > 1 else lines


def _total(name: str, total: data.Total) -> str:
    full, device = megabytes(total.bytes), megabytes(total.bytes_per_device)
    less = f" ({total.factor:.1f}x less)" if total.factor > 1 else ""
    return f"{name:<15}  {device:>12} MB per device of {full} MB{less}"


def _program(program: data.ProgramReport) -> list[str]:
    """The lines below the sums: memory, batch and communication."""
    lines, coupled = _memory(program), program.coupled
    texts = [_closed_over(program.closed_over)] if program.closed_over else []
    texts += [program.batch] if program.batch else []
    texts += [_repeated(one, program.arithmetic.flops) for one in program.repeated]
    texts += [] if coupled is None else [f"{coupling_sentence(coupled)} {_COUPLED}"]
    for text in texts:
        lines += ["", *paragraph(text)]
    if program.hindrances:
        lines += ["", "Could not be sharded along another dimension:"]
    for one in program.hindrances:
        lines += paragraph(f"{one.arrays}: {one.why}", "  ", "    ")
    lines += ["", *_traffic(program.traffic)]
    for text in program.gathered_whole:
        lines += ["", *paragraph(text)]
    if program.unknown:
        names = ", ".join(f"{count} x {name}" for name, count in program.unknown.items())
        lines += ["", *paragraph(_UNKNOWN.format(names))]
    return lines


def _closed_over(entries: Sequence[data.ClosedOver]) -> str:
    """Describes arrays that the function closes over, and how to have them sharded."""
    size = megabytes(sum(one.bytes for one in entries))
    arrays = "an array" if len(entries) == 1 else f"{len(entries)} arrays"
    over = lambda one: f", tensor-parallel over {' x '.join(one.axes)}" if one.axes else ""
    shown = (f"{one.name} ({megabytes(one.bytes)} MB{over(one)})" for one in entries)
    kinds = Counter(shown).most_common()
    named = several([f"{n} x {kind}" if n > 1 else kind for kind, n in kinds], 6, noun=" shapes")
    return (
        f"The function closes over {arrays} of {size} MB: {named}. Constants of the compiled "
        "program are replicated on every device. Pass them as a part of the model that "
        '`trainable` leaves out, such as `trainable={"student": True, "teacher": False}`, or as a '
        "part of your own state, to shard them like its other arrays."
    )


def _memory(program: data.ProgramReport) -> list[str]:
    memory, available = program.memory, program.device_memory
    sizes = {name: size for name, size in vars(memory).items() if size and name != "total"}
    parts = ", ".join(f"{megabytes(x)} {name.replace('_', ' ')}" for name, x in sizes.items())
    lines = paragraph(f"Estimated memory per device: {megabytes(memory.total)} MB ({parts}).")
    if memory.total > available:
        known = "that it has" if program.device_memory_known else "that are assumed"
        lines += paragraph(
            f"That is more than the {megabytes(available)} MB {known} "
            "(`Hardware.memory`): use more devices, a larger `fsdp` or `model`, a smaller batch, "
            "or `jax.checkpoint` in the model."
        )
    if program.recomputed is not None:
        again = program.recomputed
        lines += paragraph(f"Recomputed {recomputed_sentence(again)}.")
        for line in again.what:
            lines += paragraph(line, "  ", "    ")
    return ["", *lines]


def _repeated(one: data.Repeated, flops: int | float) -> str:
    units = {"TFLOP": 1e12, "GFLOP": 1e9, "MFLOP": 1e6, "FLOP": 1}
    unit = next((unit for unit, scale in units.items() if flops >= scale), "FLOP")
    of = f": products with {one.arrays}" if one.arrays else ""
    return (
        f"{one.flops / units[unit]:.3g} of {flops / units[unit]:.3g} {unit} are computed by every "
        f"device{of}, because {one.why}."
    )


def _traffic(traffic: Sequence[data.Traffic]) -> list[str]:
    """The causes below the mesh axes that they are over, the largest first."""
    if not traffic:
        return ["No communication between devices."]
    size = lambda entries: sum(one.bytes for one in entries)
    lines = [f"Estimated communication per device and step: {megabytes(size(traffic))} MB"]
    axes = grouped(traffic, lambda one: one.axis)
    for axis, entries in sorted(axes.items(), key=lambda item: -size(item[1])):
        lines += _cause(size(entries), f"over {axis}", 0)
        shown = [one for one in entries if one.bytes > _LITTLE * size(entries)][:_SHOWN]
        for one in shown:
            lines += _cause(one.bytes, one.cause, 4)
        rest = entries[len(shown) :]
        if megabytes(size(rest)).strip("0."):
            lines += _cause(size(rest), f"{len(rest)} smaller", 4)
    return lines


def _cause(count: int, text: str, indent: int) -> list[str]:
    return hanging(f"{'':<{indent}}{megabytes(count):>12} MB  ", text)
