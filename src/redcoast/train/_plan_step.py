"""Plans a training step."""

import functools as ft
from collections.abc import Callable, Sequence
from typing import Any, Literal

import equinox as eqx
import jax
import optax
from jax.sharding import Mesh
from jaxtyping import PRNGKeyArray, PyTree

from ..core._dtypes import tree_to_jax_dtypes
from ..core._errors import check_functions, check_integer, check_kind, check_optimizer, several
from ..core._frames import hide_frames
from ..core._pytree import ARRAYS, abstract_data
from ..core._tracing import abstract_key
from ..distributed._mesh import ambient_or_default
from ..sharding import Hardware, Plan, plan_shardings
from ..sharding._plan_arguments import check_memory, memory_limit
from ..sharding.solver._hardware import hardware_of
from ._loss import LossFn, evaluate_loss
from ._microbatches import refuse_other_rows
from ._plan_update import with_update_traffic
from ._precision import ComputeDtype, as_compute_dtype
from ._state import TrainState
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
        check_kind("state", state, TrainState, "a `TrainState`, as `redcoast.init_state` returns")
    accumulate = check_integer("accumulate", accumulate)
    compute_dtype = as_compute_dtype(compute_dtype)
    batch = tree_to_jax_dtypes(batch, "the batch", of="batch")
    if accumulate > 1:
        refuse_other_rows(batch, accumulate)
    _refuse_no_rows(batch)
    mesh = ambient_or_default(mesh)
    check_memory(memory)
    is_limited = memory_limit(memory, hardware or hardware_of(mesh)) is not None
    if mesh.size == 1 and not is_limited:
        return plan_shardings(state, mesh, overrides=overrides)

    def microbatch(x: PyTree) -> PyTree:
        # The step itself refuses a batch that it cannot split.
        if accumulate == 1 or x.shape[0] % accumulate:
            return x
        return jax.ShapeDtypeStruct((x.shape[0] // accumulate, *x.shape[1:]), x.dtype)

    plan = plan_shardings(
        state,
        mesh,
        fn=loss_to_plan(loss_fn, compute_dtype),
        # One microbatch is in memory at a time.
        args=(jax.tree.map(microbatch, abstract_data(batch)), abstract_key()),
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


def _refuse_no_rows(batch: PyTree) -> None:
    """Raises an error for a batch without examples, of which nothing is computed."""
    shapes = [x.shape for x in jax.tree.leaves(batch) if isinstance(x, ARRAYS)]
    if {shape[0] for shape in shapes if shape} == {0}:
        raise ValueError(
            f"The batch has no rows: its arrays have the shapes {several(list(map(str, shapes)))}. "
            "Plan with a batch of the size that the step is called with."
        )


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


def loss_to_plan(loss_fn: LossFn, compute_dtype: ComputeDtype) -> Callable[..., PyTree]:
    """The loss, and the new model if `loss_fn` returns one, because it is communicated too."""

    # Messages name the user's function.
    @ft.wraps(loss_fn, updated=())
    def measure(model: PyTree, batch: PyTree, key: PRNGKeyArray) -> PyTree:
        result = evaluate_loss(loss_fn, model, batch, key, compute_dtype)
        if result.model is model:
            return result.loss
        return result.loss, result.aux, result.model

    return measure
