"""A plan in a notebook: its summary, and a table with a picture of each array by devices."""

import html
import math
from collections.abc import Mapping, Sequence
from math import prod

from ..tree._overrides import spec_axes
from ._data import PlannedArray, PlanReport
from ._summary import draw_summary
from ._table import groups_of
from ._text import megabytes

_SHOWN = 40  # lines of the table
_MOST_TILES = 16  # parts that are drawn along a dimension
_LONGEST, _SHORTEST = 72, 10  # the sides of a picture, in pixels


def draw_html(report: PlanReport) -> str:
    """The summary of a plan, and a table of its arrays; names are escaped.

    Each colour is another part of an array; a grey array is replicated.
    """
    rows = []
    groups = groups_of(report)
    for group in groups[:_SHOWN]:
        array = group.first
        cells = (
            draw_array(array, report.mesh),
            html.escape(group.paths or "(the array)"),
            html.escape(str(array.shape)),
            html.escape(_spec(array)),
            megabytes(group.bytes_per_device),
            html.escape(array.reason.text),
        )
        rows.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    if (left := len(groups) - _SHOWN) > 0:
        rows.append(f'<tr><td colspan="6">{left:,} more lines: plan.table()</td></tr>')
    heads = ("parts", "array", "shape", "spec", "MB/device", "reason")
    head = "".join(f"<th>{name}</th>" for name in heads)
    return (
        f"<pre>{html.escape(draw_summary(report))}</pre>"
        f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    )


def _spec(array: PlannedArray) -> str:
    entries = ["+".join(spec_axes(entry)) or "-" for entry in array.spec]
    return f"({', '.join(entries)})" if entries else "replicated"


def draw_array(array: PlannedArray, mesh: Mapping[str, int]) -> str:
    """An SVG picture of the last two dimensions of an array, or of those that are divided."""
    parts = [prod(mesh[axis] for axis in spec_axes(entry)) for entry in array.spec]
    parts += [1] * (len(array.shape) - len(parts))
    rows, columns = _drawn_dims(parts)
    size = lambda dim: 1 if dim is None else array.shape[dim]
    tiles = lambda dim: 1 if dim is None else min(parts[dim], _MOST_TILES)
    height, width = _sides(size(rows), size(columns))
    count = tiles(rows) * tiles(columns)
    boxes = []
    for place in range(count):
        row, column = divmod(place, tiles(columns))
        x, y = column * width / tiles(columns), row * height / tiles(rows)
        w, h = width / tiles(columns), height / tiles(rows)
        boxes.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{w:.1f}" height="{h:.1f}" '
            f'fill="{_colour(place, count)}" stroke="white" stroke-width="0.5"/>'
        )
    title = f"<title>{array.parts:,} parts</title>"
    return f'<svg width="{width}" height="{height}">{title}{"".join(boxes)}</svg>'


def _drawn_dims(parts: Sequence[int]) -> tuple[int | None, int | None]:
    """The two dimensions of a picture, in their order: the divided ones first, then the last."""
    if len(parts) < 2:
        return None, (0 if parts else None)
    chosen = sorted(range(len(parts)), key=lambda dim: (parts[dim] > 1, dim))[-2:]
    first, second = sorted(chosen)
    return first, second


def _sides(rows: int, columns: int) -> tuple[int, int]:
    """The height and the width of a picture; the sides have the ratio of the logarithms."""
    lengths = [math.log2(max(2, size)) for size in (rows, columns)]
    scale = _LONGEST / max(*lengths, 12)
    height, width = (max(_SHORTEST, round(length * scale)) for length in lengths)
    return height, width


def _colour(place: int, count: int) -> str:
    return "#bbb" if count == 1 else f"hsl({360 * place // count}, 65%, 62%)"
