"""Attention over a sequence that is split over devices.

Queries get a leading dimension for the parts of the sequence, which the plan splits. Keys and
values are gathered once, and repeated along that dimension without communication: each device has
one copy. Every device computes attention for its own queries, and the gradients of keys and values
are partial sums until the end. If the keys and values of all heads are large, they are gathered for
some heads at a time.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ..core._markers import gather_sequence
from ..core._sequence_parts import sequence_parts
from ..core._tracing import sizes_of_axes
from ._blockwise import KEPT
from ._relative import RelativeBias
from ._view import View

Attention = Callable[..., Array]
# The maximum size in bytes of keys and values that are gathered for all heads at once.
MOST_GATHERED, MOST_OF_GROUP = 2**31, 2**30


def in_parts(
    attention: Attention,
    q: Float[Array, "batch queries heads head_dim"],
    k: Float[Array, "batch keys kv_heads head_dim"],
    v: Float[Array, "batch keys kv_heads value_dim"],
    view: View,
    bias: RelativeBias | Float[Array, "#batch heads queries keys"] | None,
    *,
    alike: bool,
) -> Float[Array, "batch queries heads value_dim"]:
    """Computes `attention(q, k, v, view, bias)` for each part of the queries.

    If the number of queries is not divisible by the parts, they are computed together. `alike` is
    whether heads can be computed separately.
    """
    parts = sequence_parts()
    if parts == 1 or q.shape[1] % parts:
        return attention(q, k, v, view, bias)
    if alike and (groups := _groups(k)) > 1:
        return _by_heads(lambda q, k, v: _in_parts(attention, q, k, v, view, bias), q, k, v, groups)
    return _in_parts(attention, q, k, v, view, bias)


def _groups(k: Array) -> int:
    """The number of groups of heads, 1 if few bytes are gathered for all of them."""
    heads, bytes_ = k.shape[2], 2 * k.size * k.dtype.itemsize
    # Devices that share the heads have as many of each group.
    share = sizes_of_axes().get("model", 1)
    share = share if heads % share == 0 else 1
    if bytes_ <= share * MOST_GATHERED:
        return 1
    counts = [n for n in range(1, heads // share + 1) if heads % (n * share) == 0]
    return next((n for n in counts if bytes_ <= n * share * MOST_OF_GROUP), counts[-1])


def _by_heads(
    attention: Callable[[Array, Array, Array], Array], q: Array, k: Array, v: Array, groups: int
) -> Array:
    """Computes attention for groups of heads, one by one."""
    # Devices that share the heads have a part of each group.
    shape = (k.shape[2] // groups, groups)
    grouped = lambda x, *own: jnp.moveaxis(x.reshape(*x.shape[:2], *shape, *own, x.shape[3]), 3, 0)
    each = q.shape[2] // k.shape[2]

    def run(given: tuple[Array, Array, Array]) -> Array:
        q, k, v = given
        merged = q.reshape(*q.shape[:2], -1, q.shape[4])
        return attention(merged, k, v).reshape(*q.shape[:4], v.shape[3])

    # The backward pass gathers again instead of keeping the gathered arrays of each group.
    policy = jax.checkpoint_policies.save_only_these_names(KEPT)
    run = jax.checkpoint(run, policy=policy, prevent_cse=False)
    out = jax.lax.map(run, (grouped(q, each), grouped(k), grouped(v)))
    return jnp.moveaxis(out, 0, 3).reshape(*q.shape[:3], v.shape[3])


def _in_parts(
    attention: Attention, q: Array, k: Array, v: Array, view: View, bias: Any
) -> Float[Array, "batch queries heads value_dim"]:
    parts = sequence_parts()
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
