"""Calls `loss_fn`, and converts its result to one form after checks."""

import logging
from collections.abc import Callable
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax._src.interpreters import ad
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import Array, ArrayLike, Float, PRNGKeyArray, PyTree

from ..core._dtypes import dtype_advice, has_numbers, tree_to_jax_dtypes
from ..core._errors import type_name
from ..core._pytree import layer_states, show_path
from ..core._user_functions import calling, describe
from ..data._per_batch import without_marks
from ._layer_state import how_to_return, returns_state
from ._precision import ComputeDtype, cast_floating, has_floating_state, is_floating, widen

logger = logging.getLogger("redcoast")

# JAX has no public name for the tracers of differentiated arrays.
_DIFFERENTIATED = (ad.JVPTracer, ad.LinearizeTracer)

LossFn = Callable[..., PyTree]
# Names of metrics that `train_step` returns, and of fields that loggers add.
_RESERVED = ("loss", "grad_norm", "skipped", "learning_rate", "loss_scale", "skipped_total")
_LOGGED = ("step", "time")


class ExaminedLoss(NamedTuple):
    """A loss that is examined, and what it is traced with: concrete or abstract arrays."""

    loss_fn: LossFn
    model: PyTree
    batch: PyTree
    mesh: Mesh | AbstractMesh
    compute_dtype: ComputeDtype

    def evaluate(
        self, model: PyTree, batch: PyTree, key: PRNGKeyArray, *, training: bool
    ) -> "LossResult":
        """The result of the loss, as in a training step or as in an evaluation."""
        if not training:
            model = eqx.nn.inference_mode(model)
        return evaluate_loss(self.loss_fn, model, batch, key, self.compute_dtype)


class LossResult(NamedTuple):
    """The result of a loss. If it returned no model, `model` is its argument."""

    loss: Float[Array, ""]
    aux: dict[str, PyTree]
    weight: Float[Array, ""]
    model: PyTree


def evaluate_loss(
    loss_fn: LossFn,
    model: PyTree,
    batch: PyTree,
    key: PRNGKeyArray | None,
    compute_dtype: ComputeDtype,
) -> LossResult:
    """Computes the loss in `compute_dtype`; the result is in float32 or wider."""
    half = compute_dtype is not None and jnp.dtype(compute_dtype).itemsize < 4
    if half and has_floating_state(model):
        logger.warning(
            "Running averages in an `eqx.nn.State` are updated in %s. Its precision is low, so "
            "they may not converge to the mean.",
            jnp.dtype(compute_dtype).name,
        )
    # Cast inside of the differentiated function, so that gradients have the dtype of the
    # parameters.
    compute_model = cast_floating(model, compute_dtype)
    # The same dtypes as on a device, such as int32 for NumPy's int64.
    batch = tree_to_jax_dtypes(without_marks(batch), "the batch", of="batch")
    if layer_states(model):
        # A copy, because updating an `eqx.nn.State` invalidates the old one.
        compute_model = jax.tree.map(lambda x: x, compute_model)
    compute_batch = cast_floating(batch, compute_dtype)
    with calling("loss_fn", {"batch": compute_batch}):
        out = loss_fn(compute_model, compute_batch, key)
    loss, aux, new_model = _unpack(out, model)
    _check_loss(loss)
    _check_aux(aux, model)
    _check_dependence(loss, model, updated=new_model is not model)
    if new_model is not model:
        new_model = _stored_dtypes(new_model, model)
    aux = {name: _as_metric(value) for name, value in aux.items()}
    shapes = [x.shape for x in jax.tree.leaves(batch) if hasattr(x, "shape")]
    # Without a weight from the loss, all examples count the same.
    examples = next((shape[0] for shape in shapes if shape), 1)
    weight = aux.get("weight", jnp.asarray(examples, jnp.float32))
    return LossResult(widen(loss), aux, weight, new_model)


def _as_metric(value: ArrayLike) -> Array:
    # Arrays with dimensions are not averaged, and may be indices or masks of a custom loop.
    if jnp.ndim(value) and not is_floating(value):
        return jnp.asarray(value)
    # Metrics are averaged later, and sums of bfloat16 lose their last examples.
    return widen(value)


