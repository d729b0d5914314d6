"""The LLaMA decoder: RMSNorm, rotary embeddings, grouped-query attention and SwiGLU."""

import math
from dataclasses import dataclass
from typing import Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Integer, PRNGKeyArray

_REMAT_POLICIES = {
    "none": None,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "full": jax.checkpoint_policies.nothing_saveable,
}


@dataclass(frozen=True)
class LlamaConfig:
    """The sizes of a `Llama`.

    **Arguments:**

    - `vocab`: how many different tokens there are.
    - `width`: the size of the residual stream.
    - `layers`: how many decoder layers there are.
    - `heads`: how many query heads; `width` is an even multiple of it.
    - `kv_heads`: how many key and value heads; `heads` is a multiple of it.
    - `hidden`: the hidden size of the feed-forward network, usually about 8/3 of the width.
    - `rope_base`: the base of the rotary embeddings' wavelengths.
    - `norm_eps`: what RMSNorm adds to the mean square.
    - `tied`: whether the head is the embedding.
    - `remat`: what is computed again in the backward pass, to save memory: `"none"`, `"dots"`
      (everything but the products with weights) or `"full"` (everything in a layer).

    **Raises:**

    `ValueError` if the sizes do not fit together.
    """

    vocab: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    hidden: int
    rope_base: float = 10000.0
    norm_eps: float = 1e-5
    tied: bool = False
    remat: Literal["none", "dots", "full"] = "none"

    def __post_init__(self):
        for name in ("vocab", "width", "layers", "heads", "kv_heads", "hidden"):
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}` must be at least 1, but is {getattr(self, name)}.")
        # Rotary embeddings turn pairs of a head's features.
        if self.width % (2 * self.heads):
            raise ValueError(
                f"`width` must be a multiple of twice the number of heads, but {self.width} is no "
                f"multiple of 2 * {self.heads}."
            )
        if self.heads % self.kv_heads:
            raise ValueError(
                f"`heads` must be a multiple of `kv_heads`, but {self.heads} is no multiple of "
                f"{self.kv_heads}."
            )
        if self.remat not in _REMAT_POLICIES:
            raise ValueError(f"`remat` must be 'none', 'dots' or 'full', but is {self.remat!r}.")

    @property
    def head_dim(self) -> int:
        return self.width // self.heads


class LlamaLayers(eqx.Module):
    """The parameters of all the decoder layers, each stacked along its first dimension."""

    attention_norm: Float[Array, "layers width"]
    wq: Float[Array, "layers width heads head_dim"]
    wk: Float[Array, "layers width kv_heads head_dim"]
    wv: Float[Array, "layers width kv_heads head_dim"]
    wo: Float[Array, "layers heads head_dim width"]
    mlp_norm: Float[Array, "layers width"]
    gate: Float[Array, "layers width hidden"]
    up: Float[Array, "layers width hidden"]
    down: Float[Array, "layers hidden width"]

    def __init__(self, config: LlamaConfig, *, key: PRNGKeyArray):
        c = config
        wq, wk, wv, wo, gate, up, down = jax.random.split(key, 7)
        # Two outputs a layer are summed into the residual stream: scaled so, they add up to the
        # same variance however many layers there are.
        scale = 1 / math.sqrt(2 * c.layers)
        self.attention_norm = jnp.ones((c.layers, c.width))
        self.wq = _normal(wq, (c.layers, c.width, c.heads, c.head_dim), c.width)
        self.wk = _normal(wk, (c.layers, c.width, c.kv_heads, c.head_dim), c.width)
        self.wv = _normal(wv, (c.layers, c.width, c.kv_heads, c.head_dim), c.width)
        self.wo = scale * _normal(wo, (c.layers, c.heads, c.head_dim, c.width), c.width)
        self.mlp_norm = jnp.ones((c.layers, c.width))
        self.gate = _normal(gate, (c.layers, c.width, c.hidden), c.width)
        self.up = _normal(up, (c.layers, c.width, c.hidden), c.width)
        self.down = scale * _normal(down, (c.layers, c.hidden, c.width), c.hidden)


class Llama(eqx.Module):
    """The LLaMA decoder (Touvron et al., 2023, <https://arxiv.org/abs/2302.13971>) with
    grouped-query attention (Ainslie et al., 2023, <https://arxiv.org/abs/2305.13245>).

    ```python
    config = LlamaConfig(vocab=256, width=128, layers=4, heads=4, kv_heads=2, hidden=352)
    model = Llama(config, key=jax.random.key(0))
    logits = model(jnp.zeros((8, 64), jnp.int32))  # (8, 64, 256)
    ```
    """

    embed: Float[Array, "vocab width"]
    layers: LlamaLayers
    norm: Float[Array, " width"]
    head: Float[Array, "width vocab"] | None
    config: LlamaConfig = eqx.field(static=True)

    def __init__(self, config: LlamaConfig, *, key: PRNGKeyArray):
        """**Arguments:**

        - `config`: the sizes.
        - `key`: of the initial parameters: normal with variance 1 / fan-in, truncated at three
          standard deviations, and those of the layers' outputs divided by sqrt(2 * layers).
        """
        embed, layers, head = jax.random.split(key, 3)
        shape = (config.width, config.vocab)
        self.embed = _normal(embed, shape[::-1], config.width)
        self.layers = LlamaLayers(config, key=layers)
        self.norm = jnp.ones(config.width)
        self.head = None if config.tied else _normal(head, shape, config.width)
        self.config = config

    def __call__(
        self,
        tokens: Integer[Array, "batch seq"],
        *,
        mask: Bool[Array, "batch seq"] | Integer[Array, "batch seq"] | None = None,
        key: PRNGKeyArray | None = None,
    ) -> Float[Array, "batch seq vocab"]:
        """The logits of the token that follows each token.

        **Arguments:**

        - `tokens`: below the vocabulary's size; one that is not gets NaN.
        - `mask`: 1 at real tokens, 0 at padding on either side. The logits of real tokens do not
          depend on padding; those of padding mean nothing.
        - `key`: not used, since nothing here is random.

        **Returns:**

        The logits, in the parameters' dtype.
        """
        # Indexing would give a token that is not in the vocabulary the embedding of one that is.
        x = jnp.take(self.embed, tokens, axis=0)
        eps = self.config.norm_eps
        positions, visible = _positions_and_visible(tokens, mask)
        rotary = _rotary(positions, self.config.head_dim, self.config.rope_base, _wide(x.dtype))

        def layer_fn(x, layer):
            x = x + _attention(layer, _rms_norm(x, layer.attention_norm, eps), rotary, visible)
            return x + _mlp(layer, _rms_norm(x, layer.mlp_norm, eps)), None

        if policy := _REMAT_POLICIES[self.config.remat]:
            # Inside a scan the compiler cannot undo remat, and need not be kept from it.
            layer_fn = jax.checkpoint(layer_fn, policy=policy, prevent_cse=False)
        x, _ = jax.lax.scan(layer_fn, x, self.layers)
        x = _rms_norm(x, self.norm, eps)
        if self.head is None:
            return jnp.einsum("bsd,vd->bsv", x, self.embed)
        return jnp.einsum("bsd,dv->bsv", x, self.head)


def _attention(layer, x, rotary, visible):
    q = _rotate(jnp.einsum("bsd,dhk->bshk", x, layer.wq), rotary)
    k = _rotate(jnp.einsum("bsd,dhk->bshk", x, layer.wk), rotary)
    v = jnp.einsum("bsd,dhk->bshk", x, layer.wv)
    # Each of the n key and value heads serves a group of g query heads. Scaled before the product,
    # float16 does not overflow.
    grouped = (q / math.sqrt(q.shape[3])).reshape(*q.shape[:2], k.shape[2], -1, q.shape[3])
    scores = jnp.einsum("bsngk,btnk->bngst", grouped, k).astype(_wide(x.dtype))
    # The least finite number and not -inf, so that padding that sees nothing gets no NaN.
    scores = jnp.where(visible[:, None, None], scores, jnp.finfo(scores.dtype).min)
    weights = jax.nn.softmax(scores).astype(x.dtype)
    out = jnp.einsum("bngst,btnk->bsngk", weights, v).reshape(q.shape)
    return jnp.einsum("bshk,hkd->bsd", out, layer.wo)


def _mlp(layer, x):
    gate = jnp.einsum("bsd,dh->bsh", x, layer.gate)
    up = jnp.einsum("bsd,dh->bsh", x, layer.up)
    return jnp.einsum("bsh,hd->bsd", jax.nn.silu(gate) * up, layer.down)


def _rms_norm(x: Float[Array, "batch seq width"], scale: Float[Array, " width"], eps: float):
    wide = x.astype(_wide(x.dtype))
    wide = wide * jax.lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + eps)
    return wide.astype(x.dtype) * scale[None, None]


def _positions_and_visible(tokens, mask) -> tuple[Int[Array, "#batch seq"], Bool[Array, "..."]]:
    """Each token's position, and the matrix of which token (row) sees which (column)."""
    seq = tokens.shape[1]
    mask = jnp.ones((1, seq), bool) if mask is None else mask.astype(bool)
    positions = jnp.maximum(jnp.cumsum(mask, axis=1) - 1, 0)
    return positions, jnp.tri(seq, dtype=bool)[None] & mask[:, None]


def _rotary(positions: Int[Array, "batch seq"], head_dim: int, base: float, dtype: np.dtype):
    """The cosines and sines of the angles in Su et al., 2021, equation 15."""
    frequencies = base ** (jnp.arange(0, -head_dim, -2, dtype=dtype) / head_dim)
    angles = positions[:, :, None, None].astype(dtype) * frequencies[None, None, None]
    return jnp.cos(angles), jnp.sin(angles)


def _rotate(x: Float[Array, "batch seq heads head_dim"], rotary):
    # Feature i turns with feature i + head_dim / 2, as in the weights that are published.
    cos, sin = rotary
    a, b = jnp.split(x.astype(cos.dtype), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def _wide(dtype: np.dtype) -> np.dtype:
    # bfloat16 cannot tell position 257 from 256, and loses the mean of many squares.
    return np.promote_types(dtype, np.float32)


def _normal(key: PRNGKeyArray, shape: tuple[int, ...], fan_in: int) -> Array:
    return jax.random.truncated_normal(key, -3, 3, shape) / math.sqrt(fan_in)
