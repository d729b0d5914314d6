"""The initial state of a run, from a model, a function that creates one, or a state."""

import dataclasses
import functools as ft
import inspect
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import PRNGKeyArray, PyTree

from ..core._donation import refuse_deleted
from ..core._dtypes import tree_to_jax_dtypes
from ..core._errors import check_key, several
from ..core._frames import warn
from ..core._jaxpr import is_inexact
from ..core._low_rank import AbstractLowRank
from ..core._pytree import show_path
from ..core._trainable import abstract_trainable, partition_trainable
from ..distributed._arrays import place_tree
from ._labels import accept_module_labels
from ._optimizer import numbers_to_arrays, refuse_optimizer_states, refuse_per_example
from ._shared_arrays import warn_of_shared
from ._state import TrainState, init_state, state_of, state_of_model, with_loss_scale
from ._training import Training
from ._weight_average import with_average


def starting_state(
    model_or_state: PyTree,
    training: Training,
    key: PRNGKeyArray | None,
    *,
    average: int | float | None,
    caller: str,
) -> tuple[TrainState, PRNGKeyArray, Callable[[PyTree], TrainState]]:
    """Returns the abstract state of a run, its key, and a function that creates it with shardings.

    `caller` is the name of the public function in messages.
    """
    optimizer, trainable = training.optimizer, training.trainable
    if model_or_state is None:
        raise TypeError(
            f"The model that `{caller}` was given is None. Pass a model, a function "
            "`init_fn(key)` that returns one, or a `TrainState`."
        )
    accept_module_labels(optimizer)
    model_or_state = tree_to_jax_dtypes(model_or_state, "the model")
    if isinstance(model_or_state, TrainState):
        # A second key would change the random numbers of a run that is continued.
        if key is not None:
            raise ValueError(
                f"The `TrainState` that `{caller}` was given has its own key; leave `key` out."
            )
        refuse_deleted(
            model_or_state,
            f"The `TrainState` that `{caller}` was given",
            "Pass the state that the last step, or `fit`, returned.",
        )
        refuse_per_example(model_or_state.opt_state)
        refuse_optimizer_states(partition_trainable(model_or_state.model, trainable)[0], TrainState)
        warn_of_shared(model_or_state.model, trainable)
        _warn_of_parameters(model_or_state.model, trainable)
        # A state that was trained in another precision gets what this one needs.
        state = with_loss_scale(model_or_state, training.compute_dtype)
        state = dataclasses.replace(state, opt_state=numbers_to_arrays(state.opt_state))
        state = with_average(state, average, trainable)
        return state, state.key, lambda shardings: place_tree(state, shardings)
    options: Any = {
        "compute_dtype": training.compute_dtype,
        "trainable": trainable,
        "average": average,
    }
    if key is None:
        key = jax.random.key(0)
    check_key(key)
    if is_init_fn(model_or_state):
        create = ft.partial(init_state, model_or_state, optimizer, key=key, **options)
        # A function that makes a model is called only on the devices, so that no host needs room
        # for it.
        abstract = eqx.filter_eval_shape(create)
        _warn_of_parameters(abstract.model, trainable)
        return abstract, key, lambda shardings: create(shardings=shardings)
    refuse_deleted(
        model_or_state,
        f"The model that `{caller}` was given",
        "Pass the model of the state that the last step returned, `state.model`.",
    )
    warn_of_shared(model_or_state, trainable)
    _warn_of_parameters(model_or_state, trainable)
    create = ft.partial(state_of, optimizer=optimizer, **options)
    abstract = eqx.filter_eval_shape(create, model_or_state, key)
    # With a copy of the model: a step donates its state, and the user keeps the model.
    make = ft.partial(state_of_model, model_or_state, optimizer, key=key, **options)
    return abstract, key, lambda shardings: make(shardings=shardings)


def _warn_of_parameters(model: PyTree, trainable: PyTree) -> None:
    """Warns of weights that adapters adapt and that are trained too, unless the user has chosen
    what is trained; and of parameters that an optimizer cannot train."""

    def is_adapted(x: object) -> bool:
        return isinstance(x, AbstractLowRank)

    layers = jax.tree.leaves(model, is_leaf=is_adapted)
    adapted_weights = [layer.weight for layer in layers if is_adapted(layer)]
    is_trained = any(map(is_inexact, jax.tree.leaves(adapted_weights)))
    if is_trained and trainable is eqx.is_inexact_array:
        warn(
            "The model has LoRA adapters, and without `trainable` the weights that they adapt are "
            "trained too. To train the adapters only, pass "
            "`trainable=redcoast.lora.trainable(model)`. To train all, pass "
            "`trainable=lambda model: model`, and there is no warning."
        )
    leaves = jax.tree_util.tree_leaves_with_path(abstract_trainable(model, trainable))
    for dtype in sorted({x.dtype for _, x in leaves}, key=str):
        if dtype.itemsize > 2 or dtype == jnp.bfloat16:
            continue
        names = [show_path(path, "its root") for path, x in leaves if x.dtype == dtype]
        remedy = "Keep them in float32 or bfloat16, and convert them where they are used."
        if dtype == jnp.float16:
            remedy = (
                'Convert them to float32 and pass `compute_dtype="fp16"`, or convert them to '
                "bfloat16."
            )
        warn(
            f"The model has parameters in {dtype} ({several(names, 3)}), in which small updates "
            "are lost and Adam's epsilon of 1e-8 is 0, so that the parameters may become NaN. "
            f"{remedy}"
        )


def is_init_fn(model: Any) -> bool:
    """Whether a model is passed as a function of a key, and not as a callable module."""
    # As below `jax.jit` and `eqx.filter_jit`.
    model = inspect.unwrap(model)
    if isinstance(model, type):
        # `eqx.nn.MLP` needs sizes, but a user's own class may need a key only.
        return _takes_one_argument(model) and not _takes_its_fields(model)
    # Modules are callable too, and so are the partial functions of JAX that hold arrays.
    plain = inspect.isfunction(model) or inspect.ismethod(model)
    return plain or (isinstance(model, ft.partial) and not isinstance(model, jax.tree_util.Partial))


def _takes_its_fields(model: type) -> bool:
    """Whether a class is created from its fields, such as a module without an `__init__`."""
    if not dataclasses.is_dataclass(model):
        return False
    fields = [field.name for field in dataclasses.fields(model) if field.init]
    return list(inspect.signature(model).parameters) == fields


def _takes_one_argument(model: Callable[..., PyTree]) -> bool:
    """Whether a function or a class can be called with one positional argument, such as a key."""
    try:
        inspect.signature(model).bind(None)
    except (TypeError, ValueError):  # a ValueError where a class of C has no signature
        return False
    return True
