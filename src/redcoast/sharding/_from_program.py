"""Plans the sharding of a tree from a function that uses it."""

import functools as ft
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import PyTree

from ..core._trainable import trainable_arrays
from ..distributed._mesh import BATCH_AXES, PIPE
from ._mesh_axes import parts, used_axes
from .pipeline._stages import NoPipeline, pipeline_of, stage_program
from .program._batch import Split
from .program._graph import Value
from .program._program import Program, follow_program
from .program._shared_programs import once
from .program._trace import trace_over
from .report import _reasons
from .report._coupling import find_coupling
from .report._data import ProgramReport
from .report._lines import find_lines
from .report._masks import find_shared_masks
from .report._promotion import find_promotions
from .report._repeated import repeated
from .report._sent_whole import find_gathered_whole
from .report._sums import find_sums
from .report._traffic import all_sent, pipelining, traffic
from .report._waiting import waiting
from .solver import _memory
from .solver._hardware import Hardware
from .solver._replicate import replicate
from .solver._split_examples import (
    apply_split,
    asked_split,
    candidates,
    candidates_of_two,
    example_parts,
    is_sequence,
    needs_split,
    split_tokens,
    trace_in_parts,
)
from .solver._strategy import Decision, best_strategy
from .tree._leaf_plans import (
    ON_STAGES,
    OVERRIDE,
    STORED,
    Compute,
    LeafPlan,
    Reason,
    Role,
    trim_spec,
)
from .tree._leaves import LARGE, Leaf, flat_leaves, is_inexact_leaf
from .tree._overrides import Override, apply_overrides, model_dim

# The axes over which arrays can be sharded that the program computes with as a whole.
STORAGE_AXES = ("fsdp", "model")
Entries = list[tuple[str, ...] | None]


def is_large(program: Program, value: Value) -> bool:
    """Whether an array is sharded even if it has to be all-gathered where it is used."""
    of_layer = 1  # elements; a scan gathers one layer at a time
    for node, size in zip(value.dims, value.shape, strict=True):
        if node not in program.graph.stacks:
            of_layer *= size
    return of_layer >= LARGE


@dataclass(frozen=True)
class _Task:
    """What is planned; `overrides` are the specs that a user decided, by the index of a leaf."""

    leaves: list[Leaf]
    program: Program
    axes: dict[str, int]
    overrides: Mapping[int, P]
    hardware: Hardware
    state_bytes: int

    @property
    def memory(self) -> int | float:
        if self.hardware.memory is None:
            return _memory.DEFAULT_MEMORY
        return self.hardware.memory

    @property
    def large(self) -> list[bool]:
        return [is_large(self.program, value) for value in self.program.parameters]

    def excess(self, decision: Decision, fsdp_sharded: Sequence[bool]) -> int | float:
        """Bytes per device by which the activations of a decision do not fit into memory."""
        left = _memory.room_for_activations(
            self.program, self.axes, fsdp_sharded, self.memory, self.state_bytes
        )
        return max(0, _memory.peak_bytes(decision, fsdp_sharded) - left)


@dataclass(frozen=True)
class _Layout:
    """A decision, and the plan of each array that follows from it."""

    task: _Task
    plans: list[LeafPlan]
    decision: Decision

    @ft.cached_property
    def excess(self) -> int | float:
        """Bytes per device by which the activations do not fit into memory."""
        return self.task.excess(self.decision, self.task.large)

    @property
    def order(self) -> tuple[int | float, int | float]:
        """Less is better: first what does not fit into memory, then seconds."""
        return self.excess, self.decision.seconds


