"""A plan's report drawn as text."""

import re
from collections.abc import Sequence
from typing import Any

from .rows import FSDP_TOO

WIDTH = 100
_COLUMNS = ("path", "shape", "spec", "MB/device", "reason")
_LONGEST = {"path": 36, "shape": 22, "spec": 25}
_MEGA = 1e6

Group = dict[str, Any]


def draw_table(report: dict[str, Any]) -> str:
    """The table: a line for each array or several alike, totals, and what is whole and why."""
    states = [row for row in report["rows"] if row["role"] == "optimizer state"]
    groups = _grouped([row for row in report["rows"] if row["role"] != "optimizer state"])
    odd = _grouped([row for row in states if _remarkable(row)])
    one = max(report["mesh"]["fsdp"], report["mesh"]["model"]) == 1
    shown = [group | {"reason": ""} for group in groups] if one else groups
    mesh = ", ".join(f"{axis}={size}" for axis, size in report["mesh"].items())
    lines = [f"Plan over the mesh {mesh}", "", *_body(shown), *_stored(report), ""]
    lines += _totals(report)
    whole = [group for group in [*groups, *odd] if group["parts"] == 1]
    if whole and one:
        lines += ["", "Everything is whole on every device: fsdp and model have one device each."]
    elif whole:
        lines += ["", "Whole on every device:", *_whole(whole)]
    return "\n".join(line.rstrip() for line in lines)


def _stored(report: dict[str, Any]) -> list[str]:
    """Said once for all rows, where their spec shows it."""
    if not any(FSDP_TOO[2:] in row["reason"] for row in report["rows"]):
        return []
    return ["(fsdp: each large array is stored split along its largest remaining dimension)"]


def _remarkable(row: Group) -> bool:
    return not row["reason"].startswith("follows") and row["bytes"] > 64


def _grouped(rows: Sequence[Group]) -> list[Group]:
    """Rows that differ only in a number of their path, as one."""
    groups: dict[Any, list[Group]] = {}
    for row in rows:
        shape, spec = tuple(row["shape"]), repr(row["spec"])
        key = (re.sub(r"\d+", "#", row["path"]), shape, spec, row["reason"], row["dtype"])
        groups.setdefault(key, []).append(row)
    return [_merged(group) for group in groups.values()]


def _merged(rows: list[Group]) -> Group:
    paths = [re.split(r"(\d+)", row["path"]) for row in rows]
    path = "".join(_range(parts) for parts in zip(*paths, strict=True))
    sums = {key: sum(row[key] for row in rows) for key in ("bytes", "bytes_per_device")}
    return rows[0] | {"path": path} | sums


def _range(parts: tuple[str, ...]) -> str:
    values = list(dict.fromkeys(parts))
    if len(values) == 1:
        return values[0]
    numbers = sorted(map(int, values))
    if numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"{{{numbers[0]}..{numbers[-1]}}}"
    return f"{{{','.join(map(str, numbers))}}}" if len(numbers) < 5 else f"{{{numbers[0]}..}}"


def _body(groups: list[Group]) -> list[str]:
    cells = [_COLUMNS, *(_cells(group) for group in groups)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(_COLUMNS))]
    for i, column in enumerate(_COLUMNS):
        widths[i] = min(widths[i], _LONGEST.get(column, widths[i]))
    widths[-1] = WIDTH - sum(widths[:-1]) - 2 * (len(widths) - 1)
    return [line for row in cells for line in _wrapped(row, widths)]


def _cells(group: Group) -> tuple[str, ...]:
    reason = group["reason"].removesuffix(FSDP_TOO)
    reason = reason.removeprefix("whole: ") if not group["spec"] else reason
    reason = reason.removeprefix(FSDP_TOO[2:] + "; ")
    path, shape = group["path"] or "(the array)", str(tuple(group["shape"]))
    return path, shape, _spec(group["spec"]), _megabytes(group["bytes_per_device"]), reason


def _megabytes(count: int) -> str:
    """Two digits behind the point, more where it is little."""
    return f"{count / _MEGA:,.{2 if count >= _MEGA or not count else 4}f}"


def _spec(spec: list[Any]) -> str:
    def entry(axes: Any) -> str:
        return "+".join(axes) if isinstance(axes, list) else (axes or "-")

    return "(" + ", ".join(map(entry, spec)) + ")" if spec else "whole"


def _wrapped(row: tuple[str, ...], widths: list[int]) -> list[str]:
    """One line, or more where a cell is longer than its column."""
    columns = [_pieces(cell, width) for cell, width in zip(row, widths, strict=True)]
    lines = []
    for i in range(max(map(len, columns))):
        cells = [column[i] if i < len(column) else "" for column in columns]
        padded = [
            cell.rjust(width) if j == 3 else cell.ljust(width)
            for j, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        lines.append("  ".join(padded))
    return lines


def _pieces(cell: str, width: int) -> list[str]:
    """`cell` in pieces of at most `width`, broken behind a space or a slash where there is one."""
    pieces = []
    while len(cell) > width:
        cut = max(cell.rfind(" ", 0, width + 1), cell.rfind("/", 0, width) + 1)
        cut = cut if cut > 0 else width
        pieces.append(cell[:cut].rstrip())
        cell = cell[cut:].lstrip()
    return [*pieces, cell]


def _totals(report: dict[str, Any]) -> list[str]:
    totals = report["totals"]
    parameters, states = totals["parameter"], totals["optimizer state"]
    lines = [_total("parameters", parameters)]
    if states["arrays"]:
        times = states["bytes"] / max(1, parameters["bytes"])
        lines.append(_total("optimizer state", states))
        lines.append(f"{'':<17}(follows its parameters: {times:.1f} x)")
    if totals["other"]["bytes"] > _MEGA:
        lines.append(_total("other", totals["other"]))
    return [*lines, _total("all", totals["all"])] if len(lines) > 1 else lines


def _total(name: str, total: dict[str, int]) -> str:
    whole, device = _megabytes(total["bytes"]), _megabytes(total["bytes_per_device"])
    times = total["bytes"] / max(1, total["bytes_per_device"])
    less = f", {times:.1f} x less than whole" if times > 1 else ""
    return f"{name:<15}  {device:>12} MB per device of {whole} MB{less}"


def _whole(groups: list[Group]) -> list[str]:
    """The arrays that are whole, by reason, those with the most bytes first."""
    reasons: dict[str, list[Group]] = {}
    for group in groups:
        reasons.setdefault(group["reason"].removeprefix("whole: "), []).append(group)
    ordered = sorted(reasons.items(), key=lambda item: -sum(g["bytes"] for g in item[1]))
    return [line for reason, found in ordered for line in _reason_lines(reason, found)]


def _reason_lines(reason: str, groups: list[Group]) -> list[str]:
    names = [group["path"] or "the array" for group in groups]
    megabytes = _megabytes(sum(group["bytes"] for group in groups))
    shown = ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
    pieces = _pieces(f"{megabytes} MB  {reason}: {shown}", WIDTH - 6)
    return ["  " + pieces[0], *("      " + piece for piece in pieces[1:])]
