"""A plan's report drawn as text."""

from collections.abc import Sequence
from typing import Any

from ..tree._rows import FSDP_TOO
from ._closed_over import closed_over_sentences
from ._text import WIDTH, braced, columns, coupling_sentence, megabytes, paragraph

# For each axis, so many causes at most, and none with less than this part of what is sent.
_SHOWN, _LITTLE = 6, 0.01

_COUPLED = "With `accumulate`, or batches of another size, it is another loss."


def summary(report: dict[str, Any]) -> list[str]:
    lines = _totals(report["totals"])
    if "memory" in report:
        lines += _memory(report)
    if report.get("closed_over"):
        lines += ["", *paragraph(closed_over_sentences(report["closed_over"]))]
    if report.get("batch"):
        lines += ["", *paragraph(report["batch"])]
    for entry in report.get("repeated", []):
        lines += ["", *paragraph(_repeated(entry, report["arithmetic"]["flops"]))]
    for entry in report.get("coupled", []):
        lines += ["", *paragraph(f"{coupling_sentence(entry)} {_COUPLED}")]
    if report.get("hindrances"):
        lines += ["", "Could not be split otherwise:"]
    for entry in report.get("hindrances", []):
        lines += paragraph(f"{entry['arrays']}: {entry['why']}", "  ", "    ")
    if "traffic" in report:
        lines += ["", *_traffic(report["traffic"])]
    if report.get("unknown"):
        lines += ["", *_unknown(report["unknown"])]
    return lines


def _totals(totals: dict[str, Any]) -> list[str]:
    parameters, states = totals["parameter"], totals["optimizer state"]
    lines = [_total("parameters", parameters)]
    if states["arrays"]:
        times = states["bytes"] / max(1, parameters["bytes"])
        # Where few parameters are trained, there is little of it.
        shown = f"{times:.1f}" if times > 0.05 else f"{times:.2g}"
        lines.append(_total("optimizer state", states))
        lines.append(f"{'':<17}(follows its parameters: {shown} x)")
    if totals["other"]["bytes"] > 1e6:
        lines.append(_total("other", totals["other"]))
    return [*lines, _total("all", totals["all"])] if len(lines) > 1 else lines


def _total(name: str, total: dict[str, int]) -> str:
    whole, device = megabytes(total["bytes"]), megabytes(total["bytes_per_device"])
    times = total["bytes"] / max(1, total["bytes_per_device"])
    less = f" ({times:.1f} x less)" if times > 1 else ""
    return f"{name:<15}  {device:>12} MB per device of {whole} MB{less}"


def _memory(report: dict[str, Any]) -> list[str]:
    memory, available = report["memory"], report["device_memory"]
    parts = ", ".join(
        f"{megabytes(memory[key])} {key.replace('_', ' ')}"
        for key in ("arrays", "gradients", "optimizer_state", "activations", "closed_over")
        if memory.get(key)
    )
    total = megabytes(memory["total"])
    lines = paragraph(f"Memory of each device, estimated: {total} MB ({parts}).")
    if memory["total"] > available:
        lines += paragraph(
            f"That is more than the {megabytes(available)} MB that it has "
            "(`Hardware.memory`): use more devices, a larger `fsdp` or `model`, a smaller batch, "
            "or `jax.checkpoint` in the model."
        )
    return ["", *lines]


def _repeated(entry: dict[str, Any], flops: int | float) -> str:
    scale, unit = next(
        (scale, unit)
        for scale, unit in ((1e12, "TFLOP"), (1e9, "GFLOP"), (1e6, "MFLOP"), (1, "FLOP"))
        if flops >= scale or scale == 1
    )
    of = f": products with {entry['arrays']}" if entry["arrays"] else ""
    return (
        f"{entry['flops'] / scale:.3g} of {flops / scale:.3g} {unit} are computed by every device"
        f"{of}, because {entry['why']}."
    )


def _traffic(traffic: list[dict[str, Any]]) -> list[str]:
    """The causes below the axis that they are sent over, the largest first."""
    if not traffic:
        return ["Nothing is sent between devices."]
    axes: dict[str, list[dict[str, Any]]] = {}
    for entry in traffic:
        axes.setdefault(entry["axis"], []).append(entry)
    size = lambda entries: sum(entry["bytes"] for entry in entries)
    lines = [f"Sent by each device in a step, as priced: {megabytes(size(traffic))} MB"]
    for axis, entries in sorted(axes.items(), key=lambda item: -size(item[1])):
        lines += _cause(size(entries), f"over {axis}", 0)
        shown = [entry for entry in entries if entry["bytes"] > _LITTLE * size(entries)][:_SHOWN]
        rest = entries[len(shown) :]
        for entry in shown:
            lines += _cause(entry["bytes"], entry["cause"], 4)
        if megabytes(size(rest)).strip("0."):
            lines += _cause(size(rest), f"{len(rest)} smaller", 4)
    return lines


def _cause(count: int, text: str, indent: int) -> list[str]:
    first = f"{'':<{indent}}{megabytes(count):>12} MB  "
    return paragraph(text, first, " " * len(first))


