"""Many paths as few patterns, in the notation of shells: `layers/{0..11}/{wk,wq}`."""

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
