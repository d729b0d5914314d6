"""Attention over a sequence that is split over devices.

Queries get a leading dimension for the parts of the sequence, which the plan splits. Keys and
values are gathered once, and repeated along that dimension without communication: each device has
one copy. Every device computes attention for its own queries, and the gradients of keys and values
are partial sums until the end. If the keys and values of all heads are large, they are gathered for
some heads at a time.
"""

import functools as ft
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ..core._markers import gather_sequence
from ..core._target import sequence_parts
from ..core._tracing import size_of_axis
from ._blockwise import KEPT
from ._inputs import Attended, Keys, Queries, Values
from ._relative import RelativeBias
from ._view import View

Attention = Callable[..., Array]
Bias = RelativeBias | Float[Array, "#batch heads queries keys"] | None
# The maximum size in bytes of keys and values that are gathered for all heads at once.
MOST_GATHERED, MOST_OF_GROUP = 2**31, 2**30


def in_parts(
    attention: Attention, q: Queries, k: Keys, v: Values, view: View, bias: Bias, *, alike: bool
) -> Attended:
    """Computes `attention(q, k, v, view, bias)` for each part of the queries.

    If the number of queries is not divisible by the parts, they are computed together. `alike` is
    whether heads can be computed separately.
    """
    parts = sequence_parts()
    if parts == 1 or q.shape[1] % parts:
        return attention(q, k, v, view, bias)
    run = ft.partial(_in_parts, attention, view=view, bias=bias)
    if alike and (groups := _groups(k)) > 1:
        return _by_heads(run, q, k, v, groups)
    return run(q, k, v)


def _groups(k: Array) -> int:
    """The number of groups of heads, 1 if few bytes are gathered for all of them."""
    heads, bytes_ = k.shape[2], 2 * k.size * k.dtype.itemsize
    # Devices that share the heads have as many of each group.
    share = size_of_axis("model")
    if heads % share:
        share = 1
    if bytes_ <= share * MOST_GATHERED:
        return 1
    # Numbers of groups in which each device has the same number of heads.
    counts = [n for n in range(1, heads // share + 1) if heads % (n * share) == 0]
    return next((n for n in counts if bytes_ <= n * share * MOST_OF_GROUP), counts[-1])


def _by_heads(
    attention: Callable[[Array, Array, Array], Array], q: Array, k: Array, v: Array, groups: int
) -> Array:
    """Computes attention for groups of heads, one by one."""
    # Devices that share the heads have a part of each group.
    heads, each = k.shape[2] // groups, q.shape[2] // k.shape[2]
    q = q.reshape(*q.shape[:2], heads, groups, each, q.shape[3])
    k = k.reshape(*k.shape[:2], heads, groups, k.shape[3])  # (batch, keys, heads, groups, head_dim)
    v = v.reshape(*v.shape[:2], heads, groups, v.shape[3])

    def run(of_group: tuple[Array, Array, Array]) -> Array:
        q, k, v = of_group  # (batch, queries, heads, each, head_dim), and without `each`
        out = attention(q.reshape(*q.shape[:2], -1, q.shape[4]), k, v)
        return out.reshape(*q.shape[:4], v.shape[3])

    # The backward pass gathers again instead of keeping the gathered arrays of each group.
    policy = jax.checkpoint_policies.save_only_these_names(KEPT)
    run = jax.checkpoint(run, policy=policy, prevent_cse=False)
    out = jax.lax.map(run, tuple(jnp.moveaxis(x, 3, 0) for x in (q, k, v)))
    return jnp.moveaxis(out, 0, 3).reshape(*q.shape[:2], -1, v.shape[4])


def _in_parts(
    attention: Attention, q: Array, k: Array, v: Array, view: View, bias: Bias
) -> Attended:
    parts = sequence_parts()
    k, v = (jnp.broadcast_to(gather_sequence(x)[None], (parts, *x.shape)) for x in (k, v))
    real, slots, queries, keys = view.real, view.slots, None, None
    if real is not None:
        real = gather_sequence(real)  # of all keys, on each device
    if slots is None:
        slots = jnp.arange(q.shape[1])  # a part has to know where its queries are
    slots = _split(slots, parts, 0)  # (parts, part)
    if view.segments is not None:
        of_queries, of_keys = map(jnp.asarray, view.segments)
        keys = gather_sequence(of_keys)
        queries = _split(of_queries, parts)  # (parts, batch, part)
    biases, of_distances = None, None
    if isinstance(bias, RelativeBias):
        of_distances = bias.by_distance, gather_sequence(bias.keys)
        biases = _split(bias.queries, parts)
    elif bias is not None:
        biases = _split(bias, parts, 2)  # (parts, batch, heads, part, keys)

    def attend_part(q, k, v, slots, queries, bias):
        segments = None
        if keys is not None:
            segments = queries, keys
        if of_distances is not None:
            by_distance, positions = of_distances
            bias = RelativeBias(by_distance, bias, positions)
        return attention(q, k, v, View(real, slots, segments, view.causal, view.window), bias)

    out = jax.vmap(attend_part)(_split(q, parts), k, v, slots, queries, biases)
    return jnp.moveaxis(out, 0, 1).reshape(*q.shape[:3], v.shape[-1])


def _split(x: Array, parts: int, axis: int = 1) -> Array:
    """Divides an axis into parts, which become the first dimension."""
    shape = (*x.shape[:axis], parts, x.shape[axis] // parts, *x.shape[axis + 1 :])
    return jnp.moveaxis(x.reshape(shape), axis, 0)
