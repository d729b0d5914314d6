"""Lines of limited width."""

import re
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby, pairwise, zip_longest
from typing import TypeVar

from ...core._errors import in_units
from ._data import Coupling, Recomputation

Item = TypeVar("Item")
Key = TypeVar("Key")
Pattern = tuple[tuple[str, ...], ...]  # for each part of a path, its possible texts


def grouped(items: Iterable[Item], key: Callable[[Item], Key]) -> dict[Key, list[Item]]:
    """The items of each key, both in their order."""
    found: dict[Key, list[Item]] = {}
    for item in items:
        found.setdefault(key(item), []).append(item)
    return found


def braced(paths: Sequence[str]) -> list[tuple[str, list[int]]]:
    """Patterns that match exactly these paths, each with the places of its paths.

    Patterns are in the order of the first path that they match.
    """
    apart = [tuple((part,) for part in re.split(r"(\d+|/)", path)) for path in paths]
    found: dict[Pattern, list[int]] = grouped(range(len(paths)), apart.__getitem__)
    before = 0
    while len(found) != before:
        before = len(found)
        for kind in ("number", "name"):  # numbers first, so that layers are joined first
            for part in range(max(map(len, apart))):
                found = _joined(found, kind, part)
    ordered = sorted(found.items(), key=lambda item: min(item[1]))
    return [("".join(map(_pattern_text, pattern)), places) for pattern, places in ordered]


def shortened(paths: Sequence[str], limit: int = 3, width: int = 60) -> str:
    """The first patterns of some paths, and the number of the other paths."""
    patterns = braced(paths)
    shown = [name for name, _ in patterns[:limit]]
    while len(shown) > 1 and len(", ".join(shown)) > width:
        shown.pop()
    more = sum(len(places) for _, places in patterns[len(shown) :])
    return ", ".join(shown) + (f" and {more} more" if more else "")


def _joined(found: dict[Pattern, list[int]], kind: str, part: int) -> dict[Pattern, list[int]]:
    """Joins patterns that differ in one part only."""
    result: dict[Pattern, list[int]] = {}
    for patterns in grouped(found, lambda pattern: _others(pattern, kind, part)).values():
        first = patterns[0]
        if len(patterns) > 1:
            texts = dict.fromkeys(text for pattern in patterns for text in pattern[part])
            first = (*first[:part], tuple(texts), *first[part + 1 :])
        result[first] = [place for pattern in patterns for place in found[pattern]]
    return result


def _others(pattern: Pattern, kind: str, part: int) -> Pattern:
    """The parts of a pattern that must be equal to join it with others."""
    fits = part < len(pattern) and _kind(pattern[part][0]) == kind
    return (*pattern[:part], (kind,), *pattern[part + 1 :]) if fits else (*pattern, ("alone",))


def _kind(text: str) -> str:
    # A range would drop the leading zeros of a number.
    if text.isdigit() and str(int(text)) == text:
        return "number"
    return "name" if text.strip("/") else ""


def _pattern_text(texts: tuple[str, ...]) -> str:
    """`{up,down}`; of numbers `{0..11}`, `{0..10..2}` for every second one, or `{0..3,7}`."""
    if len(texts) == 1:
        return texts[0]
    if _kind(texts[0]) != "number":
        return "{" + ",".join(texts) + "}"
    numbers = sorted(map(int, texts))
    steps = {b - a for a, b in pairwise(numbers)}
    if len(numbers) > 2 and len(steps) == 1 and steps != {1}:
        return f"{{{numbers[0]}..{numbers[-1]}..{steps.pop()}}}"
    runs = groupby(enumerate(numbers), lambda item: item[1] - item[0])
    ends = [(run[0][1], run[-1][1]) for run in (list(run) for _, run in runs)]
    return "{" + ",".join(f"{a}..{b}" if a < b else f"{a}" for a, b in ends) + "}"


WIDTH = 80


def pieces(text: str, width: int, rest: str = "") -> list[str]:
    """`text` in pieces of at most `width`, all but the first preceded by `rest`.

    It is broken after a space or a slash, or else a comma, if there is one.
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
    """A text in lines of the page's width; `first` and `rest` are their indentation."""
    lines = pieces(text, WIDTH - max(len(first), len(rest)))
    return [first + lines[0], *(rest + line for line in lines[1:])]


def hanging(first: str, text: str) -> list[str]:
    """A paragraph after `first`; its other lines are indented by the length of `first`."""
    return paragraph(text, first, " " * len(first))


def megabytes(count: int | float) -> str:
    """A number of MB with two decimals; with four below one MB."""
    return in_units(count, 1e6)


def scaled(count: int | float) -> str:
    """A number of bytes with three significant digits and a unit, such as `93.5 kB`."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def percentages(sizes: Sequence[int | float]) -> list[int]:
    """The shares of some sizes in percent, rounded so that they add up to 100."""
    exact = [100 * size / sum(sizes) for size in sizes]
    found = list(map(int, exact))
    order = sorted(range(len(sizes)), key=lambda place: found[place] - exact[place])
    for place in order[: 100 - sum(found)]:
        found[place] += 1
    return found


def in_columns(cells: Sequence[str], widths: Sequence[int]) -> list[str]:
    """One line, or more if a cell is longer than its column; the last one is flush right."""
    first, *rest = zip(cells, widths, strict=True)
    split = [pieces(*first, "    "), *(pieces(cell, width) for cell, width in rest)]
    lines = []
    for parts in zip_longest(*split, fillvalue=""):
        left = map(str.ljust, parts[:-1], widths)
        lines.append("  ".join([*left, parts[-1].rjust(widths[-1])]).rstrip())
    return lines


def coupling_sentence(one: Coupling) -> str:
    where = f" ({one.where})" if one.where else ""
    return f"The examples of a batch depend on each other: {one.operation}{where} {one.why}."


def recomputed_sentence(one: Recomputation) -> str:
    """What recomputation saves and costs, in words that follow a label."""
    lines = [line.rpartition(": ")[0] for line in one.what]
    where = "in the backward pass"
    if lines:
        where = f"{', '.join(lines[:2])} {where}"
    return f"{where}: saves {scaled(one.saved)}, costs {one.share:.1%} more arithmetic"
