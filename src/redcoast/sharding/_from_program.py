"""Plans the sharding of a tree from a function that uses it."""

import functools as ft
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import PyTree

from ..core._trainable import trainable_arrays
from ..distributed._mesh import BATCH_AXES, PIPE
from ._mesh_axes import parts
from .pipeline._stages import NoPipeline, pipeline_of, stage_program
from .program._batch import Split
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
from .report._sent import find_gathered_whole
from .report._sums import find_sums
from .report._traffic import all_sent, pipelining, traffic
from .report._waiting import waiting
from .solver._hardware import DEFAULT_MEMORY, Hardware
from .solver._layout import StorageLayout, is_large
from .solver._memory_estimate import (
    arithmetic,
    estimate_memory,
    excess_bytes,
    fit_budget,
)
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
from .tree._leaf_plans import Compute, LeafPlan, Role
from .tree._leaves import Leaf, flat_leaves, is_inexact_leaf
from .tree._overrides import Override, apply_overrides, model_dim


@dataclass(frozen=True)
class _Task:
    """What is planned; `overrides` are the specs that a user decided, by the place of an array."""

    leaves: list[Leaf]
    program: Program
    axes: dict[str, int]
    overrides: Mapping[int, P]
    hardware: Hardware
    state_bytes: int
    splits_sequence: bool = False  # between the tensor-parallel parts

    @property
    def memory(self) -> int | float:
        if self.hardware.memory is None:
            return DEFAULT_MEMORY
        return self.hardware.memory


@dataclass(frozen=True)
class _Candidate:
    """A program, and the layout of its arrays."""

    task: _Task
    layout: StorageLayout

    @ft.cached_property
    def excess(self) -> int | float:
        """Bytes per device by which it does not fit into memory."""
        return excess_bytes(self.layout, self.task.memory, self.task.state_bytes)

    @property
    def order(self) -> tuple[int | float, int | float]:
        """Less is better: first what does not fit into memory, then seconds."""
        return self.excess, self.layout.decision.seconds


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
    overridden = apply_overrides(leaves, overrides, axes)
    # A place counts arrays, and an index the leaves that are not arrays as well.
    specs: dict[int, P] = {}
    for place, leaf in enumerate(leaves):
        if leaf.index in overridden:
            specs[place] = overridden[leaf.index]

    def trace_program() -> Program:
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

    program = trace_program()
    is_pipeline = axes.get(PIPE, 1) > 1 and program.traced.trains
    if is_pipeline:
        # Memory is estimated for what one stage runs.
        program = as_pipeline(program, BATCH_AXES)
    task = _Task(leaves, program, axes, specs, hardware, state_bytes, sequence)
    if is_pipeline:
        # A pipeline divides a batch by rows alone.
        best = _cheapest([task], budget)
    else:
        best = _by_rows_or_within(task, budget, trace_program)
    task, layout, decision = best.task, best.layout, best.layout.decision
    compute = Compute(
        dims=decision.parallel_dims,
        batch_axes=decision.batch_axes,
        model_axes=decision.model_axes,
        sequence_parallel=sequence,
        constants=tuple((constant.name, d) for constant, _, d in decision.constants),
        splits_examples=decision.program.batch.splits_examples,
        microbatches=microbatches,
        split=decision.program.batch.split,
    )
    if is_pipeline and decision.batch_axes != BATCH_AXES:
        # Other axes divide the batch into another number of microbatches.
        task = replace(task, program=as_pipeline(program, decision.batch_axes))
        decision = replace(decision, program=task.program)
        layout = replace(layout, decision=decision)
    reasons = _reasons.find_reasons(leaves, decision)
    not_rows = _reasons.not_rows(args[:1], decision)
    by_rows = task.program
    # Whether examples are coupled is asked of rows, also where tokens are split.
    if decision.program.batch.splits_examples:
        by_rows = program
    report = _report(task, layout, reasons, not_rows, by_rows)
    report = replace(report, waiting=waiting(decision.program, mesh, compute))
    return _leaf_plans(layout, reasons), compute, report


