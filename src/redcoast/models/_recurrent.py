"""What layers with a state share: convolutions over the latest tokens, chunks of a sequence, the
decays between its tokens, and the states of one layer in a cache of all."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PyTree

from ._cache import LayerIndex


def convolve(
    x: Float[Array, "batch seq channels"],
    kernel: Float[Array, "taps channels"],
    bias: Float[Array, " channels"] | None,
    past: Float[Array, "batch past channels"] | None,
) -> tuple[Float[Array, "batch seq channels"], Float[Array, "batch past channels"]]:
    """Returns the convolution of each channel over the latest tokens, and SiLU; and the last
    inputs, which are the `past` of the tokens that follow. By default, the past is zero."""
    taps, length = kernel.shape[0], x.shape[1]
    if past is None:
        past = jnp.zeros((x.shape[0], taps - 1, x.shape[2]), x.dtype)
    x = jnp.concatenate([past, x], axis=1)  # (batch, past + seq, channels)
    # The last tap is of the token itself.
    y = sum(x[:, tap : tap + length] * kernel[tap][None, None] for tap in range(taps))
    if bias is not None:
        y = y + bias[None, None]
    return jax.nn.silu(y), x[:, length:]


def to_chunks(
    x: Float[Array, "batch seq ..."], chunk: int, *shape: int
) -> Float[Array, "batch chunks chunk ..."]:
    """Divides rows into chunks of `chunk` tokens, of which each has features of `shape`. Zeros are
    appended up to a multiple of `chunk` tokens."""
    # Zeros at the end are tokens without a step: they change no state.
    missing = -x.shape[1] % chunk
    if missing:
        x = jnp.pad(x, ((0, 0), (0, missing), *((0, 0),) * (x.ndim - 2)))
    return x.reshape(x.shape[0], x.shape[1] // chunk, chunk, *shape)


def decays_between(decays: Float[Array, "*rows seq"]) -> Float[Array, "*rows seq seq"]:
    """Returns `exp(decays[i] - decays[j])` for each pair of tokens, and 0 where j is behind i.

    `decays` are the logarithms of the decays since a common start.
    """
    # Masked before the exponential: a difference above the diagonal may overflow.
    order: Bool[Array, "seq seq"] = jnp.tril(jnp.ones((decays.shape[-1],) * 2, bool))
    order = order.reshape((1,) * (decays.ndim - 1) + order.shape)
    return jnp.exp(jnp.where(order, decays[..., :, None] - decays[..., None, :], -jnp.inf))


def states_of_layer(states: PyTree, index: LayerIndex) -> PyTree:
    """Returns the states of one layer, with a leading dimension of 1."""
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, index, 0, True), states)


def with_layer(states: PyTree, of_layer: PyTree, index: LayerIndex) -> PyTree:
    """Writes the states of one layer, which have a leading dimension of 1."""

    def put(x: Array, new: Array) -> Array:
        return jax.lax.dynamic_update_slice_in_dim(x, new.astype(x.dtype), index, 0)

    return jax.tree.map(put, states, of_layer)
