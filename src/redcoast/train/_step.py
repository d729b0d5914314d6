import functools as ft
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jaxtyping import Array, Float, Int, PRNGKeyArray, PyTree

from ..core._errors import check_functions, check_integer, check_key, check_kind, check_optimizer
from ..core._pytree import join, partition_trainable, split
from ._loss import LossFn, evaluate_loss
from ._optimizer import call_update, refuse_optimizer_states, refuse_per_example
from ._precision import check_compute_dtype, widen
from ._skip_nonfinite import guarded_update


class TrainState(eqx.Module):
    """All that a training step changes, and the key of the run.

    - `model`: any PyTree.
    - `opt_state`: the optimizer's state for the trainable leaves of `model`.
    - `step`: how many steps were taken, skipped ones included.
    - `key`: the key of the run, the same at all steps: step n draws from `fold_in(key, n)`.
    """

    model: PyTree
    opt_state: PyTree
    step: Int[Array, "..."]
    key: PRNGKeyArray


def init_state(
    init_fn: Callable[[PRNGKeyArray], PyTree],
    optimizer: optax.GradientTransformation,
    *,
    key: PRNGKeyArray,
    shardings: PyTree[NamedSharding | None] | None = None,
    trainable: PyTree = eqx.is_inexact_array,
) -> TrainState:
    """Creates the state of a training run, split over devices from the first moment.

    The function is pure. With `eqx.filter_eval_shape` it makes the abstract state, which can
    be planned without memory; with the plan's `shardings`, each device then computes its own
    part, and no array exists whole on one device unless the plan says so.

    **Arguments:**

    - `init_fn`: `init_fn(key) -> model`.
    - `optimizer`: an optax optimizer.
    - `key`: a JAX key; one half initialises the model, the other is kept for training.
    - `shardings`: what [`redcoast.infer_shardings`][] returns for the abstract state.
    - `trainable`: which leaves the optimizer trains, as in [`redcoast.train_step`][].

    **Returns:**

    A [`redcoast.TrainState`][] at step 0.

    **Raises:**

    `ValueError` if `trainable` selects no leaf, or if the optimizer takes the gradient of each
    example. `TypeError` if the model holds an optimizer's state that would be trained.

    !!! Example

        ```python
        abstract = eqx.filter_eval_shape(rc.init_state, init_fn, optimizer, key=key)
        shardings = rc.infer_shardings(abstract, mesh)
        state = rc.init_state(init_fn, optimizer, key=key, shardings=shardings)
        ```
    """

    def create(key: PRNGKeyArray) -> TrainState:
        model_key, key = jax.random.split(key)
        return state_of(init_fn(model_key), optimizer, key=key, trainable=trainable)

    check_functions(init_fn=init_fn)
    check_optimizer(optimizer)
    check_key(key)
    if shardings is None:
        return create(key)
    return create_split(create, key, shardings=shardings)


def state_of(
    model: PyTree, optimizer: optax.GradientTransformation, *, key: PRNGKeyArray, trainable: PyTree
) -> TrainState:
    """The state at step 0 of a model that exists."""
    params, _ = partition_trainable(model, trainable)
    if not jax.tree.leaves(params):
        raise ValueError(
            "The model has no trainable leaf: none is a floating array that `trainable` selects."
        )
    refuse_optimizer_states(params, TrainState)
    with jax.numpy_dtype_promotion("standard"):
        state = TrainState(model, optimizer.init(params), jnp.zeros((), jnp.int32), key)
    refuse_per_example(state.opt_state)
    return jax.tree.map(_strongly_typed, state)


def create_split(
    create: Callable[..., TrainState], *args: PyTree, shardings: PyTree[NamedSharding | None]
) -> TrainState:
    """`create(*args)`, computed by each device for its own part."""
    _, static = split(eqx.filter_eval_shape(create, *args))
    arrays, constants = eqx.partition(args, eqx.is_array)
    flat_create = jax.jit(
        lambda a: split(create(*eqx.combine(a, constants)))[0],
        out_shardings=jax.tree.leaves(shardings),
    )
    return join(flat_create(arrays), static)


