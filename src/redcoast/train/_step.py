"""The training state, and one step of the optimizer as a pure function."""

import dataclasses
import functools as ft
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax.experimental.xla_metadata import set_xla_metadata
from jax.sharding import NamedSharding
from jax.tree_util import KeyPath
from jaxtyping import Array, Float, Int, PRNGKeyArray, PyTree

from ..core._axis_types import auto_ambient_mesh, on_auto_axes
from ..core._dtypes import tree_to_jax_dtypes
from ..core._errors import (
    check_functions,
    check_integer,
    check_key,
    check_kind,
    check_optimizer,
    several,
)
from ..core._frames import hide_frames, warn
from ..core._pytree import ARRAYS, Arrays, Static, join, show_place, split
from ..core._target import target
from ..core._train_state import AbstractTrainState
from ..core._trainable import partition_trainable, refuse_filter_of_numpy
from ..core._user_functions import calling
from ..data._per_batch import has_per_batch
from ..distributed._agreement import agree_on_program
from ..distributed._arrays import copy_tree, place_tree, put
from ..tracking._metrics import check_scalars
from ._host_memory import update_on_device, where_they_were
from ._labels import accept_module_labels
from ._layer_state import warn_of_kept_state
from ._loss import LossFn, evaluate_loss
from ._loss_scale import LossScale
from ._model import refuse_untrainable
from ._optimizer import call_update, refuse_optimizer_states, refuse_per_example
from ._precision import ComputeDtype, as_compute_dtype, widen
from ._shared_arrays import warn_of_shared
from ._show_state import show_state
from ._skip_nonfinite import guarded_update
from ._weight_average import WeightAverage, model_with, with_average


class TrainState(AbstractTrainState):
    """The state that a training step updates.

    - `model`: any PyTree.
    - `opt_state`: the optimizer state for the trainable leaves of `model`.
    - `step`: the number of steps taken, including skipped steps; int32.
    - `key`: the PRNG key of the run, the same at all steps. Step n uses `fold_in(key, n)`.
    - `loss_scale`: a [`redcoast.LossScale`][] if the loss is computed in float16, else `None`.
    - `average`: the average of the weights, if `init_state` or `fit` was given `average`, else
        `None`. Its `weights` are the averages of the trainable leaves, in float32 or wider.
    - `averaged_model`: the model with the averaged weights; without an average, `model`.
    """

    model: PyTree
    opt_state: PyTree
    step: Int[Array, "..."]
    key: PRNGKeyArray
    loss_scale: LossScale | None = None
    average: WeightAverage | None = None

    @property
    def averaged_model(self) -> PyTree:
        if self.average is None:
            warn(
                "The state has no average of the weights, so `averaged_model` is `model`. Pass "
                "`average=0.999` to `fit`, `prepare` or `init_state`, or use `state.model`."
            )
        return model_with(self.average, self.model)

    def __getattr__(self, name: str) -> PyTree:
        """Called for what the state does not have, such as the `params` of a state of Flax."""
        names = ", ".join(type(self).__annotations__)
        raise AttributeError(
            f"A TrainState has no attribute {name!r}. It has {names} and averaged_model. `model` "
            "has the trained parameters."
        )

    def __repr__(self) -> str:
        return show_state(self, self.step) or eqx.tree_pformat(self)


