"""What an optimizer's update sends, in the report of a plan."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import compress

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, PyTree

from ..core._axis_types import on_auto_axes
from ..core._control_flow import AnyJaxpr
from ..core._pytree import Arrays, abstract_arrays, join, split
from ..core._stored_specs import stored_as, stored_specs
from ..core._tracing import trace_for
from ..core._trainable import partition_trainable, trainable_arrays
from ..sharding import Plan
from ..sharding.tree._leaves import flat_leaves
from ..sharding.tree._state_plans import elementwise_states
from ._labels import accept_module_labels
from ._optimizer import call_update
from ._state import TrainState


def with_update_traffic(
    plan: Plan, optimizer: optax.GradientTransformation, state: TrainState, trainable: PyTree
) -> Plan:
    """A plan of a state whose report has what an update of the parameters sends, too, and of their
    average.

    Evaluations of the loss by the optimizer itself, as in a line search, are not counted.
    """
    # Imported where a step is planned, so that importing redcoast stays cheap.
    from ..sharding.report._update_traffic import update_traffic

    program = plan.report.program_or_none
    if program is None or plan.mesh.size == 1:
        return plan
    accept_module_labels(optimizer)
    state = on_auto_axes(state)
    is_trained = trainable_arrays(state.model, trainable)
    try:
        traced = _trace_update(plan, optimizer, state, trainable, is_trained)
    except Exception:
        return plan  # The step raises the same error, with an explanation.
    operands, results = _specs_of_update(plan, state, is_trained)
    sent_by_loss = sum(line.bytes for line in program.traffic)
    sizes = dict(plan.mesh.shape)
    lines = update_traffic(traced.jaxpr, operands, results, sizes, beside=sent_by_loss)
    if not lines:
        return plan
    ordered = sorted((*program.traffic, *lines), key=lambda line: -line.bytes)
    report = replace(plan.report, program_or_none=replace(program, traffic=tuple(ordered)))
    return replace(plan, report=report)


@dataclass(frozen=True)
class _TracedUpdate:
    """The program of an update, and whether it depends on the mesh that it was traced for.

    It computes `(updates, opt_state, average)` from `(gradients, opt_state, model, average)`, whose
    arrays are flat.
    """

    jaxpr: AnyJaxpr
    over_a_mesh: bool


def _trace_update(
    plan: Plan,
    optimizer: optax.GradientTransformation,
    state: TrainState,
    trainable: PyTree,
    is_trained: Sequence[bool],
) -> _TracedUpdate:
    from ..sharding.program._shared_programs import is_over_a_mesh, shared_trace

    model, of_model = split(state.model)
    opt_state, of_opt_state = split(state.opt_state)
    average, of_average = split(state.average)

    def update(
        grads: Arrays, opt_state: Arrays, model: Arrays, average: Arrays
    ) -> tuple[Arrays, ...]:
        params, _ = partition_trainable(join(model, of_model), trainable)
        gradients = jax.tree.structure(params).unflatten(grads)
        extras = {"value": _zero(params), "grad": gradients, "value_fn": _zero}
        on_demand = {"obj_fn": _zero, "grad_fn": lambda params, i: gradients}
        with jax.numpy_dtype_promotion("standard"):
            updates, new_state = call_update(
                optimizer,
                gradients,
                join(opt_state, of_opt_state),
                params,
                on_demand=on_demand,
                **extras,
            )
        new_opt_state, of_new_state = split(new_state)
        if of_new_state.structure != of_opt_state.structure:
            raise ValueError(
                "`optimizer.update` must return a state of the structure that it was given, but "
                "returned another one."
            )
        if average:
            params = optax.apply_updates(params, updates)
            averaged = join(average, of_average).after(params, jnp.ones((), bool))
            average, _ = split(averaged)
        return jax.tree.leaves(updates), new_opt_state, average

    gradients = list(compress(model, is_trained))
    operands = tuple(map(abstract_arrays, (gradients, opt_state, model, average)))

    def trace() -> _TracedUpdate:
        specs = stored_specs(plan.shardings, state)
        specs.were_asked_for = False  # by another trace, for equal arrays
        with stored_as(specs):
            jaxpr = jax.make_jaxpr(update)(*operands)
        return _TracedUpdate(jaxpr, specs.were_asked_for or is_over_a_mesh(jaxpr))

    return shared_trace(plan.mesh, operands, (), lambda: trace_for(plan.mesh, trace))


def _specs_of_update(
    plan: Plan, state: TrainState, is_trained: Sequence[bool]
) -> tuple[list[P], list[P | None]]:
    """How the operands and the results of an update are stored; `None` for results that the plan
    counts already."""
    model = _specs(plan.shardings.model)
    gradients = list(compress(model, is_trained))
    opt_state = _specs(plan.shardings.opt_state)
    average = _specs(plan.shardings.average)
    in_parts = _updated_in_parts(plan, state)
    updates: list[P | None] = []
    # An average has the arrays of the trained leaves, in their order, and then a count of steps.
    new_average: list[P | None] = [None] * len(average)
    leaves = compress(flat_leaves(state.model), is_trained)
    for place, (leaf, spec) in enumerate(zip(leaves, gradients, strict=True)):
        if leaf.name not in in_parts:
            updates.append(spec)
            continue
        # The plan has the gathers of what each device updates a part of.
        updates.append(None)
        # The average of a parameter is gathered beside the parameter.
        if average:
            new_average[place] = average[place]
    operands = [*gradients, *opt_state, *model, *average]
    return operands, [*updates, *opt_state, *new_average]


def _updated_in_parts(plan: Plan, state: TrainState) -> set[str]:
    """The names of parameters whose moments are stored in other parts than they are."""
    specs = {array.path: array.spec for array in plan.report.arrays}
    names: set[str] = set()
    for path, parameter in elementwise_states(state).items():
        if specs["/".join(path)] != specs[parameter.name]:
            names.add(parameter.name)
    return names


def _zero(params: PyTree) -> Array:
    """In place of a loss, whose communication is not the optimizer's."""
    return jnp.zeros(())


def _specs(shardings: PyTree) -> list[P]:
    return [sharding.spec for sharding in jax.tree.leaves(shardings)]
