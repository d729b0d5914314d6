from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from ..core._pytree import layer_states


def check_compute_dtype(dtype: Any) -> None:
    """Raises an error for dtypes that are not floating."""
    if dtype is not None and not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(
            f"`compute_dtype` must be a floating dtype such as jnp.bfloat16, but is {dtype!r}."
        )


def cast_floating(tree: PyTree, dtype: Any) -> PyTree:
    """Casts the floating arrays of a tree to `dtype`, unless that is `None`."""
    if dtype is None:
        return tree
    return jax.tree.map(lambda x: x.astype(dtype) if is_floating(x) else x, tree)


def has_floating_state(model: PyTree) -> bool:
    """Returns whether a model contains running averages of stateful layers."""
    return any(map(is_floating, jax.tree.leaves(layer_states(model))))


def is_floating(x: Any) -> bool:
    # NumPy scalars have a dtype too. Python floats are weakly typed and need no cast.
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.floating)


def widen(x: Any) -> Array:
    """Casts half precision and integers, which are too coarse for sums, to float32."""
    x = jnp.asarray(x)
    wide = jnp.issubdtype(x.dtype, jnp.inexact) and x.dtype.itemsize >= 4
    return x if wide else x.astype(jnp.float32)
