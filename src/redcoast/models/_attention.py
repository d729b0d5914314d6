"""Where tokens stand, who sees whom, and attention itself."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Integer, PRNGKeyArray

from ._dropout import dropout

Mask = Bool[Array, "batch seq"] | Integer[Array, "batch seq"]
Visible = Bool[Array, "#batch queries keys"]


def real_tokens(shape: tuple[int, ...], mask: Mask | None) -> Bool[Array, "#batch seq"]:
    """The mask as booleans; without one, every token is real."""
    return jnp.ones((1, shape[1]), bool) if mask is None else mask.astype(bool)


def count_positions(
    real: Bool[Array, "#batch seq"], segments: Integer[Array, "batch seq"] | None = None
) -> Int[Array, "#batch seq"]:
    """The position of each token among the real ones of its row, or of its segment."""
    counts = jnp.cumsum(real, axis=1)
    if segments is not None:
        # What was counted before the segment began does not count in it.
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
    """Which keys each query sees: the real ones at its own slot and before.

    **Arguments:**

    - `real`: which keys are real tokens.
    - `slots`: where among the keys each query stands; by default queries and keys are the same.
    - `segments`: of several texts in one row, the number of each token's own.
    - `window`: how many slots back a query sees, its own included; all by default.
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
    """Which keys each query sees where order does not matter: all real ones."""
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
    """Scaled dot-product attention (Vaswani et al., 2017, equation 1), with grouped heads
    (Ainslie et al., 2023).

    **Arguments:**

    - `q`, `k`, `v`: queries, keys and values; each key head serves `heads / kv_heads` query heads.
    - `visible`: which keys each query sees. What sees nothing gets a finite value without meaning.
    - `bias`: added to the scores.
    - `scale`: what the scores are multiplied by, `1 / sqrt(head_dim)` by default.
    - `softcap`: a bound that the scores approach as a hyperbolic tangent does.
    - `rate`, `key`: of the dropout of attention weights; none without a key.
    """
    scale = float(q.shape[-1] ** -0.5 if scale is None else scale)
    plain = bias is None and softcap is None and (key is None or rate == 0)
    if plain and _has_kernel(q, k):
        mask = jnp.broadcast_to(visible, (visible.shape[0], q.shape[1], k.shape[1]))[:, None]
        return jax.nn.dot_product_attention(q, k, v, mask=mask, scale=scale, implementation="cudnn")
    # What else JAX's function does is this, but with a softmax in float32 for float64, too.
    # Scaled before the product, float16 does not overflow.
    grouped = (q * scale).reshape(*q.shape[:2], k.shape[2], -1, q.shape[3])
    scores = jnp.einsum("bsngk,btnk->bngst", grouped, k).astype(wide(q.dtype))
    if bias is not None:
        bias = bias.astype(scores.dtype)
        scores += bias.reshape(bias.shape[0], *scores.shape[1:3], *bias.shape[2:])
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    # The least finite number and not -inf, so that padding that sees nothing gets no NaN.
    scores = jnp.where(visible[:, None, None], scores, jnp.finfo(scores.dtype).min)
    weights = dropout(jax.nn.softmax(scores).astype(q.dtype), rate, key)
    return jnp.einsum("bngst,btnk->bsngk", weights, v).reshape(q.shape)


def _has_kernel(q: Array, k: Array) -> bool:
    # cuDNN's kernel never has all the scores in memory; these are the shapes that it takes.
    half = q.dtype in (jnp.bfloat16, jnp.float16)
    sizes = q.shape[-1] % 8 == 0 and q.shape[-1] <= 128 and min(q.shape[1], k.shape[1]) > 1
    return half and sizes and jax.default_backend() == "gpu"


def wide(dtype: np.dtype) -> np.dtype:
    """The dtype for what bfloat16 is too coarse for: positions, means of squares, softmax."""
    return np.promote_types(dtype, np.float32)