def check_metrics(out: PyTree, model: PyTree) -> None:
    """Raises the errors of a loss and of metrics that a trace could not return."""
    loss, aux, _ = _unpack(out, model)
    _check_loss(loss)
    _check_aux(aux, model)


def _unpack(out: PyTree, model: PyTree) -> tuple[PyTree, PyTree, PyTree]:
    if not isinstance(out, tuple):
        return out, {}, model
    if len(out) == 2:
        return out[0], out[1], model
    if len(out) == 3:
        _, aux, new_model = out
        if isinstance(new_model, dict) and type(aux) is type(model) and not isinstance(aux, dict):
            raise TypeError(
                f"The second value that `loss_fn` returned is of type {type_name(aux)}, and the "
                "third is a dict. Their order is `return loss, aux, model`."
            )
        return out
    raise ValueError(
        f"`loss_fn` returned a tuple of length {len(out)}. It must return a scalar, "
        "`(scalar, aux)` or `(scalar, aux, model)`."
    )


def _check_loss(loss: object) -> None:
    if not isinstance(loss, jax.Array):
        hint = " Is a `return` missing?" * (loss is None)
        hint += " The loss comes first: `return loss, aux`." * isinstance(loss, dict)
        raise TypeError(
            f"`loss_fn` returned a loss of type {type(loss).__name__}. It must be a scalar JAX "
            f"array that depends on the model.{hint}"
        )
    if loss.ndim:
        raise ValueError(
            f"`loss_fn` returned a loss of shape {loss.shape}. It must be a scalar: take the mean "
            "over the batch, `jnp.mean(loss)`."
        )
    if not jnp.issubdtype(loss.dtype, jnp.floating):
        raise ValueError(
            f"`loss_fn` returned a loss of dtype {loss.dtype}, which has no gradient. It must be "
            "a floating scalar."
        )


def _check_dependence(loss: Array, model: PyTree, *, updated: bool) -> None:
    """Raises an error if the loss does not depend on the model that it is differentiated for."""

    def trace(x: object) -> int:
        # Values that depend on a differentiated leaf have the same trace as the leaf.
        return id(getattr(x, "_trace", None))

    # Empty outside of a differentiation, as in an evaluation, where nothing has to depend on the
    # model.
    traces = {trace(x) for x in jax.tree.leaves(model) if isinstance(x, _DIFFERENTIATED)}
    if not traces or trace(loss) in traces:
        return
    problem = (
        "The loss that `loss_fn` returned does not depend on any trainable leaf of its argument "
        "`model`, so the gradient is exactly zero"
    )
    if updated:  # the step may be meant to update only non-trainable leaves
        logger.warning("%s. Only the leaves of the model that it returned are updated.", problem)
        return
    raise ValueError(
        f"{problem}. Compute the loss with the argument `model`, not with a model from outside "
        "`loss_fn`, and not only through `jax.lax.stop_gradient`, an `argmax` or a comparison; "
        "and check which leaves `trainable` selects."
    )


