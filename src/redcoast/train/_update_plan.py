"""Adds the communication of an optimizer's update to a plan."""

from dataclasses import dataclass, replace
from itertools import compress

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, PyTree

from ..core._axis_types import on_auto_axes
from ..core._control_flow import AnyJaxpr
from ..core._pytree import Arrays, abstract_array, join, split
from ..core._stored_specs import stored_as, stored_specs
from ..core._tracing import trace_for
from ..core._trainable import partition_trainable, trainable_arrays
from ..sharding import Plan
from ._labels import accept_module_labels
from ._optimizer import call_update
from ._step import TrainState


def with_update_traffic(
    plan: Plan, optimizer: optax.GradientTransformation, state: TrainState, trainable: PyTree
) -> Plan:
    """A plan of a state whose report has what the optimizer's update sends, too.

    Evaluations of the loss by the optimizer itself, as in a line search, are not counted.
    """
    # Imported where a step is planned, so that importing redcoast stays cheap.
    from ..sharding.program._shared_programs import is_over_a_mesh, shared_trace
    from ..sharding.report._update_traffic import update_traffic

    program = plan.report.program_or_none
    if program is None or plan.mesh.size == 1:
        return plan
    accept_module_labels(optimizer)
    state = on_auto_axes(state)
    model, of_model = split(state.model)
    opt_state, of_opt_state = split(state.opt_state)
    is_trained = trainable_arrays(state.model, trainable)
    trained = list(compress(model, is_trained))

    def update(grads: Arrays, opt_state: Arrays, model: Arrays) -> tuple[Arrays, Arrays]:
        params, _ = partition_trainable(join(model, of_model), trainable)
        of_params = jax.tree.structure(params)
        gradients = of_params.unflatten(grads)
        extras = {"value": _zero(params), "grad": gradients, "value_fn": _zero}
        with jax.numpy_dtype_promotion("standard"):
            updates, after = call_update(
                optimizer, gradients, join(opt_state, of_opt_state), params, **extras
            )
        return jax.tree.leaves(updates), split(after)[0]

    arrays = tuple(map(_abstract, (trained, opt_state, model)))

    def trace() -> _TracedUpdate:
        specs = stored_specs(plan.shardings, state)
        with stored_as(specs):
            jaxpr = jax.make_jaxpr(update)(*arrays)
        return _TracedUpdate(jaxpr, specs.were_asked_for or is_over_a_mesh(jaxpr))

    try:
        traced = shared_trace(plan.mesh, arrays, (), lambda: trace_for(plan.mesh, trace))
    except Exception:
        return plan  # The step raises the same error, with an explanation.
    specs_of_model = _specs(plan.shardings.model)
    of_trained = list(compress(specs_of_model, is_trained))
    of_state = _specs(plan.shardings.opt_state)
    sizes = dict(plan.mesh.shape)
    lines = update_traffic(
        traced.jaxpr,
        [*of_trained, *of_state, *specs_of_model],
        [*of_trained, *of_state],
        sizes,
        beside=sum(line.bytes for line in program.traffic),
    )
    if not lines:
        return plan
    ordered = sorted((*program.traffic, *lines), key=lambda line: -line.bytes)
    report = replace(plan.report, program_or_none=replace(program, traffic=tuple(ordered)))
    return replace(plan, report=report)


@dataclass(frozen=True)
class _TracedUpdate:
    """The program of an update, and whether it depends on the mesh that it was traced for."""

    jaxpr: AnyJaxpr
    over_a_mesh: bool


def _zero(params: PyTree) -> Array:
    """In place of a loss, whose communication is not the optimizer's."""
    return jnp.zeros(())


def _abstract(arrays: Arrays) -> list[jax.ShapeDtypeStruct]:
    return [abstract_array(x) for x in arrays]


def _specs(shardings: PyTree) -> list[P]:
    return [sharding.spec for sharding in jax.tree.leaves(shardings)]
