"""Plans the sharding of a tree from a function that uses it."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any

from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import PyTree

from ..core._trainable import trainable_arrays
from ..distributed._mesh import PIPE
from .pipeline._stages import NoPipeline, pipeline_of, stage_program
from .program._graph import Value
from .program._trace import trace_over
from .report import _reasons
from .report._coupling import find_coupling
from .report._data import ProgramReport
from .report._lines import find_lines
from .report._masks import find_shared_masks
from .report._promotion import find_promotions
from .report._repeated import repeated
from .report._sums import find_sums
from .report._traffic import all_sent, pipelining, traffic
from .solver import _memory
from .solver._hardware import Hardware
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
from .solver._tokens import needs_tokens, split_tokens
from .tree._leaves import LARGE, Leaf, flat_leaves, is_inexact_leaf
from .tree._overrides import Override, apply_overrides, model_dim
from .tree._plan_rows import ON_STAGES, OVERRIDE, STORED, Compute, Reason, Role, Row, trim_spec


def is_large(program: Program, value: Value) -> bool:
    """Whether an array is sharded even if it has to be all-gathered where it is used."""
    dims = zip(value.dims, value.shape, strict=True)
    return prod(size for node, size in dims if node not in program.graph.stacks) >= LARGE


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
        return _memory.DEFAULT_MEMORY if self.hardware.memory is None else self.hardware.memory


def _layout(
    task: _Task, decision: Decision, covered: Sequence[bool], spared: Collection[int] = ()
) -> list[Row]:
    """A row for each array of a model.

    `spared` are the places of arrays that are not FSDP-sharded over `model`.
    """
    staged = decision.program.staged
    layered = frozenset() if staged is None else staged.layered
    why = _reasons.find_reasons(task.leaves, decision, task.axes)
    rows = []
    for place, leaf in enumerate(task.leaves):
        role: Role = "parameter" if is_inexact_leaf(leaf) else "other"
        if leaf.index in task.given:
            spec, reason = task.given[leaf.index], OVERRIDE
        else:
            spec = _spec(place, decision, covered[place], place in spared, task.axes)
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
        entries[computed] = model
    elif covered and model and not spared:
        _store(decision, value, entries, model, axes)
    if covered and fsdp:
        _store(decision, value, entries, fsdp, axes)
    return trim_spec(tuple(entries))


def _reason(place: int, spec: P, covered: bool, spared: bool, why: _reasons.Reasons) -> Reason:
    program, computed = why.decision.program, why.decision.computed[place]
    if computed is not None:
        return why.computed(place, computed)
    if spec:
        return Reason("fsdp", why.not_computed(place) or STORED)
    if spared:
        text = f"{why.not_computed(place)}, and the devices have room for it"
    elif parts(("fsdp", "model"), why.axes) == 1:
        text = "fsdp and model have one device each"
    elif not is_large(program, program.parameters[place]):
        text = why.indivisible(place, why.n) or f"small, fewer than {LARGE:,} elements"
    elif not covered:
        text = "the budget leaves room for it"
    else:
        text = why.indivisible(place, least=2) or why.not_stored(place)
    return Reason("replicated", text)


def _store(
    decision: Decision,
    value: Value,
    entries: list[Any],
    over: tuple[str, ...],
    axes: Mapping[str, int],
) -> None:
    """Shards the largest dimension that divides over all of the axes, or else one over each.

    It is neither a layer count nor a window.
    """
    n, blocked = parts(over, axes), decision.classes.of(decision.program.graph.blocked)
    free = [
        d
        for d, (node, size) in enumerate(zip(value.dims, value.shape, strict=True))
        if entries[d] is None and size % n == 0 and size and decision.classes[node] not in blocked
    ]
    if free:
        entries[max(free, key=lambda d: (value.shape[d], -d))] = over
        return
    for one in over if len(over) > 1 else ():
        _store(decision, value, entries, (one,), axes)


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
) -> tuple[list[Row], Compute, ProgramReport]:
    """Plans the sharding of a model and of the computation in `fn(model, *args)`."""
    axes = dict(mesh.shape)
    leaves = flat_leaves(model)
    given = apply_overrides(leaves, overrides, axes)

    def trace() -> Program:
        traced, _ = trace_over(mesh, fn, model, args)
        return follow_program(traced, trainable_arrays(model, trainable))

    program = trace()
    stage = partial(_staged, mesh=mesh, given=(fn, model, args), microbatches=microbatches)
    piped = axes.get(PIPE, 1) > 1 and program.traced.trains
    if piped:
        program = stage(program, DEFAULT.batch)
    task = _Task(leaves, program, axes, given, hardware, state_bytes)
    count = parts(DEFAULT.batch, axes)
    tasks = [task]
    if not piped and needs_tokens(program, count):
        split = split_tokens(program, count, trace)
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
    return rows, compute, _report(task, rows, decision, _reasons.not_rows(args[:1], decision))


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
        program, axes = task.program, task.axes
        left = _memory.activation_memory(program, axes, large, task.memory, task.state_bytes)
        return max(saved_bytes(decision, axes) - left, 0), decision.seconds

    return min(found, key=order)


def _decide(task: _Task, budget: int | None) -> tuple[list[Row], Decision]:
    """The rows within the budget; if memory is known, arrays are replicated where it suffices."""
    program, axes, states = task.program, task.axes, task.state_bytes
    large = [is_large(program, value) for value in program.parameters]
    forced = [model_dim(task.given.get(leaf.index, ())) for leaf in task.leaves]

    def make(covered: Sequence[bool]) -> tuple[list[Row], Decision]:
        """The rows and the decision if the `covered` arrays are sharded whatever that costs."""
        left = _memory.activation_memory(program, axes, covered, task.memory, states)
        decision = best_strategy(program, axes, covered, task.hardware, forced, left)
        return _layout(task, decision, covered), decision

    if budget is not None:
        return _memory.fit_budget(make, large, program, axes, budget, states)
    rows, decision = make(large)
    if task.hardware.memory is None:
        return rows, decision
    decision, spared = replicate(rows, decision, axes, task.memory, states)
    return _layout(task, decision, large, spared), decision


def _report(
    task: _Task, rows: Sequence[Row], decision: Decision, others: Mapping[str, int]
) -> ProgramReport:
    """The figures of a decision; `others` are the arrays of the batch that are not rows."""
    axes, reasons = task.axes, _reasons.find_reasons(task.leaves, decision, task.axes)
    sent = all_sent(rows, reasons, task.hardware)
    return ProgramReport(
        batch_axes=_reasons.batch_axes(decision, axes),
        model_axes=reasons.over,
        batch=_reasons.batch_sentences(decision, axes, others),
        batch_sizes=_reasons.batch_sizes(decision),
        not_rows=others,
        hindrances=_reasons.hindrances(reasons),
        traffic=traffic(sent),
        closed_over=_reasons.closed_over(reasons),
        coupled=find_coupling(task.program),
        summed=find_sums(task.program),
        shared_masks=find_shared_masks(task.program),
        promotions=find_promotions(task.program),
        unknown=dict(sorted(task.program.graph.unknown.items())),
        arithmetic=_memory.arithmetic(decision, axes),
        repeated=repeated(reasons),
        memory=_memory.estimate_memory(rows, decision, axes, task.state_bytes),
        device_memory=task.memory,
        device_memory_known=task.hardware.memory is not None,
        sequences=decision.program.batch.sequence,
        pipeline=pipelining(decision, axes),
        lines=find_lines(sent, decision, axes),
    )
