"""A web page that shows the user's code with the bytes of each line beside it."""

import html
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from linecache import getlines
from operator import attrgetter

from ._data import LineCost
from ._text import megabytes

_AROUND = 6  # lines of code before and after a line with a cost
_FIRST = 10  # lines in the list at the top
_STYLE = """
body { font: 14px/1.45 system-ui, sans-serif; margin: 2rem; color-scheme: light dark; }
table { border-collapse: collapse; font: 13px/1.5 ui-monospace, monospace; }
td { padding: 0 0.6rem; vertical-align: top; white-space: pre-wrap; }
td.size, td.number { text-align: right; opacity: 0.75; white-space: nowrap; }
td.causes { opacity: 0.75; }
tr:target { outline: 2px solid #e64a19; }
"""


def draw_source_page(lines: Sequence[LineCost], title: str, summary: str) -> str:
    """A page with a summary, the costliest lines, and the code of each file; all is escaped.

    The costliest file comes first. A row is the redder, the more bytes its line needs.
    """
    most = max(map(_cost, lines), default=0)  # what is red
    by_file: dict[str, dict[int, LineCost]] = defaultdict(dict)
    for line in sorted(lines, key=_cost, reverse=True):
        by_file[line.file][line.number] = line
    with_file = filter(attrgetter("file"), lines)
    first = "".join(map(_link, islice(with_file, _FIRST)))
    files = ""
    for file, costs in by_file.items():
        files += _file(file, costs, most)
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style></head><body>"
        f"<h1>{html.escape(title)}</h1><pre>{html.escape(summary)}</pre>"
        f"<p>MB of memory when most is in use, and MB communicated in a step, on each device.</p>"
        f"<ol>{first}</ol>{files}</body></html>"
    )


def _cost(line: LineCost) -> int:
    return line.memory_bytes + line.sent_bytes


def _anchor(line: LineCost) -> str:
    return html.escape(f"{os.path.basename(line.file)}:{line.number}")


def _link(line: LineCost) -> str:
    """An entry of the list at the top, which leads to the line's row."""
    sizes = f"{megabytes(line.memory_bytes)} MB of memory, {megabytes(line.sent_bytes)} MB sent"
    return f'<li><a href="#{_anchor(line)}">{_anchor(line)}: {sizes}</a></li>'


def _file(file: str, costs: Mapping[int, LineCost], most: int) -> str:
    """The code of a file around the lines with a cost."""
    if not file:
        row = _row(0, "no line of your code", costs[0], most)
        return f"<h2>Elsewhere</h2><table>{row}</table>"
    code = getlines(file)
    rows: list[str] = []
    before = 0
    for number in _shown(costs, len(code)):
        if number > before + 1:
            rows.append('<tr><td class="number">...</td></tr>')
        text = ""
        if number <= len(code):
            text = code[number - 1].rstrip("\n")
        rows.append(_row(number, text, costs.get(number), most))
        before = number
    return f"<h2>{html.escape(file)}</h2><table>{''.join(rows)}</table>"


def _shown(costs: Mapping[int, LineCost], length: int) -> Iterator[int]:
    """The numbers of the lines that are shown; of a file that cannot be read, those with a cost."""
    for number in range(1, max(length, *costs) + 1):
        near = range(number - _AROUND, number + _AROUND + 1)
        if number in costs or (number <= length and not costs.keys().isdisjoint(near)):
            yield number


def _row(number: int, code: str, line: LineCost | None, most: int) -> str:
    cells = f'<td class="number">{number}</td>'
    if line is None:
        return f"<tr>{cells}<td></td><td></td><td>{html.escape(code)}</td></tr>"
    share = _cost(line) / max(1, most)  # 1 for the costliest line
    for size in (line.memory_bytes, line.sent_bytes):
        cells += f'<td class="size">{megabytes(size)}</td>'
    cells += f"<td>{html.escape(code)}</td>"
    cells += f'<td class="causes">{html.escape("; ".join(line.causes))}</td>'
    colour = f"rgba(230, 74, 25, {0.1 + 0.5 * share:.2f})"
    return f'<tr id="{_anchor(line)}" style="background: {colour}">{cells}</tr>'
