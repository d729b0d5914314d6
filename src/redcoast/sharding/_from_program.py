"""Plans the sharding of a tree from a function that uses it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import PyTree

from ..core._trainable import trainable_arrays
from ..distributed._mesh import BATCH_AXES, PIPE
from ._choose_program import cheapest_layout, choose_candidate
from .pipeline._stages import NoPipeline, Pipeline, pipeline_of
from .program._program import Program, follow_program
from .program._shared_programs import once
from .program._trace import Traced, trace_over
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
from .solver._hardware import Hardware
from .solver._layout import StorageLayout
from .solver._memory_estimate import arithmetic, estimate_memory
from .solver._strategy import PlanTask
from .tree._leaf_plans import Compute, LeafPlan, Role
from .tree._leaves import flat_leaves, is_inexact_leaf
from .tree._overrides import Override, apply_overrides


class PlannedProgram(NamedTuple):
    """The plan of each array of a model, how a program computes with them, and the report."""

    arrays: list[LeafPlan]
    compute: Compute
    report: ProgramReport


def plan_program(
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
    updated: Mapping[int, int],
    sequence: bool,
    microbatches: int | None = None,
    accumulate: int = 1,
) -> PlannedProgram:
    """Plans the sharding of a model and of the computation in `fn(model, *args)`.

    `state_bytes` are those of the optimizer's state, and `updated` those that it updates element by
    element, by the place of the parameter. `accumulate` is the number of calls of `fn` whose
    gradients a step adds up.
    """
    axes = dict(mesh.shape)
    leaves = flat_leaves(model)
    overridden = apply_overrides(leaves, overrides, axes)
    # A place counts arrays, and an index the leaves that are not arrays as well.
    specs: dict[int, P] = {}
    for place, leaf in enumerate(leaves):
        if leaf.index in overridden:
            specs[place] = overridden[leaf.index]

    def trace_for(args: Sequence[PyTree]) -> Traced:
        traced, _ = trace_over(mesh, fn, model, args)
        return traced

    def follow() -> Program:
        return follow_program(trace_for(args), trainable_arrays(model, trainable))

    def find_pipeline(batch_axes: tuple[str, ...]) -> Pipeline:
        try:
            return pipeline_of(program, trace_for, args, axes, batch_axes, microbatches)
        except NoPipeline as error:
            raise ValueError(
                f"The program cannot be run as a pipeline on a mesh with pipe={mesh.shape[PIPE]}. "
                f"{error} A mesh without `pipe` has no such requirement."
            ) from error.__cause__

    # What the program computes, and what is asked of its plan.
    program = follow()
    task = PlanTask(program, axes, specs, hardware, state_bytes, updated, sequence, accumulate)
    # Which dimensions are sharded over which axes, and where arrays are stored for that.
    if axes.get(PIPE, 1) > 1 and program.traced.trains:
        # A pipeline divides a batch by rows alone.
        task = replace(task, pipeline=find_pipeline(BATCH_AXES))
        layout = cheapest_layout([task], budget).layout
        if layout.decision.batch_axes != BATCH_AXES:
            # Other axes divide the batch into another number of microbatches.
            pipeline = find_pipeline(layout.decision.batch_axes)
            layout = replace(layout, decision=replace(layout.decision, pipeline=pipeline))
    else:
        best = choose_candidate(task, budget, follow)
        task, layout = best.task, best.layout
    # What a plan keeps of the decision, without nodes of the graph.
    decision = layout.decision
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
    # Each array with its spec and the reason for it, and the figures of the program.
    reasons = _reasons.find_reasons(leaves, decision)
    arrays: list[LeafPlan] = []
    for place, leaf in enumerate(leaves):
        role: Role = "other"
        if is_inexact_leaf(leaf):
            role = "parameter"
        reason = reasons.of_array(layout, place)
        update_spec = layout.update_specs.get(place)
        arrays.append(LeafPlan(leaf, layout.specs[place], reason, role, update_spec))
    not_rows = _reasons.not_rows(args[:1], decision)
    report = _report(task, layout, reasons, not_rows, program)
    report = replace(report, waiting=waiting(decision.program, mesh, compute))
    return PlannedProgram(arrays, compute, report)


def _report(
    task: PlanTask,
    layout: StorageLayout,
    reasons: _reasons.Reasons,
    not_rows: Mapping[str, int],
    unsplit: Program,
) -> ProgramReport:
    """The figures of a layout.

    `not_rows` are the arrays of the batch that are not rows. `unsplit` is the program before its
    examples are split, which says how they are coupled, summed and masked.
    """
    decision = layout.decision
    sent = all_sent(layout, reasons)
    return ProgramReport(
        batch_axes=decision.used_batch_axes,
        model_axes=decision.used_model_axes,
        batch=_reasons.batch_sentences(decision, not_rows),
        batch_sizes=_reasons.batch_sizes(decision),
        not_rows=not_rows,
        hindrances=_reasons.hindrances(reasons),
        traffic=traffic(sent),
        closed_over=_reasons.closed_over(reasons),
        coupled=once(find_coupling, unsplit),
        summed=once(find_sums, unsplit),
        shared_masks=once(find_shared_masks, unsplit),
        promotions=once(find_promotions, unsplit),
        unknown=dict(sorted(task.program.graph.unknown.items())),
        arithmetic=arithmetic(decision),
        repeated=repeated(reasons),
        memory=estimate_memory(layout, task.state_bytes),
        device_memory=task.memory,
        device_memory_known=task.hardware.memory is not None,
        axes_for_memory=decision.for_memory,
        split_examples=_reasons.split_examples(decision),
        gathered_whole=find_gathered_whole(decision),
        pipeline=pipelining(decision),
        lines=find_lines(sent, layout.activation_parts, decision.program),
    )