@hide_frames
def init_state(
    init_fn: PyTree,
    optimizer: optax.GradientTransformation,
    *,
    key: PRNGKeyArray,
    shardings: PyTree[NamedSharding | None] | None = None,
    compute_dtype: Any = None,
    trainable: PyTree = eqx.is_inexact_array,
    average: int | float | None = None,
) -> TrainState:
    """Creates the state of a training run, sharded from the start.

    This function is pure: `eqx.filter_eval_shape(rc.init_state, ...)` returns the abstract state,
    which can be planned without allocating memory. With the `shardings` of the plan, each device
    computes only its own shards, so no device needs memory for the full model unless the plan
    replicates it.

    **Arguments:**

    - `init_fn`: `init_fn(key) -> model`, or a model with arrays, which is copied.
    - `optimizer`: an optax optimizer.
    - `key`: a JAX key. It is split into the key that initialises the model and the key of the run.
    - `shardings`: the result of [`redcoast.infer_shardings`][] for the abstract state.
    - `compute_dtype`: as in [`redcoast.train_step`][]; with `jnp.float16`, the state has a
        `loss_scale`.
    - `trainable`: the leaves that the optimizer trains, as in [`redcoast.train_step`][].
    - `average`: the decay of an exponential average of the weights, such as 0.999, as in
        [`redcoast.fit`][]. By default, no average is computed.

    **Returns:**

    A [`redcoast.TrainState`][] at step 0.

    **Raises:**

    `ValueError` if `trainable` selects no leaves, if `compute_dtype` is not floating, or if the
    optimizer needs the gradient of each example. `TypeError` if the model contains an optimizer
    state that would be trained.

    !!! Example

        ```python
        abstract = eqx.filter_eval_shape(rc.init_state, init_fn, optimizer, key=key)
        shardings = rc.infer_shardings(abstract, mesh)
        state = rc.init_state(init_fn, optimizer, key=key, shardings=shardings)
        ```
    """

    def create(key: PRNGKeyArray) -> TrainState:
        model_key, key = split_key_of_run(key)
        with calling("init_fn", {}):
            model = init_fn(model_key)
        if shardings is None:  # otherwise it was given for the abstract state
            warn_of_shared(model, trainable)
        return state_of(model, optimizer, key=key, **options)

    options = {"compute_dtype": compute_dtype, "trainable": trainable, "average": average}
    check_optimizer(optimizer)
    accept_module_labels(optimizer)
    check_key(key)
    if is_model(init_fn):
        if shardings is None:
            warn_of_shared(init_fn, trainable)
        return state_of_model(init_fn, optimizer, key=key, shardings=shardings, **options)
    check_functions(init_fn=init_fn)
    if shardings is None:
        return create(key)
    return create_split(create, key, shardings=shardings)


def split_key_of_run(key: PRNGKeyArray) -> tuple[PRNGKeyArray, PRNGKeyArray]:
    """The key that `init_fn` gets, and that of the state: the parameters and the steps must not
    draw the same numbers."""
    of_model, of_state = jax.random.split(key)
    return of_model, of_state


def is_model(model_or_init_fn: PyTree) -> bool:
    """Whether this is a model, which may be callable, and not a function that creates one."""
    is_array = lambda x: isinstance(x, (*ARRAYS, jax.ShapeDtypeStruct))
    return any(map(is_array, jax.tree.leaves(model_or_init_fn)))


def state_of_model(
    model: PyTree,
    optimizer: optax.GradientTransformation,
    *,
    key: PRNGKeyArray,
    shardings: PyTree[NamedSharding | None] | None,
    **options: Any,
) -> TrainState:
    """Creates the state at step 0 from a copy of a model."""
    create = lambda model, key: state_of(model, optimizer, key=key, **options)
    refuse_filter_of_numpy(model, options["trainable"])
    # Copies: training donates its state.
    if shardings is None:
        return create(*copy_tree((model, key)))
    copied = place_tree(model, shardings.model, copy=True)
    key = put(key, shardings.key, may_alias=False)
    return create_split(create, copied, key, shardings=shardings)


def state_of(
    model: PyTree,
    optimizer: optax.GradientTransformation,
    *,
    key: PRNGKeyArray,
    compute_dtype: ComputeDtype,
    trainable: PyTree,
    average: int | float | None = None,
) -> TrainState:
    """Creates the state at step 0 for a given model."""
    refuse_filter_of_numpy(model, trainable)
    model = tree_to_jax_dtypes(model, "the model")
    params, _ = partition_trainable(model, trainable)
    if not jax.tree.leaves(params):
        refuse_untrainable(model)
    refuse_optimizer_states(params, TrainState)
    with jax.numpy_dtype_promotion("standard"):
        state = TrainState(model, optimizer.init(params), jnp.zeros((), jnp.int32), key)
    refuse_per_example(state.opt_state)
    # A step returns strongly typed arrays, so weakly typed ones would cost a second compilation.
    is_weak = lambda x: getattr(x, "weak_type", False)
    strong = lambda x: jax.lax.convert_element_type(x, x.dtype) if is_weak(x) else x
    state = with_loss_scale(jax.tree.map(strong, state), compute_dtype)
    return with_average(state, average, trainable)


def with_loss_scale(state: TrainState, compute_dtype: ComputeDtype) -> TrainState:
    """Adds the loss scale that training in `compute_dtype` needs to a state that has none."""
    compute_dtype = as_compute_dtype(compute_dtype)
    needed = compute_dtype is not None and jnp.dtype(compute_dtype) == jnp.float16
    if state.loss_scale is not None or not needed:
        return state
    return dataclasses.replace(state, loss_scale=LossScale())