def _unknown(unknown: dict[str, int]) -> list[str]:
    names = ", ".join(f"{count} x {name}" for name, count in unknown.items())
    text = (
        f"Not understood: {names}. What goes into them is taken to be whole on every device, so "
        "that it is gathered before, and may be split again behind."
    )
    return paragraph(text)


_COLUMNS = ("path", "shape", "spec", "MB/device")
_LONGEST = {1: 22, 2: 22}

Group = dict[str, Any]


def draw_table(report: dict[str, Any]) -> str:
    """Every array under the reason for its spec, several alike in one line, and sums below."""
    mesh = ", ".join(f"{axis}={size}" for axis, size in report["mesh"].items())
    rows = [row for row in report["rows"] if row["role"] != "optimizer state" or _remarkable(row)]
    one = max(report["mesh"]["fsdp"], report["mesh"]["model"]) == 1
    groups = _grouped([row | {"reason": ""} for row in rows] if one else rows)
    lines = [f"Plan over the mesh {mesh}", "", *_body(groups), ""]
    if one:
        whole = "Everything is whole on every device: fsdp and model have one device each."
        lines += [*paragraph(whole), ""]
    elif _stored_over_fsdp(report):
        lines += [*paragraph(_STORED), ""]
    return "\n".join([*lines, *summary(report)])


_STORED = (
    "Over fsdp, each large array is also stored split, along its largest remaining dimension, and "
    "gathered where it is used."
)


def _stored_over_fsdp(report: Group) -> bool:
    return any(row["reason"].endswith(FSDP_TOO) for row in report["rows"])


def _remarkable(row: Group) -> bool:
    return not row["reason"].startswith("follows") and row["bytes"] > 64


def _grouped(rows: Sequence[Group]) -> list[Group]:
    """Rows that differ only in parts of their paths, as one."""
    alike: dict[Any, list[Group]] = {}
    for row in rows:
        key = (tuple(row["shape"]), repr(row["spec"]), row["dtype"], row["reason"])
        alike.setdefault(key, []).append(row)
    order = {row["path"]: place for place, row in reversed(list(enumerate(rows)))}
    found = []
    for group in alike.values():
        for pattern, places in braced([row["path"] for row in group]):
            one = [group[place] for place in places]
            size = sum(row["bytes_per_device"] for row in one)
            merged = {"path": pattern, "bytes_per_device": size, "heading": _heading(one[0])}
            found.append((order[one[0]["path"]], one[0] | merged))
    return [group for _, group in sorted(found, key=lambda item: item[0])]


def _heading(row: Group) -> str:
    """The reason for a spec, as it stands above the arrays that it holds for."""
    reason = row["reason"].removesuffix(FSDP_TOO)
    if reason == FSDP_TOO[2:]:
        return "Stored split, gathered where used"
    reason = reason.removeprefix(FSDP_TOO[2:] + "; ")
    if reason.startswith("computed split"):
        reason = reason.partition(": ")[0]  # the arrays are those below
    if reason and row["parts"] == 1:
        reason = f"whole on every device: {reason.removeprefix('whole: ')}"
    return reason[:1].upper() + reason[1:]


def _body(groups: list[Group]) -> list[str]:
    cells = [_COLUMNS, *(_cells(group) for group in groups)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(_COLUMNS))]
    widths = [min(width, _LONGEST.get(i, width)) for i, width in enumerate(widths)]
    widths[0] = min(widths[0], WIDTH - sum(widths[1:]) - 2 * (len(widths) - 1))
    lines = columns(_COLUMNS, widths, 3)
    for heading, members in _sections(groups):
        lines += paragraph(heading, rest="    ") if heading else []
        lines += [line for group in members for line in columns(_cells(group), widths, 3)]
    return lines


def _sections(groups: list[Group]) -> list[tuple[str, list[Group]]]:
    """Arrays by reason: first those computed split, then those stored split, then whole ones."""
    found: dict[str, list[Group]] = {}
    for group in groups:
        # Of arrays that are computed split, the reason names those that are so together.
        by = "reason" if group["heading"].startswith("Computed") else "heading"
        found.setdefault(group[by].removesuffix(FSDP_TOO), []).append(group)
    sections = [(members[0]["heading"], members) for members in found.values()]
    return sorted(sections, key=lambda section: _rank(section[0]))


def _rank(heading: str) -> int:
    starts = ("Whole on every device", "Stored split")
    return 2 - next((i for i, start in enumerate(starts) if heading.startswith(start)), 2)


def _cells(group: Group) -> tuple[str, ...]:
    path = ("  " if group["heading"] else "") + (group["path"] or "(the array)")
    shape = str(tuple(group["shape"]))
    return path, shape, _spec(group["spec"]), megabytes(group["bytes_per_device"])


def _spec(spec: list[Any]) -> str:
    def entry(axes: Any) -> str:
        return "+".join(axes) if isinstance(axes, list) else (axes or "-")

    return "(" + ", ".join(map(entry, spec)) + ")" if spec else "whole"
