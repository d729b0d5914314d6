"""Checks of the arguments of losses, and the dtype that they compute in."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, PyTree, Real

from ..core._errors import check_kind, check_number, wrong_type

# A coefficient of a loss. An array may be traced, as one that a schedule computes in a step.
Number = int | float | Real[Array | np.ndarray, ""]


def check_arrays(**arrays: object) -> None:
    """Raises `TypeError` if a value is no array, such as a list."""
    for name, x in arrays.items():
        check_kind(name, x, (jax.Array, np.ndarray), "an array of JAX or NumPy")


def known_number(name: str, value: PyTree) -> int | float | None:
    """Returns the value of a coefficient, or None if it is traced.

    Raises `TypeError` if it is neither a number nor an array of one.
    """
    if not isinstance(value, jax.Array | np.ndarray):
        check_number(name, value)
        return value
    is_real = jnp.issubdtype(value.dtype, jnp.floating) or jnp.issubdtype(value.dtype, jnp.integer)
    if value.shape != () or not is_real:
        raise wrong_type(name, value, "a number, or an array of shape () with one")
    if isinstance(value, Tracer):
        return None
    return jax.device_get(value).item()


def check_coefficient(
    name: str, value: PyTree, *, above: int | float | None = None, least: int | float | None = None
) -> None:
    """Raises unless a coefficient is a finite number within the limits, or is traced."""
    number = known_number(name, value)
    if number is not None:
        check_number(name, number, above=above, least=least, finite=True)


def at_least_float32(x: Array) -> Array:
    """Converts to float32, unless the dtype is that or wider."""
    # Rewards may be integers, which NumPy would promote to float64.
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return x.astype(np.float32)
    # float64 stays, for users who enable it.
    return x.astype(np.promote_types(x.dtype, np.float32))
