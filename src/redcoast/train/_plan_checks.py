"""Warnings about a planned step whose loss is probably not what is meant, and a comparison of the
step with that of one device."""

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from ..core._dtypes import tree_to_jax_dtypes
from ..core._frames import warn
from ..core._pytree import abstract_data
from ..core._tracing import abstract_key
from ..distributed._mesh import batch_shards
from ..sharding import Plan, coupling_sentence
from ._coupled import (
    find_coupled,
    find_faults,
    warn_of_promotions,
    warn_of_shared_masks,
    warn_of_sums,
)
from ._layer_state import warn_of_outer_state
from ._loss import ExaminedLoss
from ._muon import warn_of_wrong_matrices
from ._plan_step import loss_to_plan
from ._state import TrainState
from ._training import Training


def check_step(plan: Plan, training: Training, state: TrainState, batch: PyTree) -> None:
    """Warns of what is probably a fault of the loss of `fit`.

    - Examples that depend on each other are computed in several microbatches.
    - The loss is a sum over the examples; with microbatches, another metric is.
    - All examples share a dropout mask.
    - NumPy's rank promotion combines each example with every other.
    - The loss reads the state of layers from outside.
    - `optax.contrib.muon` treats other arrays as matrices than the loss does.
    """
    _check_coupling(plan, training, state, batch)
    has_microbatches = training.accumulate > 1
    program = plan.report.program_or_none
    # The plan has looked at the same program already.
    if program is not None and not has_microbatches:
        summed, masks, promotions = program.summed, program.shared_masks, program.promotions
    else:
        loss = _examined_loss(plan, training, state, batch)
        summed, masks, promotions = find_faults(loss, training=True)
    warn_of_outer_state(training.loss_fn, state.model)
    args = (abstract_data(batch), abstract_key())
    loss_fn = loss_to_plan(training.traced_loss, training.compute_dtype)
    warn_of_wrong_matrices(state.opt_state, state.model, loss_fn, args, plan.mesh)
    warn_of_sums(summed, aux=has_microbatches)
    warn_of_shared_masks(masks)
    warn_of_promotions(promotions)


def check_own_step(plan: Plan, training: Training, state: TrainState, batch: PyTree) -> None:
    """The warnings of `check_step` that also hold for the step of a loop of the user's own."""
    warn_of_outer_state(training.loss_fn, state.model)
    batch = abstract_data(tree_to_jax_dtypes(batch, "the batch", of="batch"))
    _check_coupling(plan, training, state, batch)
    program = plan.report.program_or_none
    if program is not None:
        promotions = program.promotions
    else:
        loss = _examined_loss(plan, training, state, batch)
        _, _, promotions = find_faults(loss, training=True)
    warn_of_promotions(promotions)


def _check_coupling(plan: Plan, training: Training, state: TrainState, batch: PyTree) -> None:
    accumulate = training.accumulate
    if accumulate <= 1:
        return
    batch_size = jax.tree.leaves(batch)[0].shape[0]
    rows = batch_size // accumulate
    program = plan.report.program_or_none
    # The plan was made for one microbatch, and a single example depends on no other.
    if program is not None and program.coupled is None and rows > 1:
        return
    coupled = find_coupled(_examined_loss(plan, training, state, batch), training=True)
    if coupled is not None:
        warn(
            f"{coupling_sentence(coupled)} With `accumulate={accumulate}` the loss of the "
            f"{batch_size} examples of a batch is the mean over microbatches of {rows}, which is "
            "a different loss. Leave out `accumulate` to train on the loss of the full batch."
        )


def _examined_loss(
    plan: Plan, training: Training, state: TrainState, batch: PyTree
) -> ExaminedLoss:
    return ExaminedLoss(training.traced_loss, state.model, batch, plan.mesh, training.compute_dtype)


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
    if dtype is not None and jnp.finfo(dtype).bits < 32:
        tolerance = 0.05
    loss = loss_to_plan(training.loss_fn, dtype)
    plan.verify(loss, state.model, batch, state.key, tolerance=tolerance)
