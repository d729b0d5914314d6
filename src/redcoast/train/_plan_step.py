"""Plans a training step, and checks the plan."""

import functools as ft
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, PRNGKeyArray, PyTree

from ..core._axis_types import on_auto_axes
from ..core._control_flow import AnyJaxpr
from ..core._dtypes import tree_to_jax_dtypes
from ..core._errors import check_functions, check_integer, check_optimizer
from ..core._frames import hide_frames, warn
from ..core._pytree import Arrays, abstract_array, join, split
from ..core._stored_specs import stored_as, stored_specs
from ..core._tracing import abstract_key, trace_for
from ..core._trainable import partition_trainable, trainable_arrays
from ..distributed._mesh import ambient_or_default, batch_shards
from ..sharding import Hardware, Plan, coupling_sentence, plan_shardings
from ..sharding._plan_arguments import check_memory, memory_limit
from ..sharding.solver._hardware import hardware_of
from ..sharding.tree._leaf_plans import elementwise_states
from ..sharding.tree._leaves import flat_leaves
from ._coupled import (
    find_coupled,
    find_faults,
    warn_of_promotions,
    warn_of_shared_masks,
    warn_of_sums,
)
from ._labels import accept_module_labels
from ._layer_state import warn_of_outer_state
from ._loss import LossFn, TracedLoss, evaluate_loss
from ._muon import warn_of_wrong_matrices
from ._optimizer import call_update
from ._precision import ComputeDtype, as_compute_dtype
from ._step import TrainState, refuse_other_rows
from ._training import Training


