"""A plan's report drawn as text."""

from collections.abc import Sequence
from typing import Any

from ..rows import FSDP_TOO
from .braces import braced
from .summary import summary
from .text import WIDTH, columns, megabytes, paragraph

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
