"""A plan by dataflow: trace, follow, decide, lay out."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from jax.sharding import AbstractMesh, Mesh
from jaxtyping import PyTree

from .._parts import trainable_arrays
from .choice.arithmetic import arithmetic
from .choice.dataflow import Decision, constant_dims, decide, follow_program
from .choice.hardware import Hardware
from .choice.memory import ASSUMED, estimate, fit_budget, room
from .choice.spare import spare
from .constrain.compute import Compute
from .layout import is_large, layout
from .nodes import flat_leaves
from .overrides import Override, apply_overrides, spec_axes
from .program.trace import trace_over
from .report.batch import batch_axes, batch_sentences, not_rows
from .report.closed_over import closed_over
from .report.coupling import find_coupling
from .report.reasons import find_reasons, hindrances
from .report.repeated import repeated
from .report.traffic import traffic
from .rows import Row


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