def create_split(
    create: Callable[..., TrainState], *args: PyTree, shardings: PyTree[NamedSharding | None]
) -> TrainState:
    """Calls `create(*args)` so that each device computes only its own shards."""
    args = on_auto_axes(args)
    arrays, constants = eqx.partition(args, eqx.is_array)
    statics: list[Static] = []  # the last is of the trace that JAX runs

    def flat(arrays: PyTree) -> Arrays:
        created, static = split(create(*eqx.combine(arrays, constants)))
        statics.append(static)
        return created

    flat_create = jax.jit(flat, out_shardings=jax.tree.leaves(shardings))
    with auto_ambient_mesh():
        if jax.process_count() > 1:
            mesh = jax.tree.leaves(shardings)[0].mesh
            traced = flat_create.trace(arrays)
            agree_on_program("the program that initialises the state", traced.jaxpr, mesh)
        created = flat_create(arrays)
        return join(created, statics[-1])


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
        accept them.
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

    def scaled(*args: PyTree) -> tuple[Array, PyTree]:
        loss, rest = loss_of(*args)
        return loss if scale is None else scale.scale(loss), rest

    (loss, aux, rest_after), grads = loss_and_grads(scaled, params, rest, batch, key, accumulate)
    if scale is not None:
        # Before the norm, which is of the true gradient.
        loss, grads = scale.unscale((loss, grads))
    # For complex leaves, the descent direction is the negative conjugate of JAX's gradient.
    grads = jax.tree.map(lambda g: jnp.conj(g) if jnp.iscomplexobj(g) else g, grads)
    grad_norm = global_norm(grads)
    # The norm is finite only if all gradients are.
    finite = jnp.isfinite(loss) & jnp.isfinite(grad_norm)

    def update(grads: PyTree, opt_state: PyTree) -> tuple[PyTree, PyTree]:
        # For optimizers with a line search; the others leave these arguments out.
        value_fn = lambda p: loss_of(p, rest, batch, key)[0]
        extras = {"value": loss, "grad": grads, "value_fn": value_fn}
        return call_update(optimizer, grads, opt_state, params, **extras)

    def updated(opt_state: PyTree) -> tuple[PyTree, PyTree]:
        updates, opt_state = guarded_update(update, grads, opt_state, finite)
        return optax.apply_updates(params, updates), opt_state

    # Parts of optax promote dtypes, which the user's settings may forbid.
    with jax.numpy_dtype_promotion("standard"):
        params_after, opt_state = update_on_device(updated, state.opt_state)
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
    # Raveling a sharded leaf would gather it.
    return jnp.sqrt(sum(jnp.sum(jnp.square(jnp.abs(widen(x)))) for x in jax.tree.leaves(tree)))


def loss_of_params(
    params: PyTree,
    rest: PyTree,
    batch: PyTree,
    key: PRNGKeyArray,
    *,
    loss_fn: LossFn,
    compute_dtype: ComputeDtype,
    part: Callable[[PyTree], tuple[PyTree, PyTree]],
) -> tuple[Array, tuple[dict[str, Array], Array, PyTree]]:
    """Computes the loss from the trainable leaves; also returns aux, weight and other leaves."""
    model = eqx.combine(params, rest)
    loss, aux, weight, new_model = evaluate_loss(loss_fn, model, batch, key, compute_dtype)
    if new_model is model:
        warn_of_kept_state(model)
    return loss, (aux, weight, part(new_model)[1])


