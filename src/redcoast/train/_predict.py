"""Predictions of a model in inference mode, as a pure function."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import PRNGKeyArray, PyTree

from ..core._dtypes import tree_to_jax_dtypes
from ..core._errors import check_functions, check_key
from ..core._frames import hide_frames
from ..core._pytree import show_place
from ..core._user_functions import calling
from ..data._per_batch import without_marks
from ..distributed._arrays import allowed_transfers
from ._precision import as_compute_dtype, cast_floating

PredictFn = Callable[[PyTree, PyTree, PRNGKeyArray], PyTree]


@hide_frames
def predict(
    model: PyTree,
    batch: PyTree,
    key: PRNGKeyArray | None = None,
    *,
    predict_fn: PredictFn,
    compute_dtype: Any = None,
) -> PyTree:
    """Computes the predictions for a batch, with the model in inference mode; a pure function.

    **Arguments:**

    - `model`: any PyTree. It is put in inference mode (`eqx.nn.inference_mode`), in which dropout
        is off and BatchNorm uses its running averages.
    - `batch`: PyTree of arrays, batch dimension first.
    - `key`: a JAX key for predictions that use random numbers; `jax.random.key(0)` by default.
    - `predict_fn`: `predict_fn(model, batch, key)` returns a PyTree of arrays, batch dimension
        first.
    - `compute_dtype`: the dtype to cast the floating arrays of the model and the batch to.

    **Returns:**

    The predictions of `predict_fn`.

    **Raises:**

    `ValueError` if the first dimension of a prediction is not the batch size.

    !!! Example

        ```python
        logits = eqx.filter_jit(rc.predict)(model, batch, predict_fn=predict_fn)
        ```
    """
    check_functions(predict_fn=predict_fn)
    compute_dtype = as_compute_dtype(compute_dtype)
    if key is None:
        # Most predictions draw no random numbers.
        with allowed_transfers():
            key = jax.random.key(0)
    check_key(key)
    # Dropout is off, and BatchNorm reads its averages.
    model = cast_floating(eqx.nn.inference_mode(model), compute_dtype)
    batch = without_marks(batch)
    compute_batch = cast_floating(tree_to_jax_dtypes(batch, "the batch", of="batch"), compute_dtype)
    with calling("predict_fn", {"batch": compute_batch}):
        predictions = predict_fn(model, compute_batch, key)
    # A batch may have arrays that have no row for each example, so there may be several sizes.
    rows = {jnp.shape(leaf)[0] for leaf in jax.tree.leaves(batch) if jnp.ndim(leaf)}
    leaves = jax.tree_util.tree_leaves_with_path(predictions)
    if not leaves:
        raise ValueError("`predict_fn` returned no arrays. It must return a row for each example.")
    for path, leaf in leaves:
        shape = jnp.shape(leaf)
        if rows and (not shape or shape[0] not in rows):
            at = ""
            if path:
                at = f" at {show_place(path, 'prediction')}"
            raise ValueError(
                f"`predict_fn` returned an array of shape {shape}{at} for a batch of {min(rows)} "
                "examples. Its first dimension must be the batch: one row for each example."
            )
    return predictions
