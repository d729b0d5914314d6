"""The cache of a decoder with cross-attention to a memory, such as an encoder's hidden states."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Integer

from ._attention import Visible, as_array, full_view, real_tokens, segment_view
from ._cache import Cache
from ._einsum import Projections, keys_values
from ._inputs import AnyArray

Memory = Float[Array, "batch memory width"]
MemoryMask = Bool[AnyArray, "#batch memory"] | Integer[AnyArray, "#batch memory"]
DecoderMask = Bool[AnyArray, "#batch decoder_seq"] | Integer[AnyArray, "#batch decoder_seq"]


class CrossCache(eqx.Module):
    """The decoder's own cache, and the constant keys and values of the memory."""

    own: Cache
    k: Float[Array, "layers batch memory heads head_dim"]
    v: Float[Array, "layers batch memory heads head_dim"]
    mask: Bool[Array, "batch memory"]

    def take(self, rows: Int[Array, " rows"]) -> "CrossCache":
        """Gathers rows of the batch; a row may be repeated."""
        k, v = (jnp.take(x, rows, axis=1) for x in (self.k, self.v))
        return CrossCache(self.own.take(rows), k, v, jnp.take(self.mask, rows, axis=0))


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
    """Computes the keys and values of a memory in all layers, and its mask.

    The mask is 1 where the memory is not padding (everywhere by default). Raises `ValueError` if
    the memory has another number of rows than `rows`, or if the mask does not match it.
    """
    if memory.shape[0] != rows:
        raise ValueError(
            f"The memory has {memory.shape[0]} rows, but there are {rows} rows of tokens that "
            "attend to it. Pass one row of memory for each row of tokens."
        )
    if mask is not None and mask.shape not in (memory.shape[:2], (1, memory.shape[1])):
        raise ValueError(
            f"The memory has shape {memory.shape}, but its mask has shape {mask.shape}. The mask "
            f"must have shape {memory.shape[:2]}, or one row for all."
        )
    # (batch, memory), with a row of its own for each, so that `take` can gather rows.
    real = jnp.broadcast_to(as_array(real_tokens(memory.shape, mask)), memory.shape[:2])
    # Over the layers, whose projections are stacked.
    return *jax.vmap(keys_values, in_axes=(0, None))(layers, memory), real


def cross_view(
    shape: tuple[int, ...],
    decoder_shape: tuple[int, ...],
    mask: MemoryMask | None,
    segments: Integer[AnyArray, "#batch memory"] | None,
    decoder_segments: Integer[AnyArray, "#batch queries"] | None,
) -> Visible:
    """Returns the cross-attention mask: each decoder token sees the encoder's real tokens, of its
    own segment if there are segments.

    Raises `ValueError` if the two have different numbers of rows, or if only one of them has
    segments.
    """
    if shape[0] != decoder_shape[0]:
        raise ValueError(
            f"The encoder's tokens have {shape[0]} rows, but the decoder's have "
            f"{decoder_shape[0]}. Pass one row of each for every example."
        )
    if (segments is None) != (decoder_segments is None):
        raise ValueError(
            "Only one of `segments` and `decoder_segments` is given. Pass both, with the same "
            "number for tokens that belong together."
        )
    real = real_tokens(shape, mask)
    if segments is None or decoder_segments is None:
        return full_view(real)
    return segment_view(real, decoder_segments, segments)
