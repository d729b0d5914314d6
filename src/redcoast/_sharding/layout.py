"""From a decision to the spec of every array, and the reason in words."""

from collections.abc import Collection, Mapping, Sequence
from math import prod
from typing import Any

from jax.sharding import PartitionSpec as P

from .choice.dataflow import Decision, Program, parts
from .nodes import Leaf, is_inexact
from .optimizer_state import trim
from .program.graph import Value
from .report.reasons import Reasons, find_reasons
from .rows import FSDP_TOO, OVERRIDE, Row

_STORED = "stored split, gathered where used"
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
    spared: Collection[int] = (),
) -> list[Row]:
    """A row for each array of a model; `given` are the specs of those that a user decided.

    `spared` are the places of arrays that are not stored split over `model`.
    """
    why = find_reasons(leaves, decision, axes)
    rows = []
    for place, leaf in enumerate(leaves):
        role = "parameter" if is_inexact(leaf) else "other"
        if leaf.index in given:
            rows.append(Row(leaf, given[leaf.index], OVERRIDE, role))
            continue
        spec, reason = _spec(place, decision, covered[place], place in spared, axes, why)
        rows.append(Row(leaf, spec, reason, role))
    return rows


def _spec(
    place: int,
    decision: Decision,
    covered: bool,
    spared: bool,
    axes: Mapping[str, int],
    why: Reasons,
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
    if computed is not None:
        entries[computed] = _entry(model)
    elif covered and model and not spared:
        _store(decision, value, entries, model, axes)
    also = covered and fsdp and _store(decision, value, entries, fsdp, axes)
    spec = trim(tuple(entries))
    if computed is not None:
        return spec, why.computed(place, computed) + (FSDP_TOO if also else "")
    if spec:
        reason = why.not_computed(place)
        return spec, f"{_STORED}: {reason}" if reason else _STORED
    if spared:
        return spec, f"whole: {why.not_computed(place)}, and the devices have room for it"
    return spec, f"whole: {_whole(place, decision, covered, axes, why)}"


def _whole(
    place: int, decision: Decision, covered: bool, axes: Mapping[str, int], why: Reasons
) -> str:
    n = parts(("fsdp", "model"), axes)
    if n == 1:
        return "one device on fsdp and model"
    if not is_large(decision.program, decision.program.parameters[place]):
        least = parts(decision.way.model, axes)
        return why.indivisible(place, least) or f"small, fewer than {LARGE:,} elements"
    if not covered:
        return "the budget leaves room for it"
    return why.indivisible(place, least=2) or why.not_stored(place)


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


def _storage(decision: Decision, value: Value, entries: Sequence[Any], n: int) -> int | None:
    """The largest dimension that divides, and that is neither a layer count nor a window."""
    blocked = decision.classes.of(decision.program.graph.blocked)
    free = [
        d
        for d, (node, size) in enumerate(zip(value.dims, value.shape, strict=True))
        if entries[d] is None and size % n == 0 and size and decision.classes[node] not in blocked
    ]
    return max(free, key=lambda d: (value.shape[d], -d)) if free else None
