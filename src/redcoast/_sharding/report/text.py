"""Lines of limited width."""

from collections.abc import Sequence

WIDTH = 80
_MEGA = 1e6


def pieces(text: str, width: int, rest: str = "") -> list[str]:
    """`text` in pieces of at most `width`, those behind the first with `rest` in front.

    It is broken behind a space or a slash, or else a comma, where there is one.
    """
    found = []
    while len(text) > width:
        cut = max(text.rfind(" ", 0, width + 1), text.rfind("/", 0, width) + 1)
        if cut <= width // 3:
            cut = max(cut, text.rfind(",", 0, width) + 1)
        cut = cut if cut > len(rest) else width
        found.append(text[:cut].rstrip())
        text = rest + text[cut:].lstrip()
    return [*found, text]


def paragraph(text: str, first: str = "", rest: str = "") -> list[str]:
    """A text in lines of the page's width, the first and the others indented so."""
    lines = pieces(text, WIDTH - max(len(first), len(rest)))
    return [first + lines[0], *(rest + line for line in lines[1:])]


def megabytes(count: int | float) -> str:
    """Two digits behind the point, more where it is little."""
    return f"{count / _MEGA:,.{2 if count >= _MEGA or not count else 4}f}"


def columns(cells: Sequence[str], widths: Sequence[int], right: int) -> list[str]:
    """One line, or more where a cell is longer than its column; `right` is flush right."""
    split = [
        pieces(cell, width, "    " if place == 0 else "")
        for place, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ]
    lines = []
    for i in range(max(map(len, split))):
        parts = [column[i] if i < len(column) else "" for column in split]
        padded = [
            part.rjust(width) if j == right else part.ljust(width)
            for j, (part, width) in enumerate(zip(parts, widths, strict=True))
        ]
        lines.append("  ".join(padded).rstrip())
    return lines