def _by_rows_or_within(
    task: _Task, budget: int | None, trace_program: Callable[[], Program]
) -> _Candidate:
    """The plan, with the batch split by rows if they divide and it fits into memory, or along
    dimensions of its examples."""
    program, axes = task.program, task.axes
    count = parts(BATCH_AXES, axes)

    @ft.lru_cache(None)  # a trace takes longer than the search
    def in_parts(number: int) -> Program:
        if number == 1:
            return program
        return trace_in_parts(number, trace_program)

    # A constraint of the program's own on its batch is obeyed.
    if split := asked_split(program, axes):
        asked = apply_split(in_parts(example_parts(split, axes)), split, axes)
        if asked is None:
            raise ValueError(_cannot_split(program, split, axes))
        return _cheapest([replace(task, program=asked)], budget)
    others = (replace(task, program=within) for within in candidates(in_parts, axes))
    # Rows divide: split examples are tried only if activations do not fit.
    if not needs_split(program, count):
        by_rows = _cheapest([task], budget)
        if not by_rows.excess:
            return by_rows
        best = _cheapest(others, budget, beside=[by_rows])
        # Where nothing fits, the price of a usual plan decides.
        if best.excess:
            return by_rows
        return best
    # Rows do not divide: they are split over fewer axes, if any, or examples are split.
    by_tokens = split_tokens(program, count, lambda: in_parts(count))
    why_whole = by_tokens.batch.why_whole or "it would cost more"
    unsplit = replace(program, batch=replace(program.batch, why_whole=why_whole))
    tasks = [replace(task, program=unsplit)]
    if is_sequence(by_tokens, count):
        # Tokens and rows are compared by their costs.
        tasks.append(replace(task, program=by_tokens))
    best = _cheapest([*tasks, *others], budget)
    if best.excess:
        # Two dimensions at once are many candidates, so they are tried last.
        pairs = (replace(task, program=within) for within in candidates_of_two(in_parts, axes))
        best = _cheapest(pairs, budget, beside=[best])
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


def _cheapest(
    tasks: Iterable[_Task], budget: int | None, *, beside: Sequence[_Candidate] = ()
) -> _Candidate:
    """The cheapest plan of those that fit into memory, of tasks and of plans that were made."""
    planned = list(beside)
    errors: list[ValueError] = []
    for task in tasks:
        try:
            planned.append(_lay_out(task, budget))
        except ValueError as error:
            errors.append(error)
    if not planned:  # neither is within the budget
        raise errors[-1]
    return min(planned, key=lambda candidate: candidate.order)


def _lay_out(task: _Task, budget: int | None) -> _Candidate:
    """The layout within the budget; if memory is known, arrays are replicated where it suffices."""
    program, axes, state_bytes = task.program, task.axes, task.state_bytes
    large = [is_large(program, value) for value in program.parameters]
    # Overrides over `model` are computed with in parts, like chosen dimensions.
    forced = [model_dim(task.overrides.get(place, ())) for place in range(len(large))]

    def make(stored_in_parts: Sequence[bool]) -> StorageLayout:
        """The layout if some arrays are FSDP-sharded whatever that costs."""

        @ft.cache  # with its activations
        def lay_out(decision: Decision) -> StorageLayout:
            return StorageLayout(decision, stored_in_parts, task.overrides)

        def excess(decision: Decision) -> int | float:
            return excess_bytes(lay_out(decision), task.memory, state_bytes)

        decision = best_strategy(
            program,
            axes,
            stored_in_parts,
            task.hardware,
            forced,
            excess,
            splits_sequence=task.splits_sequence,
        )
        return lay_out(decision)

    if budget is not None:
        layout = fit_budget(make, large, program, axes, budget, state_bytes)
        return _Candidate(task, layout)
    layout = make(large)
    if task.hardware.memory is not None:
        # Memory that is only assumed, as for an abstract mesh, may not be there.
        layout = replicate(layout, task.memory, state_bytes)
    return _Candidate(task, layout)


def _leaf_plans(layout: StorageLayout, reasons: _reasons.Reasons) -> list[LeafPlan]:
    """The plan of each array of a model."""
    plans: list[LeafPlan] = []
    for place, leaf in enumerate(reasons.leaves):
        role: Role = "other"
        if is_inexact_leaf(leaf):
            role = "parameter"
        reason = reasons.of_array(layout, place)
        plans.append(LeafPlan(leaf, layout.specs[place], reason, role))
    return plans


def _report(
    task: _Task,
    layout: StorageLayout,
    reasons: _reasons.Reasons,
    not_rows: Mapping[str, int],
    by_rows: Program,
) -> ProgramReport:
    """The figures of a layout.

    `not_rows` are the arrays of the batch that are not rows. `by_rows` is the program whose batch
    dimensions are rows, from which the report says what a loss does with its examples.
    """
    decision = layout.decision
    sent = all_sent(layout, reasons)
    return ProgramReport(
        batch_axes=decision.used_batch_axes,
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
        arithmetic=arithmetic(decision),
        repeated=repeated(reasons),
        memory=estimate_memory(layout, task.state_bytes),
        device_memory=task.memory,
        device_memory_known=task.hardware.memory is not None,
        sequences=decision.program.batch.splits_examples,
        split_examples=_reasons.split_examples(decision),
        gathered_whole=find_gathered_whole(decision),
        pipeline=pipelining(decision),
        lines=find_lines(sent, layout.activation_parts, decision.program),
    )