def _check_aux(aux: object, model: PyTree) -> None:
    if not isinstance(aux, dict):
        hint = ""
        if returns_state(aux):
            hint = f" {how_to_return(aux)}"
        # As of `jax.value_and_grad` in the loss, which other libraries ask for.
        if type(aux) is type(model) and not layer_states(model):
            hint = " If it is the gradient, pass the loss itself: redcoast differentiates it."
        raise TypeError(
            f"The second value that `loss_fn` returned is of type {type_name(aux)}. It must "
            f"be a dict of scalar metrics.{hint}"
        )
    for name, value in aux.items():
        if not isinstance(name, str):
            raise TypeError(
                f"`loss_fn` returned a metric named {name!r} in `aux`. Names are strings."
            )
        if name in _RESERVED + _LOGGED:
            raise ValueError(
                f"`loss_fn` returned a metric named {name!r} in `aux`. Use another name: "
                f"{', '.join(_RESERVED)} are metrics of `train_step`, and {' and '.join(_LOGGED)} "
                "are in each line of a log."
            )
        if not isinstance(value, (jax.Array, np.ndarray, np.generic, int, float)):
            hint = ""
            leaves = jax.tree.leaves(value)
            has_arrays = any(map(eqx.is_array, leaves))
            are_numbers = [eqx.is_array_like(x) and jnp.ndim(x) == 0 for x in leaves]
            # A dict of arrays may be a state too, such as Flax's `mutable` collections.
            if returns_state(value) or (isinstance(value, dict) and has_arrays):
                hint = f" {how_to_return(value)}"
            if has_arrays and all(are_numbers) and not layer_states((model, value)):
                hint = f" Give each number in it a name, such as `{name}/first`."
            raise TypeError(
                f"`loss_fn` returned aux[{name!r}] of type {type(value).__name__}. Metrics must be "
                "scalars: numbers, or arrays of shape (). A custom training loop may also use "
                f"other arrays.{hint}"
            )
        if isinstance(value, np.ndarray | np.generic) and not has_numbers(value.dtype):
            raise TypeError(
                f"`loss_fn` returned aux[{name!r}] of the dtype {value.dtype}. Metrics are numbers."
                f"{dtype_advice(value.dtype)}"
            )
        if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
            raise TypeError(
                f"`loss_fn` returned a key in aux[{name!r}]. Metrics are real numbers: leave it "
                "out; a custom training loop may use `jax.random.key_data` of it."
            )


def _stored_dtypes(new_model: PyTree, model: PyTree) -> PyTree:
    """Casts the model that `loss_fn` returned to the dtypes of the stored model."""
    old_structure, new_structure = jax.tree.structure(model), jax.tree.structure(new_model)
    if old_structure != new_structure:
        hint = (
            " If `loss_fn` returns three values, they are the loss, a dict of metrics, and the "
            "model with its new arrays."
        )
        if layer_states(model):
            hint = f" {how_to_return(model)}"
        raise ValueError(
            "The model that `loss_fn` returned has a different structure from its argument, in its "
            f"leaves or in its static fields. Its argument has {describe(model)}, and what it "
            f"returned has {describe(new_model)}.{hint}"
        )
    old_leaves = jax.tree_util.tree_leaves_with_path(model)
    for (path, old), new in zip(old_leaves, jax.tree.leaves(new_model), strict=True):
        # Floating arrays are returned in `compute_dtype`.
        if _kind(old, is_floating(old)) != _kind(new, is_floating(old)):
            raise ValueError(
                f"The model that `loss_fn` returned has {_kind(new)} at {show_path(path)}, but was "
                f"given {_kind(old)} there. Keep the shape and the dtype."
            )
        # A compiled step has numbers of Python as constants, so that a new one would be lost.
        # Booleans may differ: a loss may set `inference` of the layers that it calls.
        is_number = isinstance(old, int | float | complex) and not isinstance(old, bool)
        if is_number and new is not old and new != old:
            raise ValueError(
                f"The model that `loss_fn` returned has {new!r} at {show_path(path)}, and was "
                f"given {old!r}. What changes from step to step must be an array, such as "
                f"`jnp.asarray({old!r})`."
            )

    def to_stored_dtype(new: PyTree, old: PyTree) -> PyTree:
        if not is_floating(old) or new.dtype == old.dtype:
            return new
        # Parameters are kept in their own dtype, whatever they were computed in. Those that the
        # loss did not change, such as frozen weights, keep the digits that `compute_dtype` lacks.
        is_kept = new == old.astype(new.dtype)
        return jnp.where(is_kept, old, new.astype(old.dtype))

    return jax.tree.map(to_stored_dtype, new_model, model)


def _kind(leaf: PyTree, floating: bool = False) -> str:
    if not eqx.is_array(leaf):
        return f"a {type(leaf).__name__}"
    dtype = leaf.dtype
    if floating and is_floating(leaf):
        dtype = "floating"
    return f"{dtype}{list(leaf.shape)}"
