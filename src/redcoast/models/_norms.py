import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ._attention import wide


def rms_norm(
    x: Float[Array, "*rows width"], scale: Float[Array, " width"], eps: float
) -> Float[Array, "*rows width"]:
    """Divides by the root of the mean square (Zhang and Sennrich, 2019), and scales."""
    y = x.astype(wide(x.dtype))
    y = y * jax.lax.rsqrt(jnp.mean(y**2, axis=-1, keepdims=True) + eps)
    return y.astype(x.dtype) * _along(scale, x)


def layer_norm(
    x: Float[Array, "*rows width"],
    scale: Float[Array, " width"],
    shift: Float[Array, " width"],
    eps: float,
) -> Float[Array, "*rows width"]:
    """Subtracts the mean, divides by the deviation (Ba et al., 2016), scales and shifts."""
    y = x.astype(wide(x.dtype))
    y = y - jnp.mean(y, axis=-1, keepdims=True)
    y = y * jax.lax.rsqrt(jnp.mean(y**2, axis=-1, keepdims=True) + eps)
    return y.astype(x.dtype) * _along(scale, x) + _along(shift, x)


def _along(vector: Array, x: Array) -> Array:
    # Said in full, since ranks are not promoted silently.
    return vector.reshape((1,) * (x.ndim - 1) + vector.shape)