def _strongly_typed(x: Any) -> Any:
    # Weakly typed arrays become strongly typed by a step, which would then compile twice.
    return jax.lax.convert_element_type(x, x.dtype) if getattr(x, "weak_type", False) else x


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
    """Takes one optimizer step; pure, for `eqx.filter_jit`, `jax.jit`, `vmap` and `scan`.

    A step whose loss or gradient is not finite changes neither model nor optimizer.

    **Arguments:**

    - `state`: a [`redcoast.TrainState`][].
    - `batch`: PyTree of arrays, batch dimension first.
    - `loss_fn`: `loss_fn(model, batch, key)` returns the mean loss, a scalar; or
        `(loss, aux)` with `aux` a dict of scalar metrics, in which `"weight"` says over how much
        the mean is (tokens, say; otherwise the number of examples); or `(loss, aux, model)`, the
        model with its non-trainable leaves moved on (running averages).
    - `optimizer`: the optax optimizer that `state` was made with. Optimizers that take the loss
        (`optax.lbfgs`, `optax.polyak_sgd`, ...) are given what they take of `value`, `grad` and
        `value_fn`.
    - `accumulate`: into how many microbatches the batch is split, one after the other, to save
        activation memory. Loss, metrics and gradient are their means weighted by `"weight"`,
        which are the full batch's unless its examples depend on each other in the loss.
    - `compute_dtype`: what the loss and its gradient are computed in (`jnp.bfloat16`, say), while
        parameters and optimizer state keep their dtype. Floating arrays of the model and of the
        batch are cast; leave counts and masks integers or booleans to keep them exact.
    - `trainable`: which leaves the optimizer trains: a function of a leaf or a PyTree of booleans,
        as `eqx.partition` takes; one of them may stand for a part of the model. Frozen leaves cost
        no gradient and no optimizer state. Arrays in an `eqx.nn.State` are never trained.

    **Returns:**

    The new state, and the metrics: `loss`, `grad_norm` (the gradient's Euclidean norm over all
    leaves), `skipped` (1.0 if the step was skipped), `learning_rate` if the optimizer's state
    holds it (`optax.inject_hyperparams`), and all of `aux`.

    **Raises:**

    `ValueError` or `TypeError`, when traced, if `loss_fn` returns anything else, if the batch
    does not split into `accumulate` microbatches, if `compute_dtype` is `float16`, or if the
    optimizer is not that of the state or takes the gradient of each example.

    !!! Example

        ```python
        step = eqx.filter_jit(ft.partial(rc.train_step, loss_fn=loss_fn, optimizer=optimizer))
        state, metrics = step(state, batch)
        ```
    """
    check_compute_dtype(compute_dtype, training=True)
    check_kind("state", state, TrainState, "a `TrainState`, as `redcoast.init_state` gives")
    check_functions(loss_fn=loss_fn)
    check_optimizer(optimizer)
    check_integer("accumulate", accumulate)
    refuse_per_example(state.opt_state)
    part = ft.partial(partition_trainable, trainable=trainable)
    loss_of = ft.partial(loss_of_params, loss_fn=loss_fn, compute_dtype=compute_dtype, part=part)
    params, rest = part(state.model)
    key = jax.random.fold_in(state.key, state.step)
    (loss, aux, rest_after), grads = loss_and_grads(loss_of, params, rest, batch, key, accumulate)
    # Downhill is against the conjugate of what JAX calls the gradient of a complex leaf.
    grads = jax.tree.map(lambda g: jnp.conj(g) if jnp.iscomplexobj(g) else g, grads)
    grad_norm = global_norm(grads)
    finite = jnp.isfinite(loss) & jnp.isfinite(grad_norm)

    def update(grads: PyTree, opt_state: PyTree) -> tuple[PyTree, PyTree]:
        value_fn = lambda p: loss_of(p, rest, batch, key)[0]
        extras = {"value": loss, "grad": grads, "value_fn": value_fn}
        return call_update(optimizer, grads, opt_state, params, **extras)

    # Parts of optax promote dtypes, which a user may have forbidden for their own code.
    with jax.numpy_dtype_promotion("standard"):
        updates, opt_state = guarded_update(update, grads, state.opt_state, finite)
        params_after = optax.apply_updates(params, updates)
    model = _select(finite, eqx.combine(params_after, rest_after), state.model)
    metrics = {
        **aux,
        "loss": loss,
        "grad_norm": grad_norm,
        "skipped": 1.0 - finite.astype(jnp.float32),
        **_learning_rate(opt_state),
    }
    return TrainState(model, opt_state, state.step + 1, state.key), metrics


def global_norm(tree: PyTree) -> Float[Array, ""]:
    """The Euclidean norm over all arrays of a tree, in float32 or wider."""
    # A sum of squares leaf by leaf: raveling a split leaf would gather it.
    return jnp.sqrt(sum(jnp.sum(jnp.square(jnp.abs(widen(x)))) for x in jax.tree.leaves(tree)))


