"""The training state, and its creation at step 0."""

import dataclasses
import functools as ft
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jax.tree_util import KeyPath
from jaxtyping import Array, Int, PRNGKeyArray, PyTree

from ..core._axis_types import auto_ambient_mesh, on_auto_axes
from ..core._donation import refuse_deleted
from ..core._dtypes import tree_to_jax_dtypes
from ..core._errors import check_functions, check_key, check_kind, check_optimizer
from ..core._frames import hide_frames, warn
from ..core._pytree import ARRAYS, Arrays, Static, join, map_where, split
from ..core._train_state import AbstractTrainState
from ..core._trainable import partition_trainable, refuse_filter_of_numpy
from ..core._user_functions import calling
from ..distributed._agreement import agree_on_program
from ..distributed._arrays import allowed_transfers, copy_tree, place_tree, put
from ._debug_settings import call_debugged, is_debugged
from ._labels import accept_module_labels
from ._loss_scale import LossScale
from ._model import refuse_untrainable
from ._optimizer import call_init, refuse_optimizer_states, refuse_per_example
from ._precision import ComputeDtype, as_compute_dtype
from ._programs import compiled_once
from ._shared_arrays import warn_of_shared
from ._show_state import show_state
from ._step_messages import match_shardings
from ._weight_average import WeightAverage, model_with, with_average

# `init_state` takes no prefix of the state.
_SAME_STATE = (
    "Pass the result of `infer_shardings` for the abstract state of the same `init_fn`, "
    "`optimizer`, `trainable` and `average`."
)


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
    options = {"compute_dtype": compute_dtype, "trainable": trainable, "average": average}
    check_optimizer(optimizer)
    accept_module_labels(optimizer)
    check_key(key)
    if shardings is not None:
        words = (
            "`plan.shardings`, or what `redcoast.infer_shardings` returns for the abstract state"
        )
        check_kind("shardings", shardings, TrainState, words)
    # An empty container is refused as a model without parameters.
    if is_model(init_fn) or isinstance(init_fn, dict | list | tuple):
        refuse_deleted(
            init_fn,
            "The model that `init_state` was given",
            "Pass the model of the state that the last step returned, `state.model`.",
        )
        if shardings is None:
            warn_of_shared(init_fn, trainable)
        with allowed_transfers():
            return state_of_model(init_fn, optimizer, key=key, shardings=shardings, **options)
    check_functions(init_fn=init_fn)

    def create(key: PRNGKeyArray) -> TrainState:
        model_key, key = split_key_of_run(key)
        with calling("init_fn", {}):
            model = init_fn(model_key)
        if shardings is None:  # otherwise it was given for the abstract state
            warn_of_shared(model, trainable)
        return state_of(model, key, optimizer=optimizer, **options)

    with allowed_transfers():
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
    for leaf in jax.tree.leaves(model_or_init_fn):
        if isinstance(leaf, (*ARRAYS, jax.ShapeDtypeStruct)):
            return True
    return False


def state_of_model(
    model: PyTree,
    optimizer: optax.GradientTransformation,
    *,
    key: PRNGKeyArray,
    shardings: PyTree[NamedSharding | None] | None,
    **options: Any,
) -> TrainState:
    """Creates the state at step 0 from a copy of a model."""
    create = ft.partial(state_of, optimizer=optimizer, **options)
    refuse_filter_of_numpy(model, options["trainable"])
    # Copies: training donates its state.
    if shardings is None:
        return create(*copy_tree((model, key)))
    match_shardings(_by_path(shardings.model), model, name="shardings", advice=_SAME_STATE)
    copied = place_tree(model, shardings.model, copy=True)
    key = put(key, shardings.key, may_alias=False)
    return create_split(create, copied, key, shardings=shardings)


def state_of(
    model: PyTree,
    key: PRNGKeyArray,
    *,
    optimizer: optax.GradientTransformation,
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
        state = TrainState(model, call_init(optimizer, params), jnp.zeros((), jnp.int32), key)
    refuse_per_example(state.opt_state)
    # A step returns strongly typed arrays, so weakly typed ones would cost a second compilation.
    state = map_where(_is_weak, lambda x: jax.lax.convert_element_type(x, x.dtype), state)
    state = with_loss_scale(state, compute_dtype)
    return with_average(state, average, trainable)


def _is_weak(x: object) -> bool:
    return getattr(x, "weak_type", False)


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
        state = create(*eqx.combine(arrays, constants))
        match_shardings(_by_path(shardings), state, name="shardings", advice=_SAME_STATE)
        created, static = split(state)
        statics.append(static)
        return created

    places = jax.tree.leaves(shardings)
    flat_create = jax.jit(flat, out_shardings=places)
    with auto_ambient_mesh():
        if is_debugged() and jax.process_count() == 1:
            created = call_debugged(flat_create, arrays)
            return join(created, statics[-1])
        traced = flat_create.trace(arrays)
        mesh = places[0].mesh
        if jax.process_count() > 1:
            agree_on_program("the program that initialises the state", traced.jaxpr, mesh)
        inputs = jax.tree.leaves(arrays)
        # It may be debugged, or use a value of another trace.
        if is_debugged() or len(traced.jaxpr.in_avals) != len(inputs):
            created = call_debugged(flat_create, arrays)
        else:
            # A later run of the same model compiles nothing.
            run, _ = compiled_once(traced.jaxpr, create, mesh, out_shardings=places)
            created, _ = run([], inputs)
        return join(created, statics[-1])


def _by_path(shardings: PyTree[NamedSharding | None]) -> dict[KeyPath, NamedSharding]:
    return dict(jax.tree_util.tree_leaves_with_path(shardings))
