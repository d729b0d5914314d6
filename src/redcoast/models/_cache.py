"""The key-value cache of a decoder."""

import dataclasses
import functools as ft
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PyTree

from ..core._pytree import map_where
from ._attention import Visible, causal_view, count_positions
from ._check_tokens import is_known
from ._inputs import AnyArray, Keys, Mask


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

    def layer(self, index: int) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
        """Returns the keys and values of one layer."""
        return self.k[index], self.v[index]

    def take(self, rows: Int[Array, " rows"]) -> "Cache":
        """Gathers rows of the batch; a row may be repeated."""
        k, v = jnp.take(self.k, rows, axis=1), jnp.take(self.v, rows, axis=1)
        lengths = self.lengths
        if lengths is not None:
            lengths = jnp.take(lengths, rows, axis=0)
        return Cache(k, v, jnp.take(self.mask, rows, axis=0), self.filled, lengths)


class CacheByLayer(Cache):
    """A `Cache` with arrays for each layer, for programs without a loop over layers.

    The dimensions are in the order in which the products of attention read them. XLA would
    otherwise transpose all keys and values in each step.
    """

    k: tuple[Float[Array, "batch kv_heads head_dim length"], ...]  # pyright: ignore
    v: tuple[Float[Array, "batch kv_heads length value_dim"], ...]  # pyright: ignore

    def layer(self, index: int) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
        """Returns the keys and values of one layer."""
        k, v = self.k[index], self.v[index]
        return jnp.transpose(k, (0, 3, 1, 2)), jnp.transpose(v, (0, 2, 1, 3))

    def take(self, rows: Int[Array, " rows"]) -> "CacheByLayer":
        """Gathers rows of the batch; a row may be repeated."""
        rest = self.k, self.v, self.mask, self.lengths
        k, v, mask, lengths = jax.tree.map(lambda x: jnp.take(x, rows, axis=0), rest)
        return CacheByLayer(k, v, mask, self.filled, lengths)


# The number of a layer. It is known in a program without a loop over layers.
LayerIndex = Int[Array, ""] | np.ndarray | np.integer | int


def _is_cache(x: object) -> bool:
    return isinstance(x, Cache)


def _map_caches(fn: Callable[[Cache], Cache], tree: PyTree) -> PyTree:
    """Applies a function to each `Cache` in a tree."""
    return map_where(_is_cache, fn, tree, is_leaf=_is_cache)


def split_layers(cache: PyTree) -> PyTree:
    """Replaces each `Cache` in a tree by a `CacheByLayer`."""

    def split(x: Cache) -> CacheByLayer:
        if isinstance(x, CacheByLayer):
            return x
        k: list[Array] = []
        v: list[Array] = []
        # There may be no layers, as of windows if no layer of a Gemma 4 has one.
        for i in range(x.k.shape[0]):
            # An array as an index, so that all layers share one compiled program.
            k_of_layer, v_of_layer = _layer_of(x.k, x.v, np.int32(i))
            k.append(k_of_layer)
            v.append(v_of_layer)
        return CacheByLayer(tuple(k), tuple(v), x.mask, x.filled, x.lengths)

    return _map_caches(split, cache)


@jax.jit  # one program for all layers, which compiles in less time than a program of all
def _layer_of(k: Array, v: Array, index: Int[Array, ""]) -> tuple[Array, Array]:
    k = jax.lax.dynamic_index_in_dim(k, index, 0, False)
    v = jax.lax.dynamic_index_in_dim(v, index, 0, False)
    # (batch, kv_heads, head_dim, slots), and (batch, kv_heads, slots, value_dim)
    return jnp.transpose(k, (0, 2, 3, 1)), jnp.transpose(v, (0, 2, 1, 3))


def at_slot(cache: PyTree, slot: Int[AnyArray, ""]) -> PyTree:
    """Sets the slot that the next token fills, of each `Cache` in a tree."""
    return _map_caches(lambda x: dataclasses.replace(x, filled=jnp.asarray(slot)), cache)


def move_slots(cache: PyTree, by: Int[AnyArray, ""]) -> PyTree:
    """Moves the contents of all slots to the front by `by` slots, of each `Cache` in a tree."""

    def move(x: Cache) -> Cache:
        of_k, of_v = 2, 2  # the dimensions of slots
        if isinstance(x, CacheByLayer):
            of_k = 3
        k = jax.tree.map(lambda k: jnp.roll(k, -by, axis=of_k), x.k)
        v = jax.tree.map(lambda v: jnp.roll(v, -by, axis=of_v), x.v)
        # The slots that come around from the front are not filled.
        mask = jnp.roll(x.mask, -by, axis=1)
        mask = mask & (jnp.arange(mask.shape[1]) < mask.shape[1] - by)[None]
        return dataclasses.replace(x, k=k, v=v, mask=mask, filled=x.filled - by)

    return _map_caches(move, cache)


