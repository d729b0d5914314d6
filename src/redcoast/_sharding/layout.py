"""From a decision to the spec of every array, and the reason in words."""

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from jax.sharding import PartitionSpec as P

from .dataflow import Decision, Program, parts
from .graph import Value
from .nodes import Leaf, is_inexact
from .optimizer_state import trim
from .rows import FSDP_TOO, Row

LARGE = 4096  # elements of one layer; splitting fewer saves less than the communication costs


def is_large(program: Program, value: Value) -> bool:
    """Whether an array is split even if it has to be gathered where it is used."""
    sizes = (
        size
        for node, size in zip(value.dims, value.shape, strict=True)
        if node not in program.graph.stacks
    )
    return prod(sizes) >= LARGE


def layout(
    leaves: Sequence[Leaf],
    decision: Decision,
    covered: Sequence[bool],
    given: Mapping[int, P],
    axes: Mapping[str, int],
) -> list[Row]:
    """A row for each array of a model; `given` are the specs of those that a user decided."""
    why = Reasons(leaves, decision, axes)
    rows = []
    for place, leaf in enumerate(leaves):
        role = "parameter" if is_inexact(leaf) else "other"
        if leaf.index in given:
            rows.append(Row(leaf, given[leaf.index], "override", role))
            continue
        spec, reason = _spec(place, decision, covered[place], axes, why)
        rows.append(Row(leaf, spec, reason, role))
    return rows


def _spec(
    place: int, decision: Decision, covered: bool, axes: Mapping[str, int], why: "Reasons"
) -> tuple[P, str]:
    value, way = decision.program.parameters[place], decision.way
    entries: list[Any] = [None] * len(value.dims)
    # Where the batch goes over all axes, an array that is split over the last two along one
    # dimension has a gradient that can be reduced to each device's part.
    together = ("fsdp", "model") if "model" in way.batch else way.model
    model, fsdp = (
        tuple(axis for axis in group if axes[axis] > 1)
        for group in (together, () if "fsdp" in together else ("fsdp",))
    )
    computed = decision.computed[place]
    reason = "" if covered or not fsdp else _small(value)
    if computed is not None:
        entries[computed] = _entry(model)
        reason = why.together(place, computed)
    elif model:
        reason = why.whole(place)
        if covered and _store(decision, value, entries, model, axes):
            reason = f"stored split, gathered where used: {reason}"
    if covered and fsdp and _store(decision, value, entries, fsdp, axes):
        reason = f"{reason}{FSDP_TOO}" if reason else FSDP_TOO.removeprefix("; ")
    spec = trim(tuple(entries))
    return spec, reason if spec else f"whole: {reason or 'one device on fsdp and model'}"


def _entry(axes: tuple[str, ...]) -> str | tuple[str, ...]:
    return axes[0] if len(axes) == 1 else axes


def _store(
    decision: Decision,
    value: Value,
    entries: list[Any],
    over: tuple[str, ...],
    axes: Mapping[str, int],
) -> bool:
    """Splits a dimension over all of the axes, or one over each, where any divides."""
    d = _storage(decision, value, entries, parts(over, axes))
    if d is not None:
        entries[d] = _entry(over)
        return True
    if len(over) == 1:
        return False
    each = [_store(decision, value, entries, (one,), axes) for one in over]
    return any(each)


def _small(value: Value) -> str:
    return f"small, {prod(value.shape):,} elements"


def _storage(decision: Decision, value: Value, entries: Sequence[Any], n: int) -> int | None:
    """The largest dimension that divides, and that is neither a layer count nor a window."""
    graph = decision.program.graph
    free = [
        d
        for d, (node, size) in enumerate(zip(value.dims, value.shape, strict=True))
        if entries[d] is None and size % n == 0 and size and node not in graph.blocked
    ]
    return max(free, key=lambda d: (value.shape[d], -d)) if free else None


class Reasons:
    """Why arrays are split over `model`, or are not."""

    def __init__(self, leaves: Sequence[Leaf], decision: Decision, axes: Mapping[str, int]):
        self._leaves, self._decision, self._axes = leaves, decision, axes
        self._members: dict[int, list[int]] = {}
        for place, (value, d) in enumerate(
            zip(decision.program.parameters, decision.computed, strict=True)
        ):
            if d is not None:
                self._members.setdefault(decision.classes[value.dims[d]], []).append(place)
        self._snags = _snags(decision)

    def together(self, place: int, d: int) -> str:
        """What is split with it: all that is computed along the same dimension."""
        one = self._decision.classes[self._decision.program.parameters[place].dims[d]]
        others = [other for other in self._members[one] if other != place]
        if not others:
            return "by itself"
        names = dict.fromkeys(
            _relative(self._leaves[o].path, self._leaves[place].path) for o in others
        )
        shown = list(names)[:6]
        more = len(names) - len(shown)
        return "with " + ", ".join(shown) + (f" and {more} more" if more else "")

    def whole(self, place: int) -> str:
        """Why it is not computed split."""
        value = self._decision.program.parameters[place]
        if "model" in self._decision.way.batch:
            return "the batch is split over model"
        snag = self._indivisible(value)
        if snag:
            return snag
        if not is_large(self._decision.program, value):
            return _small(value)
        return "computing it split would cost more"

    def _indivisible(self, value: Value) -> str:
        program, over = self._decision.program, self._decision.way.model
        n = parts(over, self._axes)
        for node, size in zip(value.dims, value.shape, strict=True):
            if node in program.graph.blocked:
                continue
            bad = size if size % n else self._snags.get(self._decision.classes[node])
            if bad is not None and bad > 1:
                above = -(-bad // n) * n
                fits = f"{above - n} or {above}" if above > n else f"{above}"
                return f"{bad} is no multiple of {' x '.join(over)} = {n}; {fits} would be"
        return ""


def _snags(decision: Decision) -> dict[int, int]:
    """For classes that divide, a size that they are linked to and that does not."""
    classes, graph = decision.classes, decision.program.graph
    found: dict[int, int] = {}
    for a, b in graph.links:
        for one, other in ((a, b), (b, a)):
            if classes.divides(one) and not classes.divides(other) and graph.sizes[other] > 1:
                root = classes[one]
                found[root] = max(found.get(root, 0), graph.sizes[other])
    return found


def _relative(path: tuple[str, ...], to: tuple[str, ...]) -> str:
    """A path as seen from the folder of another."""
    common = 0
    while common < min(len(path), len(to)) - 1 and path[common] == to[common]:
        common += 1
    return "/".join(path[common:])
