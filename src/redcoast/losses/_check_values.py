"""Checks of the arguments of losses, and the dtype that they compute in."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from ..core._errors import check_kind, check_number


def check_arrays(**arrays: object) -> None:
    """Raises `TypeError` if a value is no array, such as a list."""
    for name, x in arrays.items():
        check_kind(name, x, (jax.Array, np.ndarray), "an array of JAX or NumPy")


def check_above_zero(**options: int | float) -> None:
    for name, value in options.items():
        check_number(name, value)
        if not 0 < value < np.inf:  # also for NaN
            raise ValueError(f"`{name}` is {value}, but must be positive and finite.")


def check_not_negative(**options: int | float) -> None:
    for name, value in options.items():
        check_number(name, value)
        if not 0 <= value < np.inf:  # also for NaN
            raise ValueError(f"`{name}` is {value}, but must be at least 0 and finite.")


def at_least_float32(x: Array) -> Array:
    """Converts to float32, unless the dtype is that or wider."""
    # Rewards may be integers, which NumPy would promote to float64.
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return x.astype(np.float32)
    # float64 stays, for users who enable it.
    return x.astype(np.promote_types(x.dtype, np.float32))