def plan_flow(
    model: PyTree,
    mesh: Mesh | AbstractMesh,
    fn: Callable[..., PyTree],
    args: Sequence[PyTree],
    *,
    overrides: Sequence[Override],
    trainable: PyTree,
    hardware: Hardware,
    budget: int | None,
    state_bytes: int,
    sequence: bool,
    microbatches: int | None = None,
) -> tuple[list[LeafPlan], Compute, ProgramReport]:
    """Plans the sharding of a model and of the computation in `fn(model, *args)`."""
    axes = dict(mesh.shape)
    leaves = flat_leaves(model)
    specs = apply_overrides(leaves, overrides, axes)

    def trace() -> Program:
        traced, _ = trace_over(mesh, fn, model, args)
        return follow_program(traced, trainable_arrays(model, trainable))

    def as_pipeline(program: Program, batch_axes: tuple[str, ...]) -> Program:
        try:
            pipeline = pipeline_of(program, mesh, fn, model, args, batch_axes, microbatches)
            return stage_program(program, pipeline)
        except NoPipeline as error:
            raise ValueError(
                f"The program cannot be run as a pipeline on a mesh with pipe={mesh.shape[PIPE]}. "
                f"{error} A mesh without `pipe` has no such requirement."
            ) from error.__cause__

    program = trace()
    is_pipeline = axes.get(PIPE, 1) > 1 and program.traced.trains
    if is_pipeline:
        # The solver compares what the stages of a pipeline keep in memory.
        program = as_pipeline(program, BATCH_AXES)
    task = _Task(leaves, program, axes, specs, hardware, state_bytes)
    if is_pipeline:
        best = _cheapest([task], budget)
    else:
        best = _by_rows_or_within(task, budget, trace)
    task, decision = best.task, best.decision
    compute = Compute(
        dims=decision.computed,
        batch_axes=decision.batch_axes,
        model_axes=decision.model_axes,
        sequence=sequence,
        constants=tuple((constant.name, d) for constant, _, d in decision.constants),
        tokens=decision.program.batch.splits_examples,
        microbatches=microbatches,
        split=decision.program.batch.split,
    )
    if is_pipeline and decision.batch_axes != BATCH_AXES:
        # Other axes divide the batch into another number of microbatches.
        task = replace(task, program=as_pipeline(program, decision.batch_axes))
        decision = replace(decision, program=task.program)
    not_rows = _reasons.not_rows(args[:1], decision)
    # Whether examples are coupled is asked of rows, also where tokens are split.
    by_rows = program if decision.program.batch.splits_examples else task.program
    report = _report(task, best.plans, decision, not_rows, by_rows)
    report = replace(report, waiting=waiting(decision.program, mesh, compute))
    return best.plans, compute, report


def _by_rows_or_within(task: _Task, budget: int | None, trace: Callable[[], Program]) -> _Layout:
    """The plan, with the batch split by rows if they divide and it fits into memory, or along
    dimensions of its examples."""
    program, axes = task.program, task.axes
    count = parts(BATCH_AXES, axes)

    @ft.lru_cache(None)
    def traced(parts: int) -> Program:
        return program if parts == 1 else trace_in_parts(parts, trace)

    if split := asked_split(program, axes):
        asked = apply_split(traced(example_parts(split, axes)), split, axes)
        if asked is None:
            raise ValueError(_cannot_split(program, split, axes))
        return _cheapest([replace(task, program=asked)], budget)
    others = (replace(task, program=within) for within in candidates(traced, axes))
    # Rows divide: split examples are tried only if activations do not fit.
    if not needs_split(program, count):
        by_rows = _cheapest([task], budget)
        if not by_rows.excess:
            return by_rows
        # Where nothing fits, the price of a usual plan decides.
        best = _cheapest([task, *others], budget)
        return by_rows if best.excess else best
    by_tokens = split_tokens(program, count, lambda: traced(count))
    why_whole = by_tokens.batch.why_whole or "it would cost more"
    by_rows = replace(program, batch=replace(program.batch, why_whole=why_whole))
    tasks = [replace(task, program=by_rows)]
    if is_sequence(by_tokens, count):
        # Tokens and rows are compared by their costs.
        tasks.append(replace(task, program=by_tokens))
    best = _cheapest([*tasks, *others], budget)
    if best.excess:
        pairs = (replace(task, program=within) for within in candidates_of_two(traced, axes))
        best = _cheapest([best.task, *pairs], budget)
    return best


