"""Attention over a sequence that is split over devices.

Queries get a leading dimension for the parts of the sequence, which the plan splits. Keys and
values are gathered once, and repeated along that dimension, which moves nothing: each device has
one copy. Every device computes attention for its own queries, and the gradients of keys and values
are partial sums until the end.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ..core._sequence_parts import gather_sequence, sequence_parts
from ._relative import RelativeBias
from ._view import View

Attention = Callable[..., Array]


def in_parts(
    attention: Attention,
    q: Float[Array, "batch queries heads head_dim"],
    k: Float[Array, "batch keys kv_heads head_dim"],
    v: Float[Array, "batch keys kv_heads value_dim"],
    view: View,
    bias: RelativeBias | Float[Array, "#batch heads queries keys"] | None,
) -> Float[Array, "batch queries heads value_dim"]:
    """Computes `attention(q, k, v, view, bias)` for each part of the queries.

    A number of queries that the parts do not divide is computed as a whole.
    """
    parts = sequence_parts()
    if parts == 1 or q.shape[1] % parts:
        return attention(q, k, v, view, bias)
    split = lambda x, axis=1: _split(x, parts, axis)
    whole = lambda x: None if x is None else gather_sequence(x)
    k, v = (jnp.broadcast_to(gather_sequence(x)[None], (parts, *x.shape)) for x in (k, v))
    real = whole(view.real)
    slots = split(jnp.arange(q.shape[1]) if view.slots is None else view.slots, 0)
    of_queries, of_keys = view.segments or (None, None)
    of_keys = whole(of_keys)
    rows = None if of_queries is None else split(of_queries)
    if isinstance(bias, RelativeBias):
        keys, rows_of_bias = gather_sequence(bias.keys), split(bias.queries)
        make_bias = lambda queries: RelativeBias(bias.by_distance, queries, keys)
    else:
        rows_of_bias = None if bias is None else split(bias, 2)
        make_bias = lambda part: part

    def one(q: Array, k: Array, v: Array, slots: Array, rows: Any, part: Any) -> Array:
        segments = None if of_keys is None else (rows, of_keys)
        own = View(real, slots, segments, view.causal, view.window)
        return attention(q, k, v, own, None if part is None else make_bias(part))

    out = jax.vmap(one)(split(q), k, v, slots, rows, rows_of_bias)
    return jnp.moveaxis(out, 0, 1).reshape(*q.shape[:3], v.shape[-1])


def _split(x: Array, parts: int, axis: int) -> Array:
    """Divides an axis into parts, which become the first dimension."""
    shape = (*x.shape[:axis], parts, x.shape[axis] // parts, *x.shape[axis + 1 :])
    return jnp.moveaxis(x.reshape(shape), axis, 0)
