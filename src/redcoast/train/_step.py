"""One step of the optimizer, and several in a scan, as pure functions."""

import functools as ft
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax.experimental.xla_metadata import set_xla_metadata
from jaxtyping import Array, Float, PyTree

from ..core._donation import refuse_deleted
from ..core._errors import check_functions, check_integer, check_kind, check_optimizer, noting
from ..core._frames import hide_frames
from ..core._pytree import map_where
from ..core._stored_specs import divided_as_stored
from ..core._target import target
from ..core._trainable import partition_trainable
from ._host_memory import update_on_device, where_they_were
from ._labels import accept_module_labels
from ._loss import LossFn
from ._microbatches import loss_and_grads, loss_of_params
from ._optimizer import call_update, refuse_per_example
from ._precision import as_compute_dtype, widen
from ._skip_nonfinite import guarded_update
from ._state import TrainState, with_loss_scale


@hide_frames
def train_step(
    state: TrainState,
    batch: PyTree,
    *,
    loss_fn: LossFn,
    optimizer: optax.GradientTransformation,
    accumulate: int = 1,
    compute_dtype: Any = None,
    trainable: PyTree = eqx.is_inexact_array,
) -> tuple[TrainState, dict[str, Array]]:
    """Takes one optimizer step; a pure function that can be jitted, vmapped and scanned.

    If the loss or the gradient is NaN or infinite, the step is skipped: the model and the optimizer
    state do not change. If the state has a `loss_scale`, the loss is scaled by it, and if it has an
    `average`, the new weights are averaged.

    **Arguments:**

    - `state`: a [`redcoast.TrainState`][].
    - `batch`: PyTree of arrays, batch dimension first.
    - `loss_fn`: `loss_fn(model, batch, key)` returns the mean loss, a scalar; or `(loss, aux)`,
        where `aux` is a dict of scalar metrics (in custom loops, also of other arrays, such as the
        error of each example); or `(loss, aux, model)`, where `model` has updated non-trainable
        leaves such as running averages. `aux["weight"]` is the number of items that the loss
        averages over, such as tokens; by default, the number of examples.
    - `optimizer`: the optax optimizer that `state` was created with. Optimizers that use the loss
        (`optax.lbfgs`, `optax.polyak_sgd`, ...) receive `value`, `grad` and `value_fn` if they
        accept them; those that need `obj_fn` or `grad_fn` (`optax.contrib.sophia`) get it.
    - `accumulate`: the number of microbatches, which are processed one after the other to save
        activation memory. Loss, metrics and gradient are means over the microbatches, weighted by
        `"weight"`. They have the same values as for the full batch, unless the loss makes examples
        depend on each other.
    - `compute_dtype`: the dtype in which the loss and its gradient are computed, such as
        `jnp.bfloat16` or `"bf16"`. Parameters and optimizer state keep their dtype. All floating
        arrays of the model and the batch are cast; use integers or booleans for exact counts and
        masks. With `jnp.float16`, a state without a `loss_scale` gets one. Create the state with
        the same `compute_dtype`, so that its structure does not change.
    - `trainable`: the leaves that the optimizer trains: a function of the model that returns a part
        of it, or a tuple of parts (`lambda m: m.layers[-1]`); a function of a leaf, or of its path
        and the leaf, that returns a boolean; a regular expression or a list of them, searched in
        the paths of the leaves, as in `overrides`; or a PyTree of booleans that may be a prefix of
        the model, as for `eqx.partition`. Frozen leaves have no gradient and no optimizer state.
        Arrays in an `eqx.nn.State`, and Flax NNX variables other than `nnx.Param`, are never
        trained. The loss must return them to update them; a warning is given if it does not.

    **Returns:**

    The new state, and the metrics: `loss`, `grad_norm` (the Euclidean norm of the gradient over all
    leaves), `skipped` (1.0 if the step was skipped), `learning_rate` if the optimizer state has it
    (`optax.inject_hyperparams`), `loss_scale` (the scale used in this step) and `skipped_total`
    (the number of steps skipped so far) if the state has a `loss_scale`, and the entries of `aux`.

    **Raises:**

    `ValueError` or `TypeError`, during tracing, if `loss_fn` returns anything else; if `accumulate`
    does not divide the batch size, or the first dimensions of the batch differ; if `compute_dtype`
    is not floating; or if the optimizer does not match the state, or needs the gradient of each
    example.

    !!! Example

        ```python
        step = eqx.filter_jit(ft.partial(rc.train_step, loss_fn=loss_fn, optimizer=optimizer))
        state, metrics = step(state, batch)
        ```
    """
    check_kind("state", state, TrainState, "a `TrainState`, as `redcoast.init_state` returns")
    refuse_deleted(
        state,
        "The state that `train_step` was called with",
        "Call it with the state that the last step returned.",
    )
    check_functions(loss_fn=loss_fn)
    check_optimizer(optimizer)
    accept_module_labels(optimizer)
    accumulate = check_integer("accumulate", accumulate)
    compute_dtype = as_compute_dtype(compute_dtype)
    refuse_per_example(state.opt_state)
    scale = with_loss_scale(state, compute_dtype).loss_scale
    part = ft.partial(partition_trainable, trainable=trainable)
    loss_of = ft.partial(loss_of_params, loss_fn=loss_fn, compute_dtype=compute_dtype, part=part)
    params, rest = part(state.model)
    # The key of a step follows from its number, so that a resumed run draws the same numbers.
    key = jax.random.fold_in(state.key, state.step)

    def scaled_loss(*args: PyTree) -> tuple[Array, PyTree]:
        loss, others = loss_of(*args)
        if scale is not None:
            loss = scale.scale(loss)
        return loss, others

    (loss, aux, rest_after), grads = loss_and_grads(
        scaled_loss, params, rest, batch, key, accumulate
    )
    if scale is not None:
        # Before the norm, which is of the true gradient.
        loss, grads = scale.unscale((loss, grads))
    # For complex leaves, the descent direction is the negative conjugate of JAX's gradient.
    grads = map_where(jnp.iscomplexobj, jnp.conj, grads)
    # XLA reduce-scatters a gradient only if all that reads it, as the norm does, reads parts.
    grads = divided_as_stored(grads)
    grad_norm = global_norm(grads)
    # The norm is finite only if all gradients are.
    finite = jnp.isfinite(loss) & jnp.isfinite(grad_norm)

    def update(grads: PyTree, opt_state: PyTree) -> tuple[PyTree, PyTree]:
        # For optimizers with a line search; the others leave these arguments out.
        value_fn = lambda p: loss_of(p, rest, batch, key)[0]
        grad_fn = lambda p, i: map_where(jnp.iscomplexobj, jnp.conj, jax.grad(value_fn)(p))
        extras = {"value": loss, "grad": grads, "value_fn": value_fn}
        # The same under the names of `optax.contrib.sophia` and `sam(opaque_mode=True)`.
        on_demand = {"obj_fn": value_fn, "grad_fn": grad_fn}
        return call_update(optimizer, grads, opt_state, params, on_demand=on_demand, **extras)

    def update_params(opt_state: PyTree) -> tuple[PyTree, PyTree]:
        updates, opt_state = guarded_update(update, grads, opt_state, finite)
        return optax.apply_updates(params, updates), opt_state

    # Parts of optax promote dtypes, which the user's settings may forbid.
    with jax.numpy_dtype_promotion("standard"):
        params_after, opt_state = update_on_device(update_params, state.opt_state)
    # A step that is skipped leaves the running averages as they were, too.
    model = _select(finite, eqx.combine(params_after, rest_after), state.model)
    metrics = {
        **aux,
        "loss": loss,
        "grad_norm": grad_norm,
        "skipped": 1.0 - finite.astype(jnp.float32),
        **_learning_rate(opt_state),
    }
    if scale is not None:
        metrics["loss_scale"] = scale.value
        scale = scale.adjust(finite)
        metrics["skipped_total"] = scale.skipped.astype(jnp.float32)
    average = state.average
    if average is not None:
        average = average.after(params_after, finite)
    opt_state = where_they_were(opt_state, state.opt_state)
    # A skipped step counts: its batch is read, and the next one has other random numbers.
    return TrainState(model, opt_state, state.step + 1, state.key, scale, average), metrics