def has_slots_to_move(cache: PyTree) -> bool:
    """Whether a tree has a `Cache`, so that its slots can be moved."""
    return any(map(_is_cache, jax.tree.leaves(cache, is_leaf=_is_cache)))


def empty_cache(
    layers: int, batch: int, length: int, kv_heads: int, head_dim: int, dtype: np.dtype
) -> Cache:
    """Returns an empty cache for up to `length` tokens in each row."""
    shape = (layers, batch, length, kv_heads, head_dim)
    mask = jnp.zeros((batch, length), bool)
    return Cache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype), mask, jnp.zeros((), jnp.int32))


def admit(cache: PyTree, shape: tuple[int, ...], mask: Mask | None) -> PyTree:
    """Marks the slots of new tokens of `shape` as filled, of each `Cache` in a tree. `extend`
    writes their keys and values.

    Raises `ValueError` if the cache has another number of rows, or if this process knows that it
    has too few slots.
    """
    real = jnp.ones(shape, bool)
    if mask is not None:
        real = jnp.broadcast_to(mask.astype(bool), shape)

    def fill(x: Cache) -> Cache:
        _check_room(x, shape)
        filled = jax.lax.dynamic_update_slice(x.mask, real, (0, x.filled))  # (batch, length)
        return dataclasses.replace(x, mask=filled, filled=x.filled + shape[1])

    return _map_caches(fill, cache)


def _check_room(cache: Cache, shape: tuple[int, ...]) -> None:
    (rows, length), (new_rows, new) = cache.mask.shape, shape
    if new_rows != rows:
        raise ValueError(
            f"The cache has {rows} rows, but there are {new_rows} rows of new tokens. Create it "
            f"with `init_cache({new_rows}, length)`."
        )
    filled = 0
    if is_known(cache.filled):
        filled = int(jax.device_get(cache.filled))
    # A slice beyond the last slot would be written before it, over other tokens.
    if filled + new > length:
        raise ValueError(
            f"The cache has {length} slots, of which {filled} are filled, and there are {new} new "
            f"tokens. Create it with `init_cache({rows}, length)` of a larger `length`."
        )


def cached_view(
    caches: PyTree, new: int
) -> tuple[Int[Array, "batch queries"], Callable[..., Visible]]:
    """Returns the positions of the `new` newest tokens of a cache, and the function that returns
    their causal mask, with a `window` or without. Each `Cache` in a tree has the same tokens."""
    cache, *_ = filter(_is_cache, jax.tree.leaves(caches, is_leaf=_is_cache))
    slots = cache.filled - new + jnp.arange(new)  # (new,)
    # Padding does not count, so a slot has other positions in other rows.
    positions = jnp.take(count_positions(cache.mask), slots, axis=1)
    return positions, ft.partial(causal_view, cache.mask, slots)


def extend(
    cache: Cache | None,
    layer: LayerIndex,
    k: Float[Array, "batch new kv_heads head_dim"],
    v: Float[Array, "batch new kv_heads value_dim"],
) -> tuple[Cache | None, Keys, Float[Array, "..."]]:
    """Writes the keys and values of the newest tokens in one layer.

    Returns the cache, and the keys and values of the layer in all slots; without a cache, only the
    new ones.
    """
    if cache is None:
        return None, k, v
    start = cache.filled - k.shape[1]  # `admit` has counted the new tokens
    if isinstance(cache, CacheByLayer):
        i = int(layer)
        of_k = jnp.transpose(k, (0, 2, 3, 1)).astype(cache.k[i].dtype)  # (batch, heads, dim, new)
        of_v = jnp.transpose(v, (0, 2, 1, 3)).astype(cache.v[i].dtype)  # (batch, heads, new, dim)
        layer_k = jax.lax.dynamic_update_slice(cache.k[i], of_k, (0, 0, 0, start))
        layer_v = jax.lax.dynamic_update_slice(cache.v[i], of_v, (0, 0, start, 0))
        ks = (*cache.k[:i], layer_k, *cache.k[i + 1 :])
        vs = (*cache.v[:i], layer_v, *cache.v[i + 1 :])
        cache = dataclasses.replace(cache, k=ks, v=vs)
        return cache, *cache.layer(i)
    at = (layer, 0, start, 0, 0)
    # Only the new slots are written: copying a layer would triple the memory traffic of decoding.
    ks = jax.lax.dynamic_update_slice(cache.k, k[None].astype(cache.k.dtype), at)
    vs = jax.lax.dynamic_update_slice(cache.v, v[None].astype(cache.v.dtype), at)
    layer_k = jax.lax.dynamic_index_in_dim(ks, layer, 0, False)
    layer_v = jax.lax.dynamic_index_in_dim(vs, layer, 0, False)
    return dataclasses.replace(cache, k=ks, v=vs), layer_k, layer_v