def _cannot_split(program: Program, split: Split, axes: Mapping[str, int]) -> str:
    listed: list[str] = []
    for over, places in split:
        for place, d in places:
            size = program.batch_arrays[place].shape[d]
            listed.append(
                f"dimension {d} of array {place}, of size {size}, over {' x '.join(over)} = "
                f"{parts(over, axes)}"
            )
    return (
        f"The function constrains its batch to be split along {'; '.join(listed)}. That does not "
        "divide, or the dimension belongs to parameters, or an operation needs all of it. Split "
        "another dimension, or leave the constraint out, and the plan chooses."
    )


def _cheapest(tasks: Sequence[_Task], budget: int | None) -> _Layout:
    """The cheapest plan of those that fit into memory."""
    layouts: list[_Layout] = []
    errors: list[ValueError] = []
    for task in tasks:
        try:
            layouts.append(_lay_out(task, budget))
        except ValueError as error:
            errors.append(error)
    if not layouts:  # neither is within the budget
        raise errors[-1]
    return min(layouts, key=lambda layout: layout.order)


def _lay_out(task: _Task, budget: int | None) -> _Layout:
    """The layout within the budget; if memory is known, arrays are replicated where it suffices."""
    program, axes, state_bytes = task.program, task.axes, task.state_bytes
    large = task.large
    # Overrides over `model` are computed with in parts, like chosen dimensions.
    forced = [model_dim(task.overrides.get(leaf.index, ())) for leaf in task.leaves]

    def make(fsdp_sharded: Sequence[bool]) -> tuple[list[LeafPlan], Decision]:
        """The layout if some arrays are FSDP-sharded whatever that costs."""
        excess = lambda decision: task.excess(decision, fsdp_sharded)
        decision = best_strategy(program, axes, fsdp_sharded, task.hardware, forced, excess)
        return _plans(task, decision, fsdp_sharded), decision

    if budget is not None:
        within = _memory.fit_budget(make, large, program, axes, budget, state_bytes)
        return _Layout(task, *within)
    plans, decision = make(large)
    if task.hardware.memory is not None:
        # Memory that is only assumed may not be there.
        decision, replicated = replicate(plans, decision, task.memory, state_bytes)
        plans = _plans(task, decision, large, replicated)
    return _Layout(task, plans, decision)


def _plans(
    task: _Task,
    decision: Decision,
    fsdp_sharded: Sequence[bool],
    replicated_over_model: Collection[int] = (),
) -> list[LeafPlan]:
    """The plan of each array of a model.

    `replicated_over_model` are the places of arrays that are FSDP-sharded over `fsdp` alone.
    """
    staged = decision.program.staged
    why = _reasons.find_reasons(task.leaves, decision)
    plans: list[LeafPlan] = []
    for place, leaf in enumerate(task.leaves):
        role: Role = "other"
        if is_inexact_leaf(leaf):
            role = "parameter"
        if leaf.index in task.overrides:
            plans.append(LeafPlan(leaf, task.overrides[leaf.index], OVERRIDE, role))
            continue
        is_sharded, is_replicated = fsdp_sharded[place], place in replicated_over_model
        spec = _spec(place, decision, is_sharded, is_replicated)
        reason = _reason(place, spec, is_sharded, is_replicated, why)
        if staged is not None and place in staged.layered:
            if not any(spec):
                reason = ON_STAGES
            spec = P(PIPE, *spec[1:])  # the first dimension counts layers
        plans.append(LeafPlan(leaf, spec, reason, role))
    return plans