@hide_frames
def train_steps(
    state: TrainState, batches: PyTree, **options: Any
) -> tuple[TrainState, dict[str, Array]]:
    """Takes one training step on each of several batches, in a `jax.lax.scan`.

    Use it for the local steps of a federated client, the inner steps of meta-learning, or the
    epochs of minibatches in PPO. It is pure, and can be jitted, vmapped and passed to
    [`redcoast.compile_step`][].

    **Arguments:**

    - `state`: a [`redcoast.TrainState`][].
    - `batches`: PyTree of arrays of shape `(steps, batch, ...)`.
    - `options`: keyword arguments of [`redcoast.train_step`][], such as `loss_fn` and `optimizer`.

    **Returns:**

    The state after the last step, and the metrics of all steps, each of shape `(steps,)`.

    **Raises:**

    `ValueError` if the arrays have different leading dimensions, and the errors of
    [`redcoast.train_step`][].

    !!! Example

        ```python
        parts = jax.tree.map(lambda x: x.reshape(4, -1, *x.shape[1:]), batch)
        state, metrics = rc.train_steps(state, parts, loss_fn=loss_fn, optimizer=optimizer)
        ```
    """
    check_kind("state", state, TrainState, "a `TrainState`, as `redcoast.init_state` returns")
    sizes = {jnp.shape(x)[:1] for x in jax.tree.leaves(batches)}
    if len(sizes) != 1 or () in sizes:
        raise ValueError(
            f"The arrays of `batches` have the leading dimensions {sorted(sizes)}, but they must "
            "all have the same one, the number of steps."
        )
    # Before the scan, which carries a tree of one structure.
    state = with_loss_scale(state, options.get("compute_dtype"))
    carried, static = eqx.partition(state, eqx.is_array)

    def body(carried: PyTree, batch: PyTree) -> tuple[PyTree, dict[str, Array]]:
        after, metrics = train_step(eqx.combine(carried, static), batch, **options)
        return eqx.filter(after, eqx.is_array), metrics

    (steps,) = next(iter(sizes))
    note = (
        f"`train_steps` takes one step on each of {steps} batches, which are stacked along the "
        "first dimension. For one batch, call `train_step`."
    )
    with noting(note):
        carried, metrics = jax.lax.scan(body, carried, batches)
    return eqx.combine(carried, static), metrics


