"""Lines of limited width."""

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise

Pattern = tuple[tuple[str, ...], ...]  # for each part of a path the texts that it may have


def braced(paths: Sequence[str]) -> list[tuple[str, list[int]]]:
    """Patterns that stand for exactly these paths, each with the places of its paths.

    Patterns are in the order of the first path that they stand for.
    """
    found: dict[Pattern, list[int]] = {}
    for place, path in enumerate(paths):
        pattern = tuple((part,) for part in re.split(r"(\d+|/)", path))
        found.setdefault(pattern, []).append(place)
    before = 0
    while len(found) != before:
        before = len(found)
        for kind, part in _parts(found):
            found = _joined(found, kind, part)
    ordered = sorted(found.items(), key=lambda item: min(item[1]))
    return [("".join(map(_drawn, pattern)), places) for pattern, places in ordered]


def shortened(paths: Sequence[str], limit: int = 3, width: int = 60) -> str:
    """The first patterns of some paths, and how many paths there are more."""
    patterns = braced(paths)
    shown = [name for name, _ in patterns[:limit]]
    while len(shown) > 1 and len(", ".join(shown)) > width:
        shown.pop()
    more = sum(len(places) for _, places in patterns[len(shown) :])
    return ", ".join(shown) + (f" and {more} more" if more else "")


def _parts(found: dict[Pattern, list[int]]) -> Iterator[tuple[str, int]]:
    """The parts of patterns to join at: numbers first, so that layers end up together."""
    longest = max(map(len, found), default=0)
    for kind in ("number", "name"):
        yield from ((kind, part) for part in range(longest))


def _joined(found: dict[Pattern, list[int]], kind: str, part: int) -> dict[Pattern, list[int]]:
    """Patterns that differ in one part only, as one."""
    groups: dict[Pattern, list[Pattern]] = {}
    for pattern in found:
        fits = part < len(pattern) and _kind(pattern[part][0]) == kind
        key = (*pattern[:part], (kind,), *pattern[part + 1 :]) if fits else (*pattern, ("alone",))
        groups.setdefault(key, []).append(pattern)
    result: dict[Pattern, list[int]] = {}
    for patterns in groups.values():
        first = patterns[0]
        if len(patterns) > 1:
            texts = dict.fromkeys(text for pattern in patterns for text in pattern[part])
            first = (*first[:part], tuple(texts), *first[part + 1 :])
        result[first] = [place for pattern in patterns for place in found[pattern]]
    return result


def _kind(text: str) -> str:
    # A number with a zero in front would lose it in a range.
    if text.isdigit() and str(int(text)) == text:
        return "number"
    return "name" if text.strip("/") else ""


def _drawn(texts: tuple[str, ...]) -> str:
    if len(texts) == 1:
        return texts[0]
    if _kind(texts[0]) == "number":
        return _range(sorted(map(int, texts)))
    return "{" + ",".join(texts) + "}"


def _range(numbers: list[int]) -> str:
    """`{0..11}`, `{0..10..2}` for every second one, and `{0..3,7}` otherwise."""
    steps = {b - a for a, b in pairwise(numbers)}
    if len(numbers) > 2 and len(steps) == 1 and steps != {1}:
        return f"{{{numbers[0]}..{numbers[-1]}..{steps.pop()}}}"
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return "{" + ",".join(f"{r[0]}..{r[-1]}" if len(r) > 1 else f"{r[0]}" for r in runs) + "}"


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


def coupling_sentence(entry: dict[str, str]) -> str:
    where = f" ({entry['where']})" if entry["where"] else ""
    return (
        f"The examples of a batch depend on each other: {entry['operation']}{where} {entry['why']}."
    )