def _spec(place: int, decision: Decision, fsdp_sharded: bool, replicated_over_model: bool) -> P:
    value = decision.program.parameters[place]
    model_axes, fsdp_axes = decision.model_axes, ("fsdp",)
    if "model" in decision.batch_axes:
        # If the batch is split over all axes, an array that is sharded over the last two along one
        # dimension has a gradient that can be reduce-scattered.
        model_axes = STORAGE_AXES
    if "fsdp" in model_axes:
        fsdp_axes = ()
    model, fsdp = used_axes(model_axes, decision.sizes), used_axes(fsdp_axes, decision.sizes)
    entries: Entries = [None] * len(value.dims)
    computed = decision.computed[place]
    if computed is not None:
        entries[computed] = model
    elif fsdp_sharded and model and not replicated_over_model:
        _shard_storage(decision, value, entries, model)
    if fsdp_sharded and fsdp:
        # A tensor-parallel array is stored in parts along a second dimension.
        _shard_storage(decision, value, entries, fsdp)
    return trim_spec(entries)


def _shard_storage(
    decision: Decision, value: Value, entries: Entries, over: tuple[str, ...]
) -> None:
    """Shards the largest dimension that divides over all of the axes, or else one over each.

    It is neither a layer count nor a window. The first of equal dimensions is taken.
    """
    n, blocked = parts(over, decision.sizes), decision.classes.of(decision.program.graph.blocked)
    largest: int | None = None
    for d, (node, size) in enumerate(zip(value.dims, value.shape, strict=True)):
        divides = size > 0 and size % n == 0
        if entries[d] is not None or not divides or decision.classes[node] in blocked:
            continue
        if largest is None or size > value.shape[largest]:
            largest = d
    if largest is not None:
        entries[largest] = over
    elif len(over) > 1:
        for axis in over:
            _shard_storage(decision, value, entries, (axis,))


def _reason(
    place: int, spec: P, fsdp_sharded: bool, replicated_over_model: bool, why: _reasons.Reasons
) -> Reason:
    program, computed = why.decision.program, why.decision.computed[place]
    if computed is not None:
        return why.computed(place, computed)
    if spec:
        return Reason("fsdp", why.not_computed(place) or STORED)
    if replicated_over_model:
        text = f"{why.not_computed(place)}, and the devices have room for it"
    elif parts(STORAGE_AXES, why.decision.sizes) == 1:
        text = "fsdp and model have one device each"
    elif not is_large(program, program.parameters[place]):
        text = why.indivisible(place, why.decision.n) or f"small, fewer than {LARGE:,} elements"
    elif not fsdp_sharded:
        text = "the budget leaves room for it"
    else:
        text = why.indivisible(place, least=2) or why.not_stored(place)
    return Reason("replicated", text)


def _report(
    task: _Task,
    plans: Sequence[LeafPlan],
    decision: Decision,
    not_rows: Mapping[str, int],
    by_rows: Program,
) -> ProgramReport:
    """The figures of a decision.

    `not_rows` are the arrays of the batch that are not rows. What the program does with its rows is
    that of `by_rows`, whether rows are split or not.
    """
    reasons = _reasons.find_reasons(task.leaves, decision)
    sent = all_sent(plans, reasons, task.hardware)
    return ProgramReport(
        batch_axes=_reasons.batch_axes(decision),
        model_axes=reasons.over,
        batch=_reasons.batch_sentences(decision, not_rows),
        batch_sizes=_reasons.batch_sizes(decision),
        not_rows=not_rows,
        hindrances=_reasons.hindrances(reasons),
        traffic=traffic(sent),
        closed_over=_reasons.closed_over(reasons),
        coupled=once(find_coupling, by_rows),
        summed=once(find_sums, by_rows),
        shared_masks=once(find_shared_masks, by_rows),
        promotions=once(find_promotions, by_rows),
        unknown=dict(sorted(task.program.graph.unknown.items())),
        arithmetic=_memory.arithmetic(decision),
        repeated=repeated(reasons),
        memory=_memory.estimate_memory(plans, decision, task.state_bytes),
        device_memory=task.memory,
        device_memory_known=task.hardware.memory is not None,
        sequences=decision.program.batch.splits_examples,
        split_examples=_reasons.split_examples(decision),
        gathered_whole=find_gathered_whole(decision),
        pipeline=pipelining(decision),
        lines=find_lines(sent, _memory.activation_parts(plans, decision), decision.program),
    )
