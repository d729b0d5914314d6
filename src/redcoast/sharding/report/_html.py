"""A plan in a notebook: its summary, and a table with a picture of each array by devices."""

import html
import math
from collections.abc import Mapping

from ..tree._overrides import spec_parts
from ._data import PlannedArray, PlanReport
from ._summary import draw_summary
from ._table import groups_of
from ._text import megabytes, spec_text

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
            html.escape(spec_text(array.spec)),
            megabytes(group.bytes_per_device),
            html.escape(array.reason.text),
        )
        rows.append(f"<tr><td>{'</td><td>'.join(cells)}</td></tr>")
    more = len(groups) - _SHOWN
    if more > 0:
        rows.append(f'<tr><td colspan="6">{more:,} more lines: plan.table()</td></tr>')
    heads = ("parts", "array", "shape", "spec", "MB/device", "reason")
    head = f"<th>{'</th><th>'.join(heads)}</th>"
    return (
        f"<pre>{html.escape(draw_summary(report))}</pre>"
        f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    )


def draw_array(array: PlannedArray, mesh: Mapping[str, int]) -> str:
    """An SVG picture of the last two dimensions of an array, or of those that are divided."""
    parts = [spec_parts([entry], mesh) for entry in array.spec]
    parts += [1] * (len(array.shape) - len(parts))
    # What is missing of two dimensions is drawn as one of size 1.
    sizes, tiles = [1, 1], [1, 1]
    # At most two dimensions: the last of the divided ones, or else the last.
    divided_last = sorted(range(len(parts)), key=lambda dim: (parts[dim] > 1, dim))
    for dim in sorted(divided_last[-2:]):
        sizes.append(array.shape[dim])
        tiles.append(min(parts[dim], _MOST_TILES))
    rows, columns = tiles[-2:]
    height, width = _sides(*sizes[-2:])
    w, h = width / columns, height / rows
    count = rows * columns
    boxes = []
    for place in range(count):
        row, column = divmod(place, columns)
        # Multiplied first, so that the last tile ends where the picture does.
        x, y = column * width / columns, row * height / rows
        colour = "#bbb"
        if count > 1:
            colour = f"hsl({360 * place // count}, 65%, 62%)"
        boxes.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{w:.1f}" height="{h:.1f}" '
            f'fill="{colour}" stroke="white" stroke-width="0.5"/>'
        )
    title = f"<title>{array.parts:,} parts</title>"
    return f'<svg width="{width}" height="{height}">{title}{"".join(boxes)}</svg>'


def _sides(rows: int, columns: int) -> tuple[int, int]:
    """The height and the width of a picture; the sides have the ratio of the logarithms."""
    height, width = math.log2(max(2, rows)), math.log2(max(2, columns))
    # The longest side of an array of up to 4,096 elements is shorter than that of larger ones.
    scale = _LONGEST / max(height, width, 12)
    return max(_SHORTEST, round(height * scale)), max(_SHORTEST, round(width * scale))
