"""Initial parameters."""

import math

import jax
from jaxtyping import Array, Float, PRNGKeyArray


def normal(
    key: PRNGKeyArray, shape: tuple[int, ...], *, fan_in: int, scale: float = 1.0
) -> Float[Array, "..."]:
    """Normal with variance `scale**2 / fan_in`, truncated at three standard deviations."""
    return jax.random.truncated_normal(key, -3, 3, shape) * (scale / math.sqrt(fan_in))
