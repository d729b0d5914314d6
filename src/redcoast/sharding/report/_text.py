"""Lines of limited width."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import zip_longest
from operator import sub
from typing import TypeVar

from jax.sharding import PartitionSpec

from ...core._errors import in_units
from ..tree._overrides import spec_axes
from ._data import Coupling, Recomputation

Item = TypeVar("Item")
Key = TypeVar("Key")
Pattern = tuple[tuple[str, ...], ...]  # for each part of a path, its possible texts


def grouped(items: Iterable[Item], key: Callable[[Item], Key]) -> dict[Key, list[Item]]:
    """The items of each key, both in their order."""
    groups: dict[Key, list[Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def braced(paths: Sequence[str]) -> list[tuple[str, list[int]]]:
    """Patterns that match exactly these paths, each with the places of its paths.

    Patterns are in the order of the first path that they match.
    """
    # At first each path is its own pattern: that of `w/up` is `(("w",), ("/",), ("up",))`.
    patterns: dict[Pattern, list[int]] = {}
    for place, path in enumerate(paths):
        pattern = tuple(zip(re.split(r"(\d+|/)", path), strict=True))
        patterns.setdefault(pattern, []).append(place)
    longest = max(map(len, patterns), default=0)
    before = 0
    # Joining numbers may make names alike, and the other way round.
    while len(patterns) != before:
        before = len(patterns)
        for kind in ("number", "name"):  # numbers first, so that layers are joined first
            for part in range(longest):
                patterns = _joined(patterns, kind, part)
    ordered: list[tuple[str, list[int]]] = []
    for pattern, places in sorted(patterns.items(), key=lambda item: min(item[1])):
        ordered.append(("".join(map(_pattern_text, pattern)), places))
    return ordered


def shortened(paths: Sequence[str], limit: int = 3, width: int = 60) -> str:
    """The first patterns of some paths, and the number of the other paths."""
    shown: list[str] = []
    more = len(paths)
    for name, places in braced(paths)[:limit]:
        # At least one, however long it is.
        if shown and len(", ".join([*shown, name])) > width:
            break
        shown.append(name)
        more -= len(places)
    text = ", ".join(shown)
    if more:
        text += f" and {more} more"
    return text


def _joined(patterns: dict[Pattern, list[int]], kind: str, part: int) -> dict[Pattern, list[int]]:
    """Joins patterns that differ in one part only; each has the places of its paths."""
    joined: dict[Pattern, list[int]] = {}
    for alike in grouped(patterns, lambda pattern: _others(pattern, kind, part)).values():
        first = alike[0]
        if len(alike) == 1:
            joined[first] = patterns[first]
            continue
        texts: dict[str, None] = {}  # in the order of the patterns
        places: list[int] = []
        for pattern in alike:
            texts |= dict.fromkeys(pattern[part])
            places += patterns[pattern]
        joined[(*first[:part], tuple(texts), *first[part + 1 :])] = places
    return joined


def _others(pattern: Pattern, kind: str, part: int) -> Pattern:
    """The parts of a pattern that must be equal to join it with others."""
    if part < len(pattern) and _kind(pattern[part][0]) == kind:
        return (*pattern[:part], (kind,), *pattern[part + 1 :])
    # No other pattern has these parts.
    return (*pattern, ("alone",))


def _kind(text: str) -> str:
    # A range would drop the leading zeros of a number.
    if text.isdecimal() and str(int(text)) == text:
        return "number"
    if text.strip("/"):
        return "name"
    return ""


def _pattern_text(texts: tuple[str, ...]) -> str:
    """`{up,down}`; of numbers `{0..11}`, `{0..10..2}` for every second one, or `{0..3,7}`."""
    if len(texts) == 1:
        return texts[0]
    if _kind(texts[0]) != "number":
        return "{" + ",".join(texts) + "}"
    numbers = sorted(map(int, texts))
    steps = set(map(sub, numbers[1:], numbers))
    if len(numbers) > 2 and len(steps) == 1 and steps != {1}:
        return f"{{{numbers[0]}..{numbers[-1]}..{steps.pop()}}}"
    # In a run of successive numbers, all have the same difference from their places.
    places = range(len(numbers))
    ranges: list[str] = []
    for run in grouped(places, lambda place: numbers[place] - place).values():
        first, last = numbers[run[0]], numbers[run[-1]]
        ranges.append(f"{first}..{last}")
        if first == last:
            ranges[-1] = f"{first}"
    return "{" + ",".join(ranges) + "}"


WIDTH = 80


def pieces(text: str, width: int, rest: str = "") -> list[str]:
    """`text` in pieces of at most `width`, all but the first preceded by `rest`.

    It is broken after a space or a slash, or else a comma, if there is one.
    """
    lines = []
    while len(text) > width:
        cut = max(text.rfind(" ", 0, width + 1), text.rfind("/", 0, width) + 1)
        if cut <= width // 3:
            cut = max(cut, text.rfind(",", 0, width) + 1)
        if cut <= len(rest):
            cut = width  # a cut inside `rest` would not shorten the text
        lines.append(text[:cut].rstrip())
        text = rest + text[cut:].lstrip()
    return [*lines, text]


def paragraph(text: str, first: str = "", rest: str = "") -> list[str]:
    """A text in lines of the page's width; `first` and `rest` are their indentation."""
    lines = pieces(text, WIDTH - max(len(first), len(rest)))
    return [first + lines[0], *map(rest.__add__, lines[1:])]


