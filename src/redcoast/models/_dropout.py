"""Dropout, and the splitting of its PRNG keys."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray


def dropout(x: Float[Array, "..."], rate: float, key: PRNGKeyArray | None) -> Float[Array, "..."]:
    """Dropout (Srivastava et al., 2014): zeroes elements with probability `rate` and divides the
    others by `1 - rate`. Returns `x` unchanged if `key` is None."""
    if key is None or rate == 0:
        return x
    keep = jax.random.bernoulli(key, 1 - rate, x.shape)
    return jnp.where(keep, x / (1 - rate), jnp.zeros((), x.dtype))


def split_key(key: PRNGKeyArray | None, count: int) -> list[PRNGKeyArray | None]:
    """Splits a key into a list of `count` keys; None gives a list of None."""
    return [None] * count if key is None else list(jax.random.split(key, count))
