"""The planned program against one device: the same loss and the same gradients."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jaxtyping import PyTree

# Of the largest element of all gradients: differences are not measured against less.
_FLOOR = 1e-3


def verify(
    planned: Callable[..., Any],
    loss_fn: Callable[..., Any],
    shardings: PyTree,
    model: PyTree,
    batch: PyTree,
    key: Any,
    tolerance: int | float,
) -> dict[str, float]:
    """Relative differences of the loss and of each gradient; raises where they are large."""
    expected = _loss_and_grads(loss_fn, _whole(model), batch, key)
    found = _loss_and_grads(planned, _placed(model, shardings), batch, key)
    # Gradients that are zero but for rounding have no scale of their own: that of attention's key
    # bias is, since softmax does not see it.
    largest = max(
        (_largest(value) for name, value in expected.items() if name != "loss"), default=0
    )
    floor = {"loss": 0.0}
    errors = {
        name: _difference(found[name], value, floor.get(name, _FLOOR * largest))
        for name, value in expected.items()
    }
    wrong = {name: error for name, error in errors.items() if not error <= tolerance}
    if wrong:
        shown = ", ".join(f"{name} (by {error:.2g})" for name, error in list(wrong.items())[:8])
        more = f" and {len(wrong) - 8} more" if len(wrong) > 8 else ""
        raise ValueError(
            f"The planned program does not compute what one device does, relative to the largest "
            f"element by more than {tolerance:g}: {shown}{more}. Either the loss depends on how "
            "arrays are split, as with collectives or device numbers in it, or the compiler is at "
            "fault; a mesh with `data` alone, or `overrides`, may avoid it."
        )
    return errors


def _loss_and_grads(
    loss_fn: Callable[..., Any], model: PyTree, batch: PyTree, key: Any
) -> dict[str, np.ndarray]:
    params, rest = eqx.partition(model, eqx.is_inexact_array)

    def loss_of(params: PyTree, batch: PyTree, key: Any) -> Any:
        result = loss_fn(eqx.combine(params, rest), batch, key)
        return result[0] if isinstance(result, tuple) else result

    loss, grads = eqx.filter_jit(jax.value_and_grad(loss_of))(params, batch, key)
    leaves = jax.tree_util.tree_leaves_with_path(grads)
    named = {jax.tree_util.keystr(p, simple=True, separator="/"): np.asarray(x) for p, x in leaves}
    return {"loss": np.asarray(loss)} | named


def _whole(tree: PyTree) -> PyTree:
    device = jax.local_devices()[0]
    return jax.tree.map(lambda x: jax.device_put(x, device) if eqx.is_array(x) else x, tree)


def _placed(tree: PyTree, shardings: PyTree) -> PyTree:
    leaves, structure = jax.tree.flatten(tree)
    places = structure.flatten_up_to(shardings)
    return structure.unflatten(
        [x if s is None else jax.device_put(x, s) for x, s in zip(leaves, places, strict=True)]
    )


def _difference(found: np.ndarray, expected: np.ndarray, floor: int | float) -> int | float:
    scale = max(_largest(expected), floor)
    error = _largest(np.asarray(_wide(found) - _wide(expected)))
    return error / scale if scale else error


def _largest(x: np.ndarray) -> int | float:
    return float(np.max(np.abs(_wide(x)), initial=0.0))


def _wide(x: np.ndarray) -> np.ndarray:
    return x.astype(np.result_type(x.dtype, np.float64) if x.dtype.kind in "fc" else np.float64)