def hanging(first: str, text: str) -> list[str]:
    """A paragraph after `first`; its other lines are indented by the length of `first`."""
    return paragraph(text, first, " " * len(first))


def megabytes(count: int | float) -> str:
    """A number of MB with two decimals; with four below one MB."""
    return in_units(count, 1e6)


def scaled(count: int | float) -> str:
    """A number of bytes with three significant digits and a unit, such as `93.5 kB`."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 999.5:  # what is not rounded to four digits
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def percentages(sizes: Sequence[int | float]) -> list[int]:
    """The shares of some sizes in percent, rounded so that they add up to 100."""
    total = sum(sizes)
    rounded: list[int] = []
    lost: list[float] = []  # by rounding down, of each
    for size in sizes:
        exact = 100 * size / total
        rounded.append(int(exact))
        lost.append(exact - int(exact))
    # Those that lost most are rounded up.
    order = sorted(range(len(sizes)), key=lost.__getitem__, reverse=True)
    for place in order[: 100 - sum(rounded)]:
        rounded[place] += 1
    return rounded


def in_columns(cells: Sequence[str], widths: Sequence[int]) -> list[str]:
    """One line, or more if a cell is longer than its column; the last one is flush right."""
    split = [pieces(cells[0], widths[0], "    ")]
    for cell, width in zip(cells[1:], widths[1:], strict=True):
        split.append(pieces(cell, width))
    lines = []
    for texts in zip_longest(*split, fillvalue=""):
        padded = list(map(str.ljust, texts, widths))
        padded[-1] = texts[-1].rjust(widths[-1])
        lines.append("  ".join(padded).rstrip())
    return lines


def mesh_text(sizes: Mapping[str, int]) -> str:
    """`data=2, model=4`."""
    return ", ".join(f"{axis}={size}" for axis, size in sizes.items())


def spec_text(spec: PartitionSpec) -> str:
    """`(-, data+fsdp)`, in which `-` is a dimension that is not sharded."""
    entries = ["+".join(spec_axes(entry)) or "-" for entry in spec]
    if not entries:
        return "replicated"
    return f"({', '.join(entries)})"


def coupling_sentence(coupling: Coupling) -> str:
    operation = coupling.operation
    if coupling.where:
        operation = f"{operation} ({coupling.where})"
    return f"The examples of a batch depend on each other: {operation} {coupling.why}."


def offloaded_sentence(size: int) -> str:
    """What is in the memory of the host, in words that follow a label."""
    return (
        f"{scaled(size)} of optimizer state are in the memory of the host, and are copied to the "
        "device and back in each step"
    )


def recomputed_sentence(recomputed: Recomputation) -> str:
    """What recomputation saves and costs, in words that follow a label."""
    lines = [line.rpartition(": ")[0] for line in recomputed.what]
    where = "in the backward pass"
    if lines:
        where = f"{', '.join(lines[:2])} {where}"
    saved = scaled(recomputed.saved)
    return f"{where}: saves {saved}, costs {recomputed.share:.1%} more arithmetic"
