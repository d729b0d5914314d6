import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray


def dropout(x: Float[Array, "..."], rate: float, key: PRNGKeyArray | None) -> Float[Array, "..."]:
    """Zeroes elements with probability `rate` and scales the others up to the same mean
    (Srivastava et al., 2014); without a key, nothing."""
    if key is None or rate == 0:
        return x
    keep = jax.random.bernoulli(key, 1 - rate, x.shape)
    return jnp.where(keep, x / (1 - rate), jnp.zeros((), x.dtype))


def split_key(key: PRNGKeyArray | None, count: int) -> list[PRNGKeyArray | None]:
    """Keys for several dropouts; without a key, none for each."""
    return [None] * count if key is None else list(jax.random.split(key, count))
