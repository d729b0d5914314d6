"""A plan's report as a table of its arrays."""

from collections import Counter
from collections.abc import Sequence
from math import prod
from typing import NamedTuple

from ...core._errors import several
from ..tree._leaf_plans import Kind
from . import _data as data
from ._text import (
    WIDTH,
    braced,
    coupling_sentence,
    grouped,
    hanging,
    in_columns,
    megabytes,
    mesh_text,
    offloaded_sentence,
    paragraph,
    recomputed_sentence,
    spec_text,
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
_LONGEST = {1: 22, 2: 22}  # of the shape and the spec, which are broken if they are longer
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
    lines = [f"Plan over the mesh {mesh_text(report.mesh)}", ""]
    others = prod(report.mesh.values()) // report.mesh["data"]
    # Without devices on other axes, the reasons would all be the same.
    if others == 1 and len(report.replicated) == len(report.arrays):
        groups = groups_of(report, by_reason=False)
        lines += [*_body([("", groups)]), ""]
        lines += ["All arrays are replicated: fsdp and model have one device each.", ""]
    else:
        lines += [*_body(_sections(groups_of(report))), ""]
        is_model_axis = program is not None and "fsdp" in program.model_axes
        parallel = (array for array in report.arrays if array.reason.kind == "tensor-parallel")
        if any("fsdp" in array.axes for array in parallel) and not is_model_axis:
            lines += [*paragraph(_ALSO_FSDP), ""]
    lines += _totals(report.totals)
    if program is not None:
        lines += _program(program)
    return "\n".join(lines)


def groups_of(report: data.PlanReport, *, by_reason: bool = True) -> list[_Group]:
    """The arrays of a plan; those that differ only in parts of their paths are one group.

    The usual state of an optimizer, which is sharded like the parameters, is left out.
    """
    places: dict[int, int] = {}  # in the tree, by the `id` of the array
    by_appearance: dict[tuple[object, ...], list[data.PlannedArray]] = {}
    for place, array in enumerate(report.arrays):
        # It follows its parameter, or is small, as a count of steps is.
        is_usual = array.reason.kind == "follows" or array.bytes <= 64
        if array.role == "optimizer state" and is_usual:
            continue
        places[id(array)] = place
        # What the columns show, and the heading that the line is below.
        appearance = (array.shape, array.spec, array.dtype, by_reason and array.reason)
        by_appearance.setdefault(appearance, []).append(array)
    groups: list[_Group] = []
    for alike in by_appearance.values():
        for pattern, members in braced([array.path for array in alike]):
            # Arrays of one shape, dtype and spec take the same bytes each.
            first = alike[members[0]]
            groups.append(_Group(pattern, first, len(members) * first.bytes_per_device))
    return sorted(groups, key=lambda group: places[id(group.first)])


def _sections(groups: Sequence[_Group]) -> list[tuple[str, list[_Group]]]:
    """Groups by reason: tensor-parallel ones first, then FSDP-sharded and replicated ones."""
    # An override may replicate arrays or shard them, which are two sections.
    by_reason = grouped(groups, lambda group: (group.first.reason, group.first.parts == 1))
    sections = []
    for members in sorted(by_reason.values(), key=lambda members: _rank(members[0].first)):
        first = members[0].first
        label = "Replicated"
        if first.parts > 1:
            label = _LABELS[first.reason.kind]
        heading = f"{label}: {first.reason.text}"
        if label == "Override":
            heading = label
        sections.append((heading, members))
    return sections


def _rank(array: data.PlannedArray) -> int:
    """The place of an array's section in the table."""
    if array.parts == 1:
        return 2
    return int(array.reason.kind == "fsdp")


def _body(sections: Sequence[tuple[str, list[_Group]]]) -> list[str]:
    drawn = []
    all_rows: list[tuple[str, ...]] = [_COLUMNS]
    for heading, groups in sections:
        rows = [_cells(group, heading) for group in groups]
        drawn.append((heading, rows))
        all_rows += rows
    widths = []
    for i, column in enumerate(zip(*all_rows, strict=True)):
        longest = max(map(len, column))
        widths.append(min(longest, _LONGEST.get(i, longest)))
    # Paths get what the others leave of the page. They can be broken at a slash.
    gaps = 2 * (len(widths) - 1)
    widths[0] = min(widths[0], WIDTH - sum(widths[1:]) - gaps)
    lines = in_columns(_COLUMNS, widths)
    for heading, rows in drawn:
        if heading:
            lines += paragraph(heading, rest="    ")
        for row in rows:
            lines += in_columns(row, widths)
    return lines


def _cells(group: _Group, heading: str) -> tuple[str, ...]:
    path = group.paths or "(the array)"
    if heading:
        path = f"  {path}"
    first = group.first
    return path, str(first.shape), spec_text(first.spec), megabytes(group.bytes_per_device)


def _totals(totals: data.Totals) -> list[str]:
    parameters, states = totals.parameters, totals.optimizer_state
    lines = [_total("parameters", parameters)]
    if states.arrays:
        times = states.bytes / max(1, parameters.bytes)
        # If few parameters are trained, it is a small fraction.
        shown = f"{times:.2g}"
        if times > 0.05:
            shown = f"{times:.1f}"
        how = "sharded like the parameters"
        if states.factor > 1.1 * parameters.factor:
            how = "each device updates a part of the parameters"
        lines.append(_total("optimizer state", states))
        lines.append(f"{'':<17}({how}; {shown}x their size)")
    # Counts of steps and keys are not worth a line.
    if totals.other.bytes > 1e6:
        lines.append(_total("other", totals.other))
    if len(lines) > 1:
        lines.append(_total("all", totals.all))
    return lines


def _total(name: str, total: data.Total) -> str:
    full = megabytes(total.bytes)
    device = megabytes(total.bytes_per_device)
    line = f"{name:<15}  {device:>12} MB per device of {full} MB"
    if total.factor > 1:
        line += f" ({total.factor:.1f}x less)"
    return line


def _program(program: data.ProgramReport) -> list[str]:
    """The lines below the sums: memory, batch and communication."""
    # Each of these is a paragraph, and most programs have only that of the batch.
    texts = []
    if program.closed_over:
        texts.append(_closed_over(program.closed_over))
    if program.batch:
        texts.append(program.batch)
    for repeated in program.repeated:
        texts.append(_repeated(repeated, program.arithmetic.flops))
    if program.coupled is not None:
        texts.append(f"{coupling_sentence(program.coupled)} {_COUPLED}")
    lines = _memory(program)
    for text in texts:
        lines += ["", *paragraph(text)]
    if program.hindrances:
        lines += ["", "Could not be sharded along another dimension:"]
    for hindrance in program.hindrances:
        lines += paragraph(f"{hindrance.arrays}: {hindrance.why}", "  ", "    ")
    lines += ["", *_traffic(program.traffic)]
    for text in (*program.gathered_whole, *program.waiting):
        lines += ["", *paragraph(text)]
    if program.unknown:
        names = ", ".join(f"{count} x {name}" for name, count in program.unknown.items())
        lines += ["", *paragraph(_UNKNOWN.format(names))]
    return lines


def _closed_over(entries: Sequence[data.ClosedOver]) -> str:
    """Describes arrays that the function closes over, and how to have them sharded."""
    size = megabytes(data.total_bytes(entries))
    arrays = "an array"
    if len(entries) > 1:
        arrays = f"{len(entries)} arrays"
    counts: Counter[str] = Counter()  # such as `12 x float32[512,512]`
    for array in entries:
        about = f"{megabytes(array.bytes)} MB"
        if array.axes:
            about += f", tensor-parallel over {' x '.join(array.axes)}"
        counts[f"{array.name} ({about})"] += 1
    texts = []
    for text, count in counts.most_common():
        if count > 1:
            text = f"{count} x {text}"
        texts.append(text)
    named = several(texts, 6, noun=" shapes")
    return (
        f"The function closes over {arrays} of {size} MB: {named}. Constants of the compiled "
        "program are replicated on every device. Pass them as a part of the model that "
        '`trainable` leaves out, such as `trainable={"student": True, "teacher": False}`, or as a '
        "part of your own state, to shard them like its other arrays."
    )


def _memory(program: data.ProgramReport) -> list[str]:
    memory, available = program.memory, program.device_memory
    parts: list[str] = []
    for name, size in vars(memory).items():
        if size:
            parts.append(f"{megabytes(size)} {name.replace('_', ' ')}")
    total = f"Estimated memory per device: {megabytes(memory.total)} MB ({', '.join(parts)})."
    lines = ["", *paragraph(total)]
    if memory.total > available:
        # An estimate, so that this is no error: the compiler may need less.
        source = "that are assumed"
        if program.device_memory_known:
            source = "that it has"
        lines += paragraph(
            f"That is more than the {megabytes(available)} MB {source} "
            "(`Hardware.memory`): use more devices, a larger `fsdp` or `model`, a smaller batch, "
            "or `jax.checkpoint` in the model."
        )
    if program.recomputed is not None:
        lines += paragraph(f"Recomputed {recomputed_sentence(program.recomputed)}.")
        for line in program.recomputed.what:
            lines += paragraph(line, "  ", "    ")
    if program.offloaded:
        lines += paragraph(f"Offloaded: {offloaded_sentence(program.offloaded)}.")
    return lines


def _repeated(repeated: data.Repeated, flops: int | float) -> str:
    scale, unit = 1.0, "FLOP"
    for prefix, factor in (("M", 1e6), ("G", 1e9), ("T", 1e12)):
        if flops >= factor:
            scale, unit = factor, f"{prefix}FLOP"
    products = ""
    if repeated.arrays:
        products = f": products with {repeated.arrays}"
    return (
        f"{repeated.flops / scale:.3g} of {flops / scale:.3g} {unit} are computed by every "
        f"device{products}, because {repeated.why}."
    )


def _traffic(traffic: Sequence[data.Traffic]) -> list[str]:
    """The causes below the mesh axes that they are over, the largest first."""
    if not traffic:
        return ["No communication between devices."]
    lines = [
        f"Estimated communication per device and step: {megabytes(data.total_bytes(traffic))} MB"
    ]
    by_axis = grouped(traffic, lambda entry: entry.axis)
    for axis, entries in sorted(by_axis.items(), key=lambda item: -data.total_bytes(item[1])):
        total = data.total_bytes(entries)
        lines += _cause(total, f"over {axis}", 0)
        # Entries are the largest first, so that those that are left out are the last ones.
        rest = list(entries)
        while rest and len(entries) - len(rest) < _SHOWN and rest[0].bytes > _LITTLE * total:
            entry = rest.pop(0)
            lines += _cause(entry.bytes, entry.cause, 4)
        # What is rounded to 0.0000 MB is not worth a line.
        if megabytes(data.total_bytes(rest)).strip("0."):
            lines += _cause(data.total_bytes(rest), f"{len(rest)} smaller", 4)
    return lines


def _cause(count: int, text: str, indent: int) -> list[str]:
    return hanging(f"{'':<{indent}}{megabytes(count):>12} MB  ", text)
