"""What `loss_fn` may return, checked and brought into one form."""

import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax._src.interpreters import ad
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from ..core._errors import noting
from ._precision import cast_floating, cast_like, has_floating_state, is_floating, widen

logger = logging.getLogger("redcoast")

# JAX has no public name for the arrays that a gradient is taken with respect to.
_DIFFERENTIATED = (ad.JVPTracer, ad.LinearizeTracer)

LossFn = Callable[..., Any]
# Names that `train_step` reports itself.
RESERVED = ("loss", "grad_norm", "skipped", "learning_rate")


class LossResult(NamedTuple):
    loss: Float[Array, ""]
    aux: dict[str, Any]
    weight: Float[Array, ""]
    model: PyTree


def evaluate_loss(
    loss_fn: LossFn, model: PyTree, batch: PyTree, key: PRNGKeyArray | None, compute_dtype: Any
) -> LossResult:
    """Calls `loss_fn` in `compute_dtype`; the result is in float32 or wider."""
    half = compute_dtype is not None and jnp.dtype(compute_dtype).itemsize < 4
    if half and has_floating_state(model):
        logger.warning(
            "Running averages in an `eqx.nn.State` are updated in %s, which is coarse: they may "
            "settle away from the mean.",
            jnp.dtype(compute_dtype).name,
        )
    compute_model = cast_floating(model, compute_dtype)
    with noting("Raised by `loss_fn`, or in what it calls."):
        out = loss_fn(compute_model, cast_floating(batch, compute_dtype), key)
    loss, aux, new_model = _unpack(out, model)
    _check_loss(loss)
    _check_aux(aux)
    _check_dependence(loss, model, moved=new_model is not model)
    if new_model is not model:
        new_model = _moved_on(new_model, model)
    aux = {name: widen(value) for name, value in aux.items()}
    weight = aux.get("weight", jnp.asarray(_rows(batch), jnp.float32))
    return LossResult(widen(loss), aux, weight, new_model)


def _unpack(out: Any, model: PyTree) -> tuple[Any, Any, PyTree]:
    if not isinstance(out, tuple):
        return out, {}, model
    if len(out) == 2:
        return out[0], out[1], model
    if len(out) == 3:
        return out
    raise ValueError(
        f"`loss_fn` returned a tuple of {len(out)}. It must return a scalar, `(scalar, aux)` or "
        "`(scalar, aux, model)`."
    )


def _check_loss(loss: Any) -> None:
    if not isinstance(loss, jax.Array):
        raise TypeError(
            f"`loss_fn` returned a loss of type {type(loss).__name__}. It must be a scalar JAX "
            "array that depends on the model."
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


def _check_dependence(loss: Array, model: PyTree, *, moved: bool) -> None:
    """Refuses a loss whose gradient, while it is taken, is zero by its program alone."""
    # What depends on a differentiated leaf is in its trace; all else is not.
    traces = {id(_trace(x)) for x in jax.tree.leaves(model) if isinstance(x, _DIFFERENTIATED)}
    if not traces or id(_trace(loss)) in traces:
        return
    what = (
        "The loss that `loss_fn` returned does not depend on any trainable leaf of the model that "
        "it was given: its gradient is exactly zero, and nothing is trained"
    )
    if moved:  # what is not trained may be all that is to be moved on
        logger.warning("%s but the leaves of the model that it returned.", what)
        return
    raise ValueError(
        f"{what}. Compute the loss with the argument `model`, for a model from outside of "
        "`loss_fn` is another one; not only behind `jax.lax.stop_gradient`, an `argmax` or "
        "a comparison; and look at what `trainable` selects."
    )


def _trace(x: Any) -> Any:
    return getattr(x, "_trace", None)


def _check_aux(aux: Any) -> None:
    if not isinstance(aux, dict):
        raise TypeError(
            f"The second value that `loss_fn` returned is of type {type(aux).__name__}. It must "
            "be a dict of scalar metrics."
        )
    for name, value in aux.items():
        if name in RESERVED:
            raise ValueError(
                f"`loss_fn` returned a metric called {name!r} in `aux`, a name that is taken: "
                f"{', '.join(RESERVED)} are reported by `train_step`. Give it another name."
            )
        if not isinstance(value, (jax.Array, np.ndarray, np.generic, int, float)):
            raise TypeError(
                f"`loss_fn` returned aux[{name!r}] of type {type(value).__name__}. Metrics must be "
                "scalars: numbers or arrays without dimensions."
            )
        if jnp.ndim(value):
            raise ValueError(
                f"`loss_fn` returned aux[{name!r}] of shape {jnp.shape(value)}. Metrics must be "
                "scalars: reduce it, or return it from `predict_fn`; a step of your own, compiled "
                "with `redcoast.compile_step`, may return it beside them."
            )


def _moved_on(new_model: PyTree, model: PyTree) -> PyTree:
    """The model that `loss_fn` returned, in the dtypes that the model is stored in."""
    old_structure, new_structure = jax.tree.structure(model), jax.tree.structure(new_model)
    if old_structure != new_structure:
        raise ValueError(
            "The model that `loss_fn` returned has another structure than the one it was given. "
            f"It was given {old_structure} and returned {new_structure}."
        )
    old_leaves = jax.tree_util.tree_leaves_with_path(model)
    for (path, old), new in zip(old_leaves, jax.tree.leaves(new_model), strict=True):
        # A floating array comes back in the dtype that it was cast to for the computation.
        if _kind(old, is_floating(old)) != _kind(new, is_floating(old)):
            where = jax.tree_util.keystr(path, simple=True, separator="/")
            raise ValueError(
                f"The model that `loss_fn` returned holds {_kind(new)} at {where}, where it was "
                f"given {_kind(old)}. Keep shape and dtype."
            )
    return cast_like(new_model, model)


def _kind(leaf: Any, floating: bool = False) -> str:
    if not eqx.is_array(leaf):
        return f"a {type(leaf).__name__}"
    dtype = "floating" if floating and is_floating(leaf) else leaf.dtype
    return f"{dtype}{list(leaf.shape)}"


def _rows(batch: PyTree) -> int:
    """The number of examples of a batch: the weight of a loss that names none."""
    shapes = [leaf.shape for leaf in jax.tree.leaves(batch) if hasattr(leaf, "shape")]
    return next((shape[0] for shape in shapes if shape), 1)
