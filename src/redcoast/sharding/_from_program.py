"""Plans the sharding of a tree from a function that uses it."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any

from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import PyTree

from ..core._pytree import trainable_arrays
from ..core._sequence_parts import divided_into
from ..distributed._mesh import PIPE
from .constrain._compute import Compute
from .constrain._pipeline import pipeline_of
from .pipeline._stages import NoPipeline, stage_program
from .program._graph import Value
from .program._trace import trace_over
from .report._coupling import find_coupling
from .report._data import ProgramReport
from .report._reasons import (
    Reasons,
    batch_axes,
    batch_sentences,
    batch_sizes,
    closed_over,
    find_reasons,
    hindrances,
    not_rows,
)
from .report._repeated import repeated
from .report._traffic import pipelining, traffic
from .solver._hardware import Hardware
from .solver._memory import (
    DEFAULT_MEMORY,
    activation_memory,
    arithmetic,
    estimate_memory,
    fit_budget,
)
from .solver._replicate import replicate
from .solver._strategy import (
    DEFAULT,
    Decision,
    Program,
    best_strategy,
    constant_dims,
    follow_program,
    parts,
    saved_bytes,
    used_axes,
)
from .solver._tokens import needs_tokens, no_tokens, split_tokens
from .tree._leaves import LARGE, Leaf, flat_leaves, is_inexact_leaf
from .tree._optimizer_state import trim_spec
from .tree._overrides import Override, apply_overrides, spec_axes
from .tree._plan_rows import Role, Row
from .tree._reason import ON_STAGES, OVERRIDE, STORED, Reason


def is_large(program: Program, value: Value) -> bool:
    """Whether an array is sharded even if it has to be all-gathered where it is used."""
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

    `spared` are the places of arrays that are not FSDP-sharded over `model`.
    """
    staged = decision.program.staged
    layered = frozenset() if staged is None else staged.layered
    why = find_reasons(leaves, decision, axes)
    rows = []
    for place, leaf in enumerate(leaves):
        role: Role = "parameter" if is_inexact_leaf(leaf) else "other"
        if leaf.index in given:
            spec, reason = given[leaf.index], OVERRIDE
        else:
            spec = _spec(place, decision, covered[place], place in spared, axes)
            reason = _reason(place, spec, covered[place], place in spared, why)
            if place in layered:
                reason = reason if any(spec) else ON_STAGES
                spec = P(PIPE, *spec[1:])
        rows.append(Row(leaf, spec, reason, role))
    return rows


def _spec(
    place: int, decision: Decision, covered: bool, spared: bool, axes: Mapping[str, int]
) -> P:
    value, strategy = decision.program.parameters[place], decision.strategy
    entries: list[Any] = [None] * len(value.dims)
    # If the batch is split over all axes, an array that is sharded over the last two along one
    # dimension has a gradient that can be reduce-scattered.
    together = ("fsdp", "model") if "model" in strategy.batch else strategy.model
    model = used_axes(together, axes)
    fsdp = () if "fsdp" in together else used_axes(("fsdp",), axes)
    computed = decision.computed[place]
    if computed is not None:
        entries[computed] = _entry(model)
    elif covered and model and not spared:
        _store(decision, value, entries, model, axes)
    if covered and fsdp:
        _store(decision, value, entries, fsdp, axes)
    return trim_spec(tuple(entries))


def _reason(place: int, spec: P, covered: bool, spared: bool, why: Reasons) -> Reason:
    computed = why.decision.computed[place]
    if computed is not None:
        return why.computed(place, computed)
    if spec:
        return Reason("fsdp", why.not_computed(place) or STORED)
    if spared:
        return Reason("replicated", f"{why.not_computed(place)}, and the devices have room for it")
    return Reason("replicated", _not_sharded(place, covered, why))


def _not_sharded(place: int, covered: bool, why: Reasons) -> str:
    program = why.decision.program
    if parts(("fsdp", "model"), why.axes) == 1:
        return "fsdp and model have one device each"
    if not is_large(program, program.parameters[place]):
        return why.indivisible(place, why.n) or f"small, fewer than {LARGE:,} elements"
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
    """Shards a dimension over all of the axes, or one over each, where any divides."""
    d = _storage(decision, value, entries, parts(over, axes))
    if d is not None:
        entries[d] = _entry(over)
        return True
    if len(over) == 1:
        return False
    each = [_store(decision, value, entries, (one,), axes) for one in over]
    return any(each)