def loss_and_grads(
    loss_of: Callable[..., PyTree],
    params: PyTree,
    rest: PyTree,
    batch: PyTree,
    key: PRNGKeyArray,
    accumulate: int,
) -> tuple[tuple[Array, dict[str, Array], PyTree], PyTree]:
    """Computes loss, aux, updated other leaves, and gradient over `accumulate` microbatches."""
    value_and_grad = jax.value_and_grad(loss_of, has_aux=True)
    if accumulate == 1:
        (loss, (aux, _, rest)), grads = value_and_grad(params, rest, batch, key)
        return (loss, aux, rest), grads
    arrays, static = eqx.partition(rest, eqx.is_array)

    def weighted(arrays: PyTree, index: Array, microbatch: PyTree) -> tuple[PyTree, PyTree]:
        rest = eqx.combine(arrays, static)
        # Microbatches with one key would have the same dropout masks.
        microkey = jax.random.fold_in(key, index)
        (loss, (aux, weight, rest)), grads = value_and_grad(params, rest, microbatch, microkey)
        check_scalars(aux)
        # The loss of a microbatch that contains only padding may be 0 / 0.
        share = lambda x: jnp.where(weight != 0, x * weight.astype(x.dtype), jnp.zeros((), x.dtype))
        # Weighted sums, which one division at the end makes the mean over all tokens of the batch.
        sums = jax.tree.map(lambda x: share(widen(x)), (loss, aux, grads))
        return eqx.filter(rest, eqx.is_array), (sums, weight)

    def body(carry: PyTree, inputs: PyTree) -> tuple[PyTree, None]:
        arrays, sums = carry
        arrays, more = weighted(arrays, *inputs)
        return (arrays, jax.tree.map(jnp.add, sums, more)), None

    inputs = (jnp.arange(accumulate), split_rows(batch, accumulate))
    # The names of metrics are known only after a trace, and a scan needs them before.
    _, shapes = jax.eval_shape(weighted, arrays, *jax.tree.map(lambda x: x[0], inputs))
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    (arrays, (sums, weight)), _ = jax.lax.scan(body, (arrays, zeros), inputs)
    # Weights that add up to 0, such as those of padding alone, leave the sums undivided.
    divisor = jnp.where(weight != 0, weight, jnp.ones_like(weight))
    loss, aux, grads = jax.tree.map(lambda x: x / divisor.astype(x.dtype), sums)
    if "weight" in aux:
        aux["weight"] = weight  # the sum over microbatches, not the mean
    # They were summed in float32.
    grads = jax.tree.map(lambda g, p: g.astype(p.dtype), grads, params)
    return (loss, aux, eqx.combine(arrays, static)), grads


def split_rows(batch: PyTree, count: int) -> PyTree:
    """Reshapes the batch dimension, of size b, to `(count, b // count)`."""
    refuse_other_rows(batch, count)

    def split_leaf(path: KeyPath, x: PyTree) -> Array:
        if x.shape[0] % count:
            where = show_place(path, "batch", "the batch")
            raise ValueError(
                f"`accumulate={count}` does not divide the batch dimension of {where}, of shape "
                f"{x.shape}. The batch size must be a multiple of `accumulate`."
            )
        # Microbatch i has the rows i, i + count, ..., so each device already has its share of
        # every microbatch, and no communication is needed.
        return jnp.swapaxes(jnp.reshape(x, (-1, count, *x.shape[1:])), 0, 1)

    return jax.tree_util.tree_map_with_path(split_leaf, batch)


def refuse_other_rows(batch: PyTree, accumulate: int) -> None:
    """Raises `ValueError` if the arrays of a batch cannot be split alike into microbatches."""
    if has_per_batch(batch):
        refuse_per_batch(accumulate)
    rows: dict[int, list[str]] = {}
    for path, x in jax.tree_util.tree_leaves_with_path(batch):
        size = next(iter(jnp.shape(x)), 0)
        rows.setdefault(size, []).append(show_place(path, "batch", "the batch"))
    if 0 in rows:
        raise ValueError(
            f"`accumulate={accumulate}` splits the batch dimension, which {several(rows[0], 3)} "
            "does not have. The first dimension of every array must be the batch."
        )
    if len(rows) > 1:
        sizes = [f"{several(names, 3)} of size {size}" for size, names in rows.items()]
        raise ValueError(
            f"`accumulate={accumulate}` splits the first dimension of every array of a batch, "
            f"which must be the batch. Here it differs: {several(sizes, 4, separator='; ')}. "
            "Arrays that are not one row for each example, such as a bank of negatives, the "
            "weights of classes or the nodes of graphs, cannot be split. Leave out `accumulate`; "
            "or keep such arrays in the model as frozen leaves, or in a closure of `loss_fn`."
        )


def refuse_per_batch(accumulate: int) -> None:
    raise ValueError(
        f"`accumulate={accumulate}` splits a batch along its examples, and some of its arrays are "
        "marked as `per_batch`, so they cannot be split. Leave out `accumulate`, and use a smaller "
        "`batch_size`."
    )


def _select(use_new: Array, new: PyTree, old: PyTree) -> PyTree:
    return jax.tree.map(lambda n, o: jnp.where(use_new, n, o) if eqx.is_array(o) else o, new, old)


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
