"""A plan by dataflow: trace, follow, decide, lay out."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import PyTree

from ..core._pytree import trainable_arrays
from .constrain._compute import Compute
from .program._graph import Value
from .program._trace import trace_over
from .report._closed_over import closed_over
from .report._coupling import find_coupling
from .report._reasons import (
    Reasons,
    batch_axes,
    batch_sentences,
    find_reasons,
    hindrances,
    not_rows,
)
from .report._repeated import repeated
from .report._traffic import traffic
from .solver._hardware import Hardware
from .solver._memory import ASSUMED, arithmetic, estimate, fit_budget, room
from .solver._replicate import spare
from .solver._strategy import Decision, Program, constant_dims, decide, follow_program, parts
from .tree._leaves import Leaf, flat_leaves, is_inexact
from .tree._optimizer_state import trim
from .tree._overrides import Override, apply_overrides, spec_axes
from .tree._rows import FSDP_TOO, OVERRIDE, Row

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


@dataclass(frozen=True)
class FlowPlan:
    rows: list[Row]
    compute: Compute
    report: dict[str, Any]


def plan_flow(
    model: PyTree,
    mesh: Mesh | AbstractMesh,
    fn: Callable[..., Any],
    args: Sequence[Any],
    *,
    overrides: Sequence[Override],
    trainable: PyTree,
    hardware: Hardware,
    budget: int | None,
    state_bytes: int,
    sequence: bool,
) -> FlowPlan:
    """Rows for the arrays of a model, and how `fn(model, *args)` computes with them."""
    axes = dict(mesh.shape)
    leaves = [leaf for leaf in flat_leaves(model) if leaf is not None]
    given = apply_overrides(leaves, overrides, axes)
    forced = [_model_dim(given.get(leaf.index, ())) for leaf in leaves]
    traced, _ = trace_over(mesh, fn, model, args)
    program = follow_program(traced, trainable_arrays(model, trainable))

    memory = ASSUMED if hardware.memory is None else hardware.memory

    def make(covered: Sequence[bool]) -> tuple[list[Row], Decision]:
        left = room(program, axes, covered, memory, state_bytes)
        decision = decide(program, axes, covered, hardware, forced, left)
        return layout(leaves, decision, covered, given, axes), decision

    large = [is_large(program, value) for value in program.parameters]
    if budget is not None:
        rows, decision = fit_budget(make, large, program, axes, budget, state_bytes)
    else:
        rows, decision = make(large)
        if hardware.memory is not None:
            decision, spared = spare(rows, decision, axes, memory, state_bytes)
            rows = layout(leaves, decision, large, given, axes, spared)
    compute = Compute(
        decision.computed,
        decision.way.batch,
        decision.way.model,
        sequence,
        tuple((one.name, d) for one, _, d in constant_dims(decision)),
    )
    others = not_rows(args[:1], decision)
    reasons = find_reasons(leaves, decision, axes)
    report = {
        "batch_axes": batch_axes(decision, axes),
        "model_axes": [axis for axis in decision.way.model if axes[axis] > 1],
        "batch": batch_sentences(decision, axes, others),
        "not_rows": others,
        "hindrances": hindrances(reasons, leaves),
        "traffic": traffic(rows, decision, axes, hardware),
        "closed_over": closed_over(decision, axes),
        "coupled": find_coupling(program),
        "unknown": dict(sorted(program.graph.unknown.items())),
        "arithmetic": arithmetic(decision, axes),
        "repeated": repeated(leaves, decision, axes, reasons),
        "memory": estimate(rows, decision, axes, state_bytes),
        "device_memory": memory,
    }
    return FlowPlan(rows, compute, report)


def _model_dim(spec: Any) -> int | None:
    found = [d for d, entry in enumerate(spec) if "model" in spec_axes(entry)]
    return found[0] if found else None
