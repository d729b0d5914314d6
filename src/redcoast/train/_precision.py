"""Casts a model and a batch to the dtype that a loss is computed in."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, ArrayLike, PyTree

from ..core._pytree import layer_states, map_where

# The dtype that a model computes in; `None` for that of its parameters.
ComputeDtype = DTypeLike | None
# Names of dtypes in other libraries.
_NAMES = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "f16": "float16",
    "fp32": "float32",
    "f32": "float32",
    "fp64": "float64",
    "f64": "float64",
}


def as_compute_dtype(dtype: Any) -> ComputeDtype:
    """Returns the dtype of a computation from a dtype or a name such as `"bf16"`.

    Raises `ValueError` if the dtype is not floating; `TypeError` if it is not a dtype.
    """
    if dtype is None:
        return None
    named = dtype
    if isinstance(dtype, str):
        named = _NAMES.get(dtype, dtype)
    wrong = (
        "`compute_dtype` must be a floating dtype such as jnp.bfloat16, or its name, but is "
        f"{dtype!r}."
    )
    try:
        kind = jnp.dtype(named)
    except TypeError as error:
        raise TypeError(wrong) from error
    if not jnp.issubdtype(kind, jnp.floating):
        raise ValueError(wrong)
    if isinstance(dtype, str):
        return kind
    return dtype


def cast_floating(tree: PyTree, dtype: Any) -> PyTree:
    """Casts the floating arrays of a tree to `dtype`, unless that is `None`."""
    if dtype is None:
        return tree
    return map_where(is_floating, lambda x: x.astype(dtype), tree)


def has_floating_state(model: PyTree) -> bool:
    """Returns whether a model contains running averages of stateful layers."""
    return any(map(is_floating, jax.tree.leaves(layer_states(model))))


def is_floating(x: PyTree) -> bool:
    # NumPy scalars have a dtype too. Python floats are weakly typed and need no cast.
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.floating)


def widen(x: ArrayLike) -> Array:
    """Casts half precision and integers, which are too coarse for sums, to float32."""
    if not isinstance(x, jax.Array):
        x = np.asarray(x)
        # JAX would cast large counts to int32, in which they are other numbers.
        if x.dtype.kind in "iuO":
            x = x.astype(np.float32)
    x = jnp.asarray(x)
    wide = jnp.issubdtype(x.dtype, jnp.inexact) and x.dtype.itemsize >= 4
    if wide:
        return x
    return x.astype(jnp.float32)
