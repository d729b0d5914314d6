"""The key-value cache of a decoder."""

import functools as ft
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ._attention import Visible, causal_view, count_positions
from ._inputs import Mask


class Cache(eqx.Module):
    """The keys and values of all layers.

    All rows fill the same slots at the same time. The mask is true at slots with real tokens.
    `lengths` are the final numbers of real tokens of the rows, if a model depends on them.
    """

    k: Float[Array, "layers batch length kv_heads head_dim"]
    v: Float[Array, "layers batch length kv_heads value_dim"]
    mask: Bool[Array, "batch length"]
    filled: Int[Array, ""]
    lengths: Int[Array, " batch"] | None = None

    def take(self, rows: Int[Array, " rows"]) -> "Cache":
        """Gathers rows of the batch; a row may be repeated."""
        k, v = (jnp.take(x, rows, axis=1) for x in (self.k, self.v))
        lengths = None if self.lengths is None else jnp.take(self.lengths, rows, axis=0)
        return Cache(k, v, jnp.take(self.mask, rows, axis=0), self.filled, lengths)


def empty_cache(
    layers: int, batch: int, length: int, kv_heads: int, head_dim: int, dtype: Any
) -> Cache:
    """Returns an empty cache for up to `length` tokens in each row."""
    shape = (layers, batch, length, kv_heads, head_dim)
    mask = jnp.zeros((batch, length), bool)
    return Cache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype), mask, jnp.zeros((), jnp.int32))


def admit(cache: Cache, shape: tuple[int, ...], mask: Mask | None) -> Cache:
    """Marks the slots of new tokens of `shape` as filled. `extend` writes their keys and values."""
    real = jnp.ones(shape, bool) if mask is None else mask.astype(bool)
    real = jax.lax.dynamic_update_slice(cache.mask, real, (0, cache.filled))
    return Cache(cache.k, cache.v, real, cache.filled + shape[1], cache.lengths)


def cached_view(
    cache: Cache, new: int
) -> tuple[Int[Array, "batch queries"], Callable[..., Visible]]:
    """Returns the positions of the `new` newest tokens of a cache, and the function that returns
    their causal mask, with a `window` or without."""
    slots = cache.filled - new + jnp.arange(new)
    positions = jnp.take(count_positions(cache.mask), slots, axis=1)
    return positions, ft.partial(causal_view, cache.mask, slots)


def extend(
    cache: Cache | None,
    layer: Int[Array, ""],
    k: Float[Array, "batch new kv_heads head_dim"],
    v: Float[Array, "batch new kv_heads value_dim"],
) -> tuple[Cache | None, Float[Array, "batch keys kv_heads head_dim"], Float[Array, "..."]]:
    """Writes the keys and values of the newest tokens in one layer.

    **Returns:**

    The cache, and the keys and values of the layer in all slots; without a cache, only the new
    ones.
    """
    if cache is None:
        return None, k, v
    at = (layer, 0, cache.filled - k.shape[1], 0, 0)
    # Only the new slots are written: copying a layer would triple the memory traffic of decoding.
    ks = jax.lax.dynamic_update_slice(cache.k, k[None].astype(cache.k.dtype), at)
    vs = jax.lax.dynamic_update_slice(cache.v, v[None].astype(cache.v.dtype), at)
    cache = Cache(ks, vs, cache.mask, cache.filled, cache.lengths)
    layer_k, layer_v = (jax.lax.dynamic_index_in_dim(x, layer, 0, False) for x in (ks, vs))
    return cache, layer_k, layer_v