def _storage(decision: Decision, value: Value, entries: Sequence[Any], n: int) -> int | None:
    """The largest dimension that divides and is neither a layer count nor a window."""
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
    report: ProgramReport


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
    microbatches: int | None = None,
) -> FlowPlan:
    """Plans the sharding of a model and of the computation in `fn(model, *args)`."""
    axes = dict(mesh.shape)
    leaves = [leaf for leaf in flat_leaves(model) if leaf is not None]
    given = apply_overrides(leaves, overrides, axes)
    traced, _ = trace_over(mesh, fn, model, args)
    program = follow_program(traced, trainable_arrays(model, trainable))
    stage = partial(_staged, mesh=mesh, given=(fn, model, args), microbatches=microbatches)
    piped = axes.get(PIPE, 1) > 1 and traced.trains
    if piped:
        program = stage(program, DEFAULT.batch)
    task = _Task(leaves, program, axes, given, hardware, state_bytes)
    count = parts(DEFAULT.batch, axes)
    tasks = [task]
    if not piped and needs_tokens(program, count):
        if no_tokens(program, count):
            split = split_tokens(program, count)
        else:
            # Attention and losses have a dimension for the parts.
            with divided_into(count):
                traced, _ = trace_over(mesh, fn, model, args)
            split = follow_program(traced, trainable_arrays(model, trainable))
            split = split_tokens(split, count)
        why = "it would cost more" if split.batch.sequence else split.batch.whole
        by_rows = replace(program, batch=replace(program.batch, whole=why))
        by_tokens = [replace(task, program=split)] if split.batch.sequence else []
        tasks = [replace(task, program=by_rows), *by_tokens]
    task, rows, decision = _cheapest(tasks, budget)
    dims = tuple((one.name, d) for one, _, d in constant_dims(decision))
    strategy, tokens = decision.strategy, decision.program.batch.sequence
    compute = Compute(
        decision.computed, strategy.batch, strategy.model, sequence, dims, tokens, microbatches
    )
    if piped and strategy != DEFAULT:
        task = replace(task, program=stage(program, strategy.batch))
        decision = replace(decision, program=task.program)
    return FlowPlan(rows, compute, _report(task, rows, decision, not_rows(args[:1], decision)))


def _staged(
    program: Program,
    batch_axes: tuple[str, ...],
    *,
    mesh: Mesh | AbstractMesh,
    given: Any,
    microbatches: int | None,
) -> Program:
    """The program as a pipeline; raises an error if it cannot run as one."""
    fn, model, args = given
    try:
        found = pipeline_of(program, mesh, fn, model, args, batch_axes, microbatches)
        return stage_program(program, found)
    except NoPipeline as error:
        raise ValueError(
            f"The program cannot be run as a pipeline on a mesh with pipe={mesh.shape[PIPE]}. "
            f"{error} A mesh without `pipe` has no such requirement."
        ) from error.__cause__


@dataclass(frozen=True)
class _Task:
    """What is planned; `given` are the specs that a user decided, by the index of a leaf."""

    leaves: list[Leaf]
    program: Program
    axes: dict[str, int]
    given: Mapping[int, P]
    hardware: Hardware
    state_bytes: int

    @property
    def memory(self) -> int | float:
        return DEFAULT_MEMORY if self.hardware.memory is None else self.hardware.memory


def _cheapest(tasks: Sequence[_Task], budget: int | None) -> tuple[_Task, list[Row], Decision]:
    """The cheapest plan of those that fit into memory, for a batch split by rows or by tokens."""
    found, errors = [], []
    for task in tasks:
        try:
            found.append((task, *_decide(task, budget)))
        except ValueError as error:
            errors.append(error)
    if not found:
        raise errors[-1]
    large = [is_large(tasks[0].program, value) for value in tasks[0].program.parameters]

    def order(one: tuple[_Task, list[Row], Decision]) -> tuple[int | float, int | float]:
        task, _, decision = one
        saved = saved_bytes(decision, task.axes)
        left = activation_memory(task.program, task.axes, large, task.memory, task.state_bytes)
        return max(saved - left, 0), decision.seconds

    return min(found, key=order)


def _decide(task: _Task, budget: int | None) -> tuple[list[Row], Decision]:
    """The rows within the budget; if memory is known, arrays are replicated where it suffices."""
    large = [is_large(task.program, value) for value in task.program.parameters]
    make = partial(_rows, task)
    if budget is not None:
        return fit_budget(make, large, task.program, task.axes, budget, task.state_bytes)
    rows, decision = make(large)
    if task.hardware.memory is None:
        return rows, decision
    decision, spared = replicate(rows, decision, task.axes, task.memory, task.state_bytes)
    return layout(task.leaves, decision, large, task.given, task.axes, spared), decision


def _rows(task: _Task, covered: Sequence[bool]) -> tuple[list[Row], Decision]:
    """The rows and the decision if the `covered` arrays are sharded whatever that costs."""
    program, axes = task.program, task.axes
    forced = [_model_dim(task.given.get(leaf.index, ())) for leaf in task.leaves]
    left = activation_memory(program, axes, covered, task.memory, task.state_bytes)
    decision = best_strategy(program, axes, covered, task.hardware, forced, left)
    return layout(task.leaves, decision, covered, task.given, axes), decision


def _report(
    task: _Task, rows: Sequence[Row], decision: Decision, others: Mapping[str, int]
) -> ProgramReport:
    """The figures of a decision; `others` are the arrays of the batch that are not rows."""
    axes, reasons = task.axes, find_reasons(task.leaves, decision, task.axes)
    return ProgramReport(
        batch_axes=batch_axes(decision, axes),
        model_axes=reasons.over,
        batch=batch_sentences(decision, axes, others),
        batch_sizes=batch_sizes(decision),
        not_rows=others,
        hindrances=hindrances(reasons),
        traffic=traffic(rows, reasons, task.hardware),
        closed_over=closed_over(reasons),
        coupled=find_coupling(task.program),
        unknown=dict(sorted(task.program.graph.unknown.items())),
        arithmetic=arithmetic(decision, axes),
        repeated=repeated(reasons),
        memory=estimate_memory(rows, decision, axes, task.state_bytes),
        device_memory=task.memory,
        device_memory_known=task.hardware.memory is not None,
        sequences=decision.program.batch.sequence,
        pipeline=pipelining(decision, axes),
    )


def _model_dim(spec: Any) -> int | None:
    return next((d for d, entry in enumerate(spec) if "model" in spec_axes(entry)), None)
