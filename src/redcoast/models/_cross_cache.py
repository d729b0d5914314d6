"""The cache of a decoder that attends to a memory, such as an encoder's hidden states."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Integer

from ._attention import full_view, real_tokens
from ._cache import Cache
from ._einsum import Projections, keys_values

Memory = Float[Array, "batch memory width"]
MemoryMask = Bool[Array, "batch memory"] | Integer[Array, "batch memory"]
DecoderMask = Bool[Array, "batch decoder_seq"] | Integer[Array, "batch decoder_seq"]


class CrossCache(eqx.Module):
    """The decoder's own keys and values, and those of the memory, which never change."""

    own: Cache
    k: Float[Array, "layers batch memory heads head_dim"]
    v: Float[Array, "layers batch memory heads head_dim"]
    mask: Bool[Array, "batch memory"]

    def take(self, rows: Int[Array, " rows"]) -> "CrossCache":
        """The cache of these rows of the batch, in this order; a row may come several times."""
        k, v = (jnp.take(x, rows, axis=1) for x in (self.k, self.v))
        return CrossCache(self.own.take(rows), k, v, jnp.take(self.mask, rows, axis=0))

    def moved_on(self, own: Cache) -> "CrossCache":
        """The same memory beside a decoder's own cache that has moved on."""
        return CrossCache(own, self.k, self.v, self.mask)


def read_memory(
    layers: Projections,
    rows: int,
    memory: Float[Array, "batch memory memory_width"],
    mask: MemoryMask | None,
) -> tuple[
    Float[Array, "layers batch memory heads head_dim"],
    Float[Array, "layers batch memory heads head_dim"],
    Bool[Array, "batch memory"],
]:
    """The keys and values of a memory in all layers, and which of it is real.

    **Arguments:**

    - `layers`: the attentions to it.
    - `rows`: how many rows of tokens attend to it.
    - `memory`, `mask`: what is attended to, and which of it is real; all by default.

    **Raises:**

    `ValueError` if the memory does not have as many rows, or if the mask is not of it.
    """
    if memory.shape[0] != rows:
        raise ValueError(
            f"The memory has {memory.shape[0]} rows, but there are {rows} rows of tokens to attend "
            "to it. Give a row of memory for each."
        )
    if mask is not None and mask.shape != memory.shape[:2]:
        raise ValueError(
            f"The memory is of shape {memory.shape}, but its mask is of shape {mask.shape}. It "
            f"must be of shape {memory.shape[:2]}."
        )
    real = jnp.broadcast_to(real_tokens(memory.shape, mask), memory.shape[:2])
    return *jax.vmap(keys_values, in_axes=(0, None))(layers, memory), real


def cross_view(
    shape: tuple[int, ...],
    decoder_shape: tuple[int, ...],
    mask: MemoryMask | None,
    segments: Integer[Array, "batch memory"] | None,
    decoder_segments: Integer[Array, "batch queries"] | None,
) -> Bool[Array, "#batch #queries memory"]:
    """What of the encoder's tokens each of the decoder's sees: all real ones, or those of its
    own segment.

    **Raises:**

    `ValueError` if the two have different numbers of rows, or just one has segments.
    """
    if shape[0] != decoder_shape[0]:
        raise ValueError(
            f"The encoder has {shape[0]} rows of tokens, and the decoder {decoder_shape[0]}. Give "
            "each row of the decoder its own row of the encoder."
        )
    if (segments is None) != (decoder_segments is None):
        raise ValueError(
            "Just one of `segments` and `decoder_segments` is given. Pass both, with one number "
            "for the tokens of a text on either side."
        )
    visible = full_view(real_tokens(shape, mask))
    if segments is None or decoder_segments is None:
        return visible
    return visible & (decoder_segments[:, :, None] == segments[:, None])