def loss_of_params(
    params: PyTree,
    rest: PyTree,
    batch: PyTree,
    key: PRNGKeyArray,
    *,
    loss_fn: LossFn,
    compute_dtype: Any,
    part: Callable[[PyTree], tuple[PyTree, PyTree]],
) -> tuple[Array, tuple[dict[str, Array], Array, PyTree]]:
    """The loss as a function of the trainable leaves; besides, aux, weight and the rest."""
    model = eqx.combine(params, rest)
    loss, aux, weight, model = evaluate_loss(loss_fn, model, batch, key, compute_dtype)
    return loss, (aux, weight, part(model)[1])


def loss_and_grads(
    loss_of: Callable[..., Any],
    params: PyTree,
    rest: PyTree,
    batch: PyTree,
    key: PRNGKeyArray,
    accumulate: int,
) -> tuple[tuple[Array, dict[str, Array], PyTree], PyTree]:
    """Loss, aux, the rest moved on, and the gradient, over `accumulate` microbatches."""
    value_and_grad = jax.value_and_grad(loss_of, has_aux=True)
    if accumulate == 1:
        (loss, (aux, _, rest)), grads = value_and_grad(params, rest, batch, key)
        return (loss, aux, rest), grads
    arrays, static = eqx.partition(rest, eqx.is_array)

    def weighted(arrays: PyTree, index: Array, microbatch: PyTree) -> tuple[PyTree, PyTree]:
        rest = eqx.combine(arrays, static)
        microkey = jax.random.fold_in(key, index)
        (loss, (aux, weight, rest)), grads = value_and_grad(params, rest, microbatch, microkey)
        sums = jax.tree.map(lambda x: _times(widen(x), weight), (loss, aux, grads))
        return eqx.filter(rest, eqx.is_array), (sums, weight)

    def body(carry: PyTree, inputs: PyTree) -> tuple[PyTree, None]:
        arrays, sums = carry
        arrays, more = weighted(arrays, *inputs)
        return (arrays, jax.tree.map(jnp.add, sums, more)), None

    inputs = (jnp.arange(accumulate), split_rows(batch, accumulate))
    _, shapes = jax.eval_shape(weighted, arrays, *jax.tree.map(lambda x: x[0], inputs))
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    (arrays, (sums, weight)), _ = jax.lax.scan(body, (arrays, zeros), inputs)
    loss, aux, grads = jax.tree.map(lambda x: x / weight.astype(x.dtype), sums)
    if "weight" in aux:
        aux["weight"] = weight  # of all the microbatches, not their mean
    grads = jax.tree.map(lambda g, p: g.astype(p.dtype), grads, params)
    return (loss, aux, eqx.combine(arrays, static)), grads


def split_rows(batch: PyTree, count: int) -> PyTree:
    """Splits the batch dimension of size b into `(count, b // count)`."""

    def split_leaf(path: Any, x: Any) -> Array:
        rows = jnp.shape(x)[0] if jnp.ndim(x) else 0
        if rows == 0 or rows % count:
            where = jax.tree_util.keystr(path, simple=True, separator="/") or "the batch"
            raise ValueError(
                f"`accumulate={count}` does not divide the batch dimension of {where}, of shape "
                f"{jnp.shape(x)}. Every array of a batch needs a first dimension that is a "
                f"multiple of `accumulate`."
            )
        # Microbatch i takes the rows i, i + count, ...: when the batch is split over devices,
        # each then holds its share of every microbatch, and nothing is sent.
        return jnp.swapaxes(jnp.reshape(x, (rows // count, count, *x.shape[1:])), 0, 1)

    return jax.tree_util.tree_map_with_path(split_leaf, batch)


def _times(x: Array, weight: Array) -> Array:
    # A microbatch of nothing but padding may well have a loss of 0 / 0.
    return jnp.where(weight > 0, x * weight.astype(x.dtype), jnp.zeros((), x.dtype))


def _select(use_new: Array, new: PyTree, old: PyTree) -> PyTree:
    return jax.tree.map(lambda n, o: jnp.where(use_new, n, o) if eqx.is_array(o) else o, new, old)


def _learning_rate(opt_state: PyTree) -> dict[str, Array]:
    found = [
        hyperparams["learning_rate"]
        for _, hyperparams in optax.tree.get_all_with_path(opt_state, "hyperparams")
        if "learning_rate" in hyperparams
    ]
    return {"learning_rate": found[0]} if len(found) == 1 else {}