@hide_frames
def plan_step(
    state: TrainState,
    loss_fn: LossFn,
    batch: PyTree,
    mesh: Mesh | None = None,
    *,
    accumulate: int = 1,
    compute_dtype: Any = None,
    trainable: PyTree = eqx.is_inexact_array,
    overrides: Sequence[tuple[str, PyTree]] = (),
    hardware: Hardware | None = None,
    sequence: bool = False,
    microbatches: int | None = None,
    memory: int | float | Literal["auto"] | None = None,
    optimizer: optax.GradientTransformation | None = None,
) -> Plan:
    """Plans how a training step is sharded over a mesh, as `fit` plans its step.

    **Arguments:**

    - `state`: the state of the run, concrete or abstract.
    - `loss_fn`, `accumulate`, `compute_dtype`, `trainable`: as for [`redcoast.train_step`][].
    - `batch`: a global batch: a PyTree of arrays or `ShapeDtypeStruct`s, batch dimension first,
        such as the `spec` of [`redcoast.Batches`][].
    - `mesh`: from [`redcoast.make_mesh`][]; by default the ambient mesh, or all devices as `data`.
    - `overrides`: as for [`redcoast.infer_shardings`][].
    - `hardware`, `sequence`, `microbatches`: as for [`redcoast.plan_shardings`][]. With
        `accumulate`, each of the accumulated parts is divided into this many microbatches.
    - `memory`: as for [`redcoast.plan_shardings`][]: the bytes of each device that a step may take.
    - `optimizer`: the optimizer of the state. If it is given, the communication of its update is
        estimated too. It changes no sharding.

    **Returns:**

    A [`redcoast.Plan`][] of the state. Apply its `constrain` to `loss_fn`.

    **Raises:**

    `ValueError` or `TypeError`, as [`redcoast.plan_shardings`][] does.

    !!! Example

        ```python
        create = ft.partial(rc.init_state, init_fn, optimizer, key=key)
        plan = rc.plan_step(eqx.filter_eval_shape(create), loss_fn, batch, mesh)
        state = create(shardings=plan.shardings)
        ```
    """
    check_functions(loss_fn=loss_fn)
    if optimizer is not None:
        check_optimizer(optimizer)
    accumulate = check_integer("accumulate", accumulate)
    compute_dtype = as_compute_dtype(compute_dtype)
    batch = tree_to_jax_dtypes(batch, "the batch", of="batch")
    if accumulate > 1:
        refuse_other_rows(batch, accumulate)
    mesh = ambient_or_default(mesh)
    check_memory(memory)
    is_limited = memory_limit(memory, hardware or hardware_of(mesh)) is not None
    if mesh.size == 1 and not is_limited:
        return plan_shardings(state, mesh, overrides=overrides)

    def microbatch(x: PyTree) -> jax.ShapeDtypeStruct:
        x = abstract_array(x)
        # The step itself refuses a batch that it cannot split.
        if accumulate == 1 or x.shape[0] % accumulate:
            return x
        return jax.ShapeDtypeStruct((x.shape[0] // accumulate, *x.shape[1:]), x.dtype)

    plan = plan_shardings(
        state,
        mesh,
        fn=_loss(loss_fn, compute_dtype),
        # One microbatch is in memory at a time.
        args=(jax.tree.map(microbatch, batch), abstract_key()),
        trainable=trainable,
        overrides=overrides,
        hardware=hardware,
        sequence=sequence,
        microbatches=microbatches,
        memory=memory,
        accumulate=accumulate,
    )
    if optimizer is None:
        return plan
    return with_update_traffic(plan, optimizer, state, trainable)


def plan_training(
    training: Training, state: TrainState, batch: PyTree, mesh: Mesh, **options: Any
) -> Plan:
    """`plan_step` for the record of a training; `options` are its other arguments."""
    return plan_step(
        state,
        training.traced_loss,
        batch,
        mesh,
        accumulate=training.accumulate,
        compute_dtype=training.compute_dtype,
        trainable=training.trainable,
        optimizer=training.optimizer,
        **options,
    )


def check_coupling(plan: Plan, training: Training, state: TrainState, batch: PyTree) -> None:
    """Warns if examples that depend on each other are computed in several microbatches."""
    accumulate = training.accumulate
    if accumulate <= 1:
        return
    batch_size = jax.tree.leaves(batch)[0].shape[0]
    # The plan was made for one microbatch, and a single example depends on no other.
    rows = batch_size // accumulate
    program = plan.report.program_or_none
    if program is not None and program.coupled is None and rows > 1:
        return
    loss = TracedLoss(training.traced_loss, state.model, batch, plan.mesh, training.compute_dtype)
    coupled = find_coupled(loss, training=True)
    if coupled is not None:
        warn(
            f"{coupling_sentence(coupled)} With `accumulate={accumulate}` the loss of the "
            f"{batch_size} examples of a batch is the mean over microbatches of "
            f"{batch_size // accumulate}, which is a different loss. Leave out `accumulate` to "
            "train on the loss of the full batch."
        )


def check_faults(plan: Plan, training: Training, state: TrainState, batch: PyTree) -> None:
    """Warns if the loss is a sum over the examples, if the examples share dropout masks, if NumPy's
    rank promotion combines each example with every other, or if the loss reads the state of layers
    from outside.

    With microbatches, it also warns of other metrics that are sums.
    """
    loss_fn, compute_dtype = training.loss_fn, training.compute_dtype
    has_microbatches = training.accumulate > 1
    program = plan.report.program_or_none
    # The plan has looked at the same program already.
    if program is not None and not has_microbatches:
        summed, masks, promotions = program.summed, program.shared_masks, program.promotions
    else:
        traced = TracedLoss(training.traced_loss, state.model, batch, plan.mesh, compute_dtype)
        summed, masks, promotions = find_faults(traced, training=True)
    warn_of_outer_state(loss_fn, state.model)
    args = (jax.tree.map(abstract_array, batch), abstract_key())
    loss = _loss(training.traced_loss, compute_dtype)
    warn_of_wrong_matrices(state.opt_state, state.model, loss, args, plan.mesh)
    warn_of_sums(summed, aux=has_microbatches)
    warn_of_shared_masks(masks)
    warn_of_promotions(promotions)


def check_own_step(plan: Plan, training: Training, state: TrainState, batch: PyTree) -> None:
    """Warns if examples that depend on each other are computed in several microbatches, if NumPy's
    rank promotion combines each example with every other, or if the loss reads the state of layers
    from outside."""
    loss_fn, compute_dtype = training.loss_fn, training.compute_dtype
    warn_of_outer_state(loss_fn, state.model)
    batch = jax.tree.map(abstract_array, tree_to_jax_dtypes(batch, "the batch", of="batch"))
    check_coupling(plan, training, state, batch)
    program = plan.report.program_or_none
    if program is not None:
        warn_of_promotions(program.promotions)
        return
    loss = TracedLoss(training.traced_loss, state.model, batch, plan.mesh, compute_dtype)
    _, _, promotions = find_faults(loss, training=True)
    warn_of_promotions(promotions)


def verify_step(plan: Plan, training: Training, state: TrainState, batch: PyTree) -> None:
    """Compares the planned program with the program of one device on the first rows of a batch."""
    if jax.process_count() > 1:
        raise ValueError(
            "`plan='verify'` works only in a single process. Verify the mesh there, with as many "
            "emulated devices (`emulate_devices`), and leave out `plan` here."
        )
    # Few rows, of which each device has some: one device computes all of them once more.
    rows = batch_shards(plan.mesh) * plan.mesh.shape["model"]
    sizes = {x.shape[:1] for x in jax.tree.leaves(batch)}
    # Arrays without one row for each example may be indexed by other arrays.
    if len(sizes) == 1:
        batch = jax.tree.map(lambda x: x[:rows], batch)
    dtype = training.compute_dtype
    # What sums in another order may change, of the largest element of an array.
    tolerance = 1e-3
    if dtype is not None and jax.numpy.finfo(dtype).bits < 32:
        tolerance = 0.05
    loss = _loss(training.loss_fn, dtype)
    plan.verify(loss, state.model, batch, state.key, tolerance=tolerance)


def _loss(loss_fn: LossFn, compute_dtype: ComputeDtype) -> Callable[..., PyTree]:
    """The loss, and the new model if `loss_fn` returns one, because it is communicated too."""

    # Messages name the user's function.
    @ft.wraps(loss_fn, updated=())
    def measure(model: PyTree, batch: PyTree, key: PRNGKeyArray) -> PyTree:
        result = evaluate_loss(loss_fn, model, batch, key, compute_dtype)
        if result.model is model:
            return result.loss
        return result.loss, result.aux, result.model

    return measure


def with_update_traffic(
    plan: Plan, optimizer: optax.GradientTransformation, state: TrainState, trainable: PyTree
) -> Plan:
    """A plan of a state whose report has what an update of the parameters sends, too, and of their
    average.

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
    average, of_average = split(state.average)
    is_trained = trainable_arrays(state.model, trainable)
    trained = list(compress(model, is_trained))

    def update(
        grads: Arrays, opt_state: Arrays, model: Arrays, average: Arrays
    ) -> tuple[Arrays, ...]:
        params, _ = partition_trainable(join(model, of_model), trainable)
        of_params = jax.tree.structure(params)
        gradients = of_params.unflatten(grads)
        extras = {"value": _zero(params), "grad": gradients, "value_fn": _zero}
        with jax.numpy_dtype_promotion("standard"):
            updates, after = call_update(
                optimizer, gradients, join(opt_state, of_opt_state), params, **extras
            )
        arrays, of_after = split(after)
        if of_after.structure != of_opt_state.structure:
            raise ValueError("An update returns a state of another structure.")
        if average:
            params = optax.apply_updates(params, updates)
            averaged = join(average, of_average).after(params, jnp.ones((), bool))
            average, _ = split(averaged)
        return jax.tree.leaves(updates), arrays, average

    arrays = tuple(map(_abstract, (trained, opt_state, model, average)))

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
    # The plan has the gathers of what each device updates a part of.
    specs = {array.path: array.spec for array in plan.report.arrays}
    in_parts: set[str] = set()
    for path, parameter in elementwise_states(state).items():
        if specs["/".join(path)] != specs[parameter.name]:
            in_parts.add(parameter.name)
    averages_before = _specs(plan.shardings.average)
    updated: list[P | None] = []
    # An average has the arrays of the trained leaves, in their order, and then a count of steps.
    averages_after: list[P | None] = [None] * len(averages_before)
    trained_leaves = compress(flat_leaves(state.model), is_trained)
    for place, (leaf, spec) in enumerate(zip(trained_leaves, of_trained, strict=True)):
        if leaf.name not in in_parts:
            updated.append(spec)
            continue
        updated.append(None)
        # The average of a parameter is gathered beside the parameter.
        if averages_before:
            averages_after[place] = averages_before[place]
    sizes = dict(plan.mesh.shape)
    lines = update_traffic(
        traced.jaxpr,
        [*of_trained, *of_state, *specs_of_model, *averages_before],
        [*updated, *of_state, *averages_after],
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