def global_norm(tree: PyTree) -> Float[Array, ""]:
    """Computes the Euclidean norm over all arrays of a tree, in float32 or wider."""
    if target().platform != "cpu":
        return _norm(tree)
    # XLA for CPUs would compute arrays twice, with their squares and for the update: it fuses both
    # with the stacks and transposes of gradients. It does not fuse them with a call.
    with set_xla_metadata(inlineable="false"):
        return jax.jit(_norm)(tree)


def _norm(tree: PyTree) -> Float[Array, ""]:
    total = 0
    for x in jax.tree.leaves(tree):
        # Raveling a sharded leaf would gather it.
        total += jnp.sum(jnp.square(jnp.abs(widen(x))))
    return jnp.sqrt(total)


def _select(use_new: Array, new: PyTree, old: PyTree) -> PyTree:
    def select_leaf(new: PyTree, old: PyTree) -> PyTree:
        if eqx.is_array(old):
            return jnp.where(use_new, new, old)
        return old

    return jax.tree.map(select_leaf, new, old)


def _learning_rate(opt_state: PyTree) -> dict[str, Array]:
    rates: list[Array] = []
    # `optax.inject_hyperparams` has them in its state.
    for _, hyperparams in optax.tree.get_all_with_path(opt_state, "hyperparams"):
        if "learning_rate" in hyperparams:
            rates.append(hyperparams["learning_rate"])
    # With several optimizers, there are several rates.
    if len(rates) == 1:
        return {"learning_rate": rates[0]}
    return {}
