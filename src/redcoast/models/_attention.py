"""Token positions, attention masks and scaled dot-product attention."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Integer, PRNGKeyArray

from ..core._target import target
from ._dropout import dropout

Mask = Bool[Array, "batch seq"] | Integer[Array, "batch seq"]
Visible = Bool[Array, "#batch queries keys"]


def real_tokens(shape: tuple[int, ...], mask: Mask | None) -> Bool[Array, "#batch seq"]:
    """Returns the mask as booleans. Without a mask, all tokens are real."""
    return jnp.ones((1, shape[1]), bool) if mask is None else mask.astype(bool)


def count_positions(
    real: Bool[Array, "#batch seq"], segments: Integer[Array, "batch seq"] | None = None
) -> Int[Array, "#batch seq"]:
    """Counts positions over the real tokens of each row or segment, from 0."""
    counts = jnp.cumsum(real, axis=1)
    if segments is not None:
        # Subtracts the tokens that were counted before the start of the segment.
        begins = jnp.diff(segments, axis=1, prepend=segments[:, :1] - 1) != 0
        before = jnp.where(begins, counts - real.astype(counts.dtype), 0)
        counts = counts - jax.lax.cummax(before, axis=1)
    return jnp.maximum(counts - 1, 0)


def causal_view(
    real: Bool[Array, "#batch keys"],
    slots: Int[Array, " queries"] | None = None,
    *,
    segments: Integer[Array, "batch keys"] | None = None,
    window: int | None = None,
) -> Visible:
    """Returns a causal mask: each query sees the real keys in its own slot and before.

    **Arguments:**

    - `real`: which keys are real tokens.
    - `slots`: the slot of each query among the keys; by default queries and keys are the same.
    - `segments`: for rows with several packed sequences, the number of the sequence that each token
        belongs to.
    - `window`: the number of slots that a query sees, including its own; no limit by default.
    """
    keys = jnp.arange(real.shape[1])
    slots = keys if slots is None else slots
    near = keys[None] <= slots[:, None]
    if window is not None:
        near &= keys[None] > slots[:, None] - window
    visible = near[None] & real[:, None]
    if segments is not None:
        visible &= segments[:, :, None] == segments[:, None]
    return visible


def full_view(
    real: Bool[Array, "#batch keys"], segments: Integer[Array, "batch keys"] | None = None
) -> Bool[Array, "#batch #queries keys"]:
    """Returns a bidirectional mask: each query sees all real keys of its row or segment."""
    if segments is None:
        return real[:, None]
    return real[:, None] & (segments[:, :, None] == segments[:, None])


def attend(
    q: Float[Array, "batch queries heads head_dim"],
    k: Float[Array, "batch keys kv_heads head_dim"],
    v: Float[Array, "batch keys kv_heads head_dim"],
    *,
    visible: Bool[Array, "#batch #queries keys"],
    bias: Float[Array, "#batch heads queries keys"] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    rate: float = 0.0,
    key: PRNGKeyArray | None = None,
) -> Float[Array, "batch queries heads head_dim"]:
    """Scaled dot-product attention (Vaswani et al., 2017, equation 1) with grouped queries
    (Ainslie et al., 2023).

    **Arguments:**

    - `q`, `k`, `v`: queries, keys and values. Each key head serves `heads / kv_heads` query heads.
    - `visible`: which keys each query sees. A query that sees none gets a finite, meaningless
        output.
    - `bias`: added to the scores.
    - `scale`: the factor of the scores, `1 / sqrt(head_dim)` by default.
    - `softcap`: a soft cap of the scores, `softcap * tanh(scores / softcap)`.
    - `rate`, `key`: dropout rate of the attention weights, and its PRNG key; no dropout without a
        key.
    """
    scale = float(q.shape[-1] ** -0.5 if scale is None else scale)
    plain = bias is None and softcap is None and (key is None or rate == 0)
    if plain and _has_kernel(q, k):
        mask = jnp.broadcast_to(visible, (visible.shape[0], q.shape[1], k.shape[1]))[:, None]
        return jax.nn.dot_product_attention(q, k, v, mask=mask, scale=scale, implementation="cudnn")
    # The same as `jax.nn.dot_product_attention`, which would compute the softmax of float64 in
    # float32. Queries are scaled before the product so that float16 does not overflow. There is a
    # dimension for groups only if there are fewer key heads, since XLA copies arrays for it.
    g = "" if q.shape[2] == k.shape[2] else "g"
    grouped = (q * scale).reshape(*q.shape[:2], k.shape[2], *[-1] * len(g), q.shape[3])
    scores = jnp.einsum(f"bsn{g}k,btnk->bn{g}st", grouped, k).astype(wide(q.dtype))
    if bias is not None:
        bias = bias.astype(scores.dtype)
        scores += bias.reshape(bias.shape[0], *scores.shape[1:-2], *bias.shape[2:])
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    # The smallest finite number instead of -inf: queries that see no key must not get NaN.
    seen = jnp.expand_dims(visible, range(1, scores.ndim - 2))
    scores = jnp.where(seen, scores, jnp.finfo(scores.dtype).min)
    weights = dropout(jax.nn.softmax(scores).astype(q.dtype), rate, key)
    return jnp.einsum(f"bn{g}st,btnk->bsn{g}k", weights, v).reshape(q.shape)


def _has_kernel(q: Array, k: Array) -> bool:
    # cuDNN's kernel never materialises all scores. These are the shapes that it supports.
    half = q.dtype in (jnp.bfloat16, jnp.float16)
    sizes = q.shape[-1] % 8 == 0 and q.shape[-1] <= 128 and min(q.shape[1], k.shape[1]) > 1
    # Cards before Ampere have no such kernel.
    return half and sizes and target().capability >= 8


def wide(dtype: np.dtype) -> np.dtype:
    """Promotes to at least float32, for computations that need more precision than bfloat16."""
    return np.promote_types(dtype, np.float32)
