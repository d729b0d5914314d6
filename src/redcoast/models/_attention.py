"""Token positions, attention masks and scaled dot-product attention."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Integer

from ..core._markers import gather_sequence
from ..core._target import sequence_parts, target, target_of
from ..core._tracing import size_of_axis
from ._basic import dropout, wide
from ._blockwise import attend_in_blocks
from ._inputs import AnyArray, Attended, Key, Keys, Mask, Queries, Segments, Values
from ._parts import Bias, in_parts
from ._relative import RelativeBias
from ._tpu_attention import FEWEST, attend_in_splash, fits_splash
from ._view import View, has_many_pairs


@dataclass(frozen=True)
class AllReal:
    """The mask of rows of `length` tokens without padding, which needs no array."""

    length: int

    @property
    def shape(self) -> tuple[int, int]:
        return (1, self.length)


Real = Bool[Array, "#batch seq"] | AllReal
# A `View` if there are many query-key pairs.
Visible = Bool[Array, "#batch #queries keys"] | View
# Cards before Ampere have no kernel of cuDNN for attention.
_OLDEST_WITH_KERNEL = 8
# The maximum number of pairs for which cuDNN's kernel gets a mask for each pair.
_MOST_MASKED = 8192 * 8192


def real_tokens(shape: tuple[int, ...], mask: Mask | None) -> Real:
    """Returns the mask as booleans. Without a mask, all tokens are real."""
    if mask is None:
        return AllReal(shape[1])
    return jnp.asarray(mask, bool)


def count_positions(real: Real, segments: Segments | None = None) -> Int[Array, "#batch seq"]:
    """Counts positions over the real tokens of each row or segment, from 0."""
    real = as_array(real)
    counts = jnp.cumsum(real, axis=1)  # (batch, seq), from 1
    if segments is not None:
        # Subtracts the tokens that were counted before the start of the segment.
        # (batch, seq): the first token of each segment
        begins = jnp.diff(segments, axis=1, prepend=segments[:, :1] - 1) != 0
        before = jnp.where(begins, counts - real.astype(counts.dtype), 0)
        counts = counts - jax.lax.cummax(before, axis=1)
    # Padding before the first token has a count of 0, and would otherwise get the position -1.
    return jnp.maximum(counts - 1, 0)


def as_array(real: Real) -> Bool[Array, "#batch seq"]:
    """Returns an array that is created in the program, so that it is not a constant of it."""
    if isinstance(real, AllReal):
        return jnp.ones(real.shape, bool)
    return real


def _unless_known(real: Real) -> Bool[Array, "#batch seq"] | None:
    if isinstance(real, AllReal):
        return None
    return real


def causal_view(
    real: Real,
    slots: Int[Array, " queries"] | None = None,
    *,
    segments: Integer[AnyArray, "batch keys"] | None = None,
    window: int | None = None,
) -> Visible:
    """Returns a causal mask: each query sees the real keys in its own slot and earlier ones.

    - `real`: which keys are real tokens.
    - `slots`: the slot of each query among the keys; by default queries and keys are the same.
    - `segments`: for rows with several packed sequences, the number of the sequence that each token
        belongs to.
    - `window`: the number of slots that a query sees, including its own; no limit by default.
    """
    both, queries = None, real.shape[1]
    if segments is not None:
        both = (segments, segments)
    if slots is not None:
        queries = slots.shape[0]
    view = View(_unless_known(real), slots, both, causal=True, window=window)
    return _view_or_array(view, queries, real.shape[1])


def full_view(
    real: Real,
    segments: Integer[AnyArray, "#batch keys"] | None = None,
    *,
    window: int | None = None,
) -> Visible:
    """Returns a bidirectional mask: each query sees all real keys of its row or segment. With
    `window`, it sees this many slots in each direction, including its own."""
    length = real.shape[1]
    both = None
    if segments is not None:
        both = (segments, segments)
    view = View(_unless_known(real), segments=both, window=window)
    if segments is None and window is None and not _keeps_view(view, length, length):
        return as_array(real)[:, None]  # one row for all queries
    return _view_or_array(view, length, length)


def segment_view(
    real: Real, queries: Integer[AnyArray, "batch queries"], keys: Integer[AnyArray, "batch keys"]
) -> Visible:
    """Returns a bidirectional mask: each query sees all real keys with the same segment."""
    view = View(_unless_known(real), segments=(queries, keys))
    return _view_or_array(view, queries.shape[1], keys.shape[1])


def _view_or_array(view: View, queries: int, keys: int) -> Visible:
    if _keeps_view(view, queries, keys):
        return view
    return view.visible(queries, keys)


def _keeps_view(view: View, queries: int, keys: int) -> bool:
    """Whether attention has a use for the view: there are many pairs, or a kernel that skips blocks
    without visible keys."""
    if has_many_pairs(queries, keys):
        return True
    if view.slots is not None or min(queries, keys) == 1:
        return False
    if target().platform == "tpu":
        return min(queries, keys) >= FEWEST
    return target().capability >= _OLDEST_WITH_KERNEL


def attend(
    q: Queries,
    k: Keys,
    v: Values,
    *,
    visible: Visible,
    bias: Float[Array, "#batch heads queries keys"] | RelativeBias | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Float[Array, " heads"] | None = None,
    rate: float = 0.0,
    key: Key = None,
) -> Attended:
    """Scaled dot-product attention (Vaswani et al., 2017, equation 1) with grouped queries
    (Ainslie et al., 2023).

    If there are many query-key pairs, a kernel (splash attention on TPUs, cuDNN's on GPUs) or
    `attend_in_blocks` computes it without an array of all pairs.

    - `q`, `k`, `v`: queries, keys and values. Each key head serves `heads / kv_heads` query heads.
    - `visible`: which keys each query sees. A query that sees no key has a finite, meaningless
        output.
    - `bias`: added to the scores.
    - `scale`: the factor of the scores, `1 / sqrt(head_dim)` by default.
    - `softcap`: a soft cap of the scores, `softcap * tanh(scores / softcap)`.
    - `sinks`: the score of an additional key in each head, which has no value and is seen by all
        queries (Xiao et al., 2023, <https://arxiv.org/abs/2309.17453>).
    - `rate`, `key`: dropout rate of the attention weights, and its PRNG key; no dropout without a
        key.
    """
    usual: float = q.shape[-1] ** -0.5
    if scale is None:
        scale = usual
    scale = float(scale)
    view = None  # if there is an array of all pairs
    if isinstance(visible, View):
        view = visible
    elif has_many_pairs(q.shape[1], k.shape[1]) and visible.shape[1] == 1:
        view = View(visible[:, 0])
    is_plain = sinks is None and (key is None or rate == 0)
    # Over a sequence that is split, a kernel would need all queries on one device.
    if is_plain and not _is_split(q):
        on_tpu = target().platform == "tpu"
        if bias is None and view is not None and on_tpu and fits_splash(q, k, v, view):
            return attend_in_splash(q, k, v, view, scale=scale, softcap=softcap)
        if softcap is None and _has_kernel(q, k, v) and _takes_mask(view, bias, q, k):
            if view is not None:
                visible = view
            return _attend_in_kernel(q, k, v, visible, bias, scale)
    if view is not None and has_many_pairs(q.shape[1], k.shape[1]):
        options: Any = {"scale": scale, "softcap": softcap, "rate": rate, "key": key}
        options["sinks"] = sinks
        blocks = lambda q, k, v, view, bias: attend_in_blocks(q, k, v, view, bias=bias, **options)
        return in_parts(blocks, q, k, v, view, bias, alike=is_plain and bias is None)
    if isinstance(visible, View):
        visible = visible.visible(q.shape[1], k.shape[1])
    if _is_split(q):
        k, v = gather_sequence(k), gather_sequence(v)
    # The same as `jax.nn.dot_product_attention`, which would compute the softmax of float64 in
    # float32. Queries are scaled before the product so that float16 does not overflow. There is a
    # dimension for groups only if there are fewer key heads, since XLA copies arrays for it, or on
    # a TPU, where fewer bytes are accessed with it.
    g = "g"
    if q.shape[2] == k.shape[2] and target().platform != "tpu":
        g = ""
    # (batch, queries, kv_heads, group, head_dim), or without the group
    group = [q.shape[2] // k.shape[2]] * len(g)
    grouped = (q * scale).reshape(*q.shape[:2], k.shape[2], *group, q.shape[3])
    # One query has no dimension of queries: with it, XLA for CPUs would multiply keys by queries,
    # and not queries by keys, which takes several times as long.
    s = "s"
    if q.shape[1] == 1 and target().platform == "cpu":
        s, grouped = "", grouped[:, 0]
    # (batch, kv_heads, group, queries, keys)
    scores = jnp.einsum(f"b{s}n{g}k,btnk->bn{g}{s}t", grouped, k).astype(wide(q.dtype))
    if not s:
        scores = scores[..., None, :]  # (batch, kv_heads, 1, keys)
    if bias is not None:
        if isinstance(bias, RelativeBias):
            bias = bias.at(jnp.arange(q.shape[1]), jnp.arange(k.shape[1]))
        bias = bias.astype(scores.dtype)  # (batch, heads, queries, keys)
        scores += bias.reshape(bias.shape[0], *scores.shape[1:-2], *bias.shape[2:])
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    # The smallest finite number instead of -inf: queries that see no key must not get NaN.
    grouped_mask = jnp.expand_dims(visible, range(1, scores.ndim - 2))
    scores = jnp.where(grouped_mask, scores, jnp.finfo(scores.dtype).min)
    if sinks is None:
        weights = jax.nn.softmax(scores)
    else:
        # A softmax over the keys and one more, whose weight is omitted. The sink takes part in the
        # maximum, so that no exponential overflows. It cancels out, so it has no gradient.
        sinks = sinks.astype(scores.dtype).reshape(1, *scores.shape[1:-2], 1, 1)
        top = jax.lax.stop_gradient(jnp.maximum(jnp.max(scores, axis=-1, keepdims=True), sinks))
        weights = jnp.exp(scores - top)
        weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + jnp.exp(sinks - top))
    weights = dropout(weights.astype(q.dtype), rate, key)
    if not s:
        weights = weights[..., 0, :]  # (batch, kv_heads, keys)
    # A group's heads follow each other, so the heads are in the order of the queries'.
    out = jnp.einsum(f"bn{g}{s}t,btnk->b{s}n{g}k", weights, v)
    return out.reshape(*q.shape[:3], v.shape[-1])


def attend_near(
    q: Queries,
    k: Keys,
    v: Values,
    *,
    local: Bool[Array, ""],
    visible: Sequence[Visible],
    **options: Any,
) -> Attended:
    """Attention of a layer with a window if it is `local`, in a scan over both kinds of layers.

    `visible` is what queries see without and with the window. The other arguments are as for
    `attend`.
    """
    all_, near = visible
    if not isinstance(all_, View) and not isinstance(near, View):
        return attend(q, k, v, visible=jnp.where(local, near, all_), **options)
    # Only one of the two is computed, so that a window saves time.
    through = lambda view: lambda q, k, v: attend(q, k, v, visible=view, **options)
    return jax.lax.cond(local, through(near), through(all_), q, k, v)


def _is_split(q: Array) -> bool:
    """Whether the plan splits the sequence of the queries."""
    return sequence_parts() > 1 and q.shape[1] % sequence_parts() == 0


def _takes_mask(view: View | None, bias: Bias, q: Array, k: Array) -> bool:
    """Whether cuDNN's kernel supports this view and this bias."""
    is_option = view is not None and _is_option(view, q, k)
    if bias is not None:
        # The kernel computes gradients only of a bias that all rows share, without another mask.
        is_shared = not isinstance(bias, RelativeBias) and bias.shape[:2] == (1, q.shape[2])
        # It takes a bias whose numbers of queries and of keys are even.
        return is_option and is_shared and q.shape[1] % 2 == k.shape[1] % 2 == 0
    # The kernel reads a mask as an array of all pairs.
    return view is None or is_option or q.shape[1] * k.shape[1] <= _MOST_MASKED


def _is_option(view: View, q: Array, k: Array) -> bool:
    """Whether the kernel has an option for it: causal attention, with or without a window."""
    if view.real is not None or view.slots is not None or view.segments is not None:
        return False
    if view.causal:
        return _is_even(q, k) or q.shape[1] == k.shape[1]
    return view.window is None and _is_even(q, k)


def _is_even(q: Array, k: Array) -> bool:
    return q.shape[1] % 2 == k.shape[1] % 2 == 0


def _attend_in_kernel(
    q: Array, k: Array, v: Array, visible: Visible, bias: Any, scale: float
) -> Array:
    options: dict[str, Any] = {"scale": scale, "implementation": "cudnn"}
    queries, keys = q.shape[1], k.shape[1]
    if not _is_even(q, k):
        # With a query or a key more, as JAX refuses gradients of odd lengths. There is no bias:
        # `_takes_mask` refuses one for odd lengths. The last key of causal attention is seen by the
        # last query alone, which is left out.
        more = lambda x: jnp.pad(x, [(0, 0), (0, x.shape[1] % 2), (0, 0), (0, 0)])
        if not isinstance(visible, View) or not _is_option(visible, q, k):
            if isinstance(visible, View):
                visible = visible.visible(queries, keys)
            visible = jnp.broadcast_to(visible, (visible.shape[0], queries, keys))
            visible = jnp.pad(visible, [(0, 0), (0, queries % 2), (0, keys % 2)])
        return _attend_in_kernel(more(q), more(k), more(v), visible, None, scale)[:, :queries]
    if isinstance(visible, View) and _is_option(visible, q, k):
        options["is_causal"] = visible.causal
        if visible.window is not None:
            options["local_window_size"] = (visible.window - 1, 0)  # behind and before a query
        if bias is not None:
            options["bias"] = bias.astype(q.dtype)
        return jax.nn.dot_product_attention(q, k, v, **options)
    if isinstance(visible, View):
        visible = visible.visible(queries, keys)
    # In a pipeline, which maps attention over stages, JAX reshapes a mask of rows to all heads.
    heads = 1
    if visible.shape[0] > 1 and size_of_axis("pipe") > 1:
        heads = q.shape[2]
    # (batch, heads, queries, keys)
    mask = jnp.broadcast_to(visible[:, None], (visible.shape[0], heads, queries, keys))
    return jax.nn.dot_product_attention(q, k, v, mask=mask, **options)


def _has_kernel(q: Array, k: Array, v: Array) -> bool:
    # cuDNN's kernel never materialises all scores. These are the shapes that it supports.
    half = q.dtype in (jnp.bfloat16, jnp.float16) and q.shape[-1] == v.shape[-1]
    most = 128
    present = target_of(jax.local_devices()[0])
    # From Hopper on, but JAX refuses it on a machine that does not have such a device itself.
    if min(target().capability, present.capability) >= 9:
        most = 256
    sizes = q.shape[-1] % 8 == 0 and q.shape[-1] <= most and min(q.shape[1], k.shape[1]) > 1
    return half and sizes and target().capability >= _OLDEST_WITH_KERNEL
