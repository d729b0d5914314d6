"""The Gemma decoder: LLaMA's with scaled embeddings, norms that begin as one, and a gated GELU.

With a few switches it is Gemma 2 (norms behind the layers' parts too, capped scores and logits,
windows in some layers) and the text part of Gemma 3 (norms of each head's Q and K, and rotary
embeddings of another base where there is a window).
"""

import math
from dataclasses import dataclass

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Integer, PRNGKeyArray

from ._attention import Mask, attend, causal_view, count_positions, real_tokens, wide
from ._basic import normal
from ._cache import Cache, admit, cached_view, empty_cache, extend
from ._checks import check_config, check_rates
from ._einsum import product
from ._rotary import RopeScaling, rotary_angles, rotary_frequencies, rotate
from ._scan import Remat, scan_layers


@dataclass(frozen=True)
class GemmaConfig:
    """The sizes of a `Gemma`.

    **Arguments:**

    - `vocab`, `width`, `layers`: how many different tokens, the size of the residual stream, and
      how many decoder layers there are.
    - `heads`, `kv_heads`, `head_dim`: how many query heads; how many key and value heads, a
      divisor of it; and the size of a head, an even number.
    - `hidden`: the hidden size of the feed-forward network.
    - `rope_base`, `rope_scaling`: the base of the rotary embeddings' wavelengths, and how they
      are stretched for long texts.
    - `local`: for each layer, whether a token sees only a window; without it, no layer has one.
    - `window`: in these layers, how many tokens back a token sees, itself included.
    - `local_rope_base`: the base of the rotary embeddings in these layers, which are not
      stretched; by default they are as in all others.
    - `post_norms`: whether what a layer adds to the residual stream is normed.
    - `qk_norm`: whether each head's Q and K are normed.
    - `score_scale`: attention's scores are divided by its root; the size of a head by default.
    - `score_cap`, `logit_cap`: bounds that attention's scores, and the logits, approach as a
      hyperbolic tangent does.
    - `norm_eps`: what RMSNorm adds to the mean square.
    - `tied`: whether the head is the embedding.
    - `attention_dropout`: the rate at which attention weights are dropped.
    - `context`: the length in tokens that the model is made for; it changes no result.
    - `remat`: what is computed again in the backward pass, to save memory: `"none"`, `"dots"`
      (everything but the products with weights) or `"full"` (everything in a layer).
    - `eos`, `bos`, `pad`: the tokens that end a text, begin it, and fill what is behind.

    **Raises:**

    `ValueError` if the sizes do not fit together.
    """

    vocab: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    hidden: int
    head_dim: int = 256
    rope_base: int | float = 10000.0
    rope_scaling: RopeScaling | None = None
    local: tuple[bool, ...] = ()
    window: int | None = None
    local_rope_base: int | float | None = None
    post_norms: bool = False
    qk_norm: bool = False
    score_scale: int | float | None = None
    score_cap: int | float | None = None
    logit_cap: int | float | None = None
    norm_eps: int | float = 1e-6
    tied: bool = True
    attention_dropout: int | float = 0.0
    context: int = 8192
    remat: Remat = "none"
    eos: tuple[int, ...] = ()
    bos: int | None = None
    pad: int | None = None

    def __post_init__(self):
        check_config(self, "vocab", "width", "layers", "heads", "kv_heads", "hidden", "head_dim")
        check_rates(self, "attention_dropout")
        if self.head_dim % 2:
            raise ValueError(f"The size of a head must be even, but is {self.head_dim}.")
        if self.local and len(self.local) != self.layers:
            raise ValueError(
                f"`local` says of {len(self.local)} layers whether they have a window, and there "
                f"are {self.layers}."
            )
        if any(self.local) and self.window is None:
            raise ValueError("`local` gives layers a window, and `window` does not say its size.")


class GemmaLayers(eqx.Module):
    """The parameters of all the decoder layers, each stacked along its first dimension."""

    attention_norm: Float[Array, "layers width"]
    wq: Float[Array, "layers width heads head_dim"]
    wk: Float[Array, "layers width kv_heads head_dim"]
    wv: Float[Array, "layers width kv_heads head_dim"]
    wo: Float[Array, "layers heads head_dim width"]
    q_norm: Float[Array, "layers head_dim"] | None
    k_norm: Float[Array, "layers head_dim"] | None
    attention_post_norm: Float[Array, "layers width"] | None
    mlp_norm: Float[Array, "layers width"]
    gate: Float[Array, "layers width hidden"]
    up: Float[Array, "layers width hidden"]
    down: Float[Array, "layers hidden width"]
    mlp_post_norm: Float[Array, "layers width"] | None

    def __init__(self, config: GemmaConfig, *, key: PRNGKeyArray):
        c = config
        wq, wk, wv, wo, gate, up, down = jax.random.split(key, 7)
        # Two outputs a layer are summed into the residual stream: scaled so, they add up to the
        # same variance however many layers there are.
        scale = 1 / math.sqrt(2 * c.layers)
        q, kv = ((c.layers, c.width, heads, c.head_dim) for heads in (c.heads, c.kv_heads))
        norms = lambda size, there=True: jnp.zeros((c.layers, size)) if there else None
        self.attention_norm = jnp.zeros((c.layers, c.width))
        self.wq = normal(wq, q, fan_in=c.width)
        self.wk = normal(wk, kv, fan_in=c.width)
        self.wv = normal(wv, kv, fan_in=c.width)
        out = (c.layers, c.heads, c.head_dim, c.width)
        self.wo = normal(wo, out, fan_in=c.heads * c.head_dim, scale=scale)
        self.q_norm, self.k_norm = (norms(c.head_dim, c.qk_norm) for _ in range(2))
        self.attention_post_norm = norms(c.width, c.post_norms)
        self.mlp_norm = jnp.zeros((c.layers, c.width))
        self.gate = normal(gate, (c.layers, c.width, c.hidden), fan_in=c.width)
        self.up = normal(up, (c.layers, c.width, c.hidden), fan_in=c.width)
        self.down = normal(down, (c.layers, c.hidden, c.width), fan_in=c.hidden, scale=scale)
        self.mlp_post_norm = norms(c.width, c.post_norms)


class Gemma(eqx.Module):
    """The Gemma decoder (Gemma team, 2024, <https://arxiv.org/abs/2403.08295>), Gemma 2 (2024,
    <https://arxiv.org/abs/2408.00118>) and Gemma 3 (2025, <https://arxiv.org/abs/2503.19786>).

    ```python
    config = GemmaConfig(vocab=256, width=128, layers=4, heads=4, kv_heads=1, hidden=512)
    model = Gemma(config, key=jax.random.key(0))
    logits = model(jnp.zeros((8, 64), jnp.int32))  # (8, 64, 256)
    ```
    """

    embed: Float[Array, "vocab width"]
    layers: GemmaLayers
    norm: Float[Array, " width"]
    head: Float[Array, "width vocab"] | None
    config: GemmaConfig = eqx.field(static=True)

    def __init__(self, config: GemmaConfig, *, key: PRNGKeyArray):
        """Initial parameters of these sizes by `key`: normal with variance 1 / fan-in, truncated
        at three standard deviations; those of the layers' outputs divided by sqrt(2 * layers)."""
        embed, layers, head = jax.random.split(key, 3)
        shape = (config.width, config.vocab)
        self.embed = normal(embed, shape[::-1], fan_in=config.width)
        self.layers = GemmaLayers(config, key=layers)
        self.norm = jnp.zeros(config.width)
        self.head = None if config.tied else normal(head, shape, fan_in=config.width)
        self.config = config

    def __call__(
        self,
        tokens: Integer[Array, "batch seq"],
        *,
        mask: Mask | None = None,
        segments: Integer[Array, "batch seq"] | None = None,
        positions: Integer[Array, "#batch seq"] | None = None,
        key: PRNGKeyArray | None = None,
    ) -> Float[Array, "batch seq vocab"]:
        """The logits of the token that follows each token.

        **Arguments:**

        - `tokens`: below the vocabulary's size; one that is not gets NaN.
        - `mask`: 1 at real tokens, 0 at padding on either side. The logits of real tokens do not
          depend on padding; those of padding mean nothing.
        - `segments`: of several texts packed into one row, the number of each token's own; it
          sees no other.
        - `positions`: of the tokens, by default counted over the real ones of the row or segment.
        - `key`: of the dropout; without it there is none.
        """
        options = {"mask": mask, "segments": segments, "positions": positions, "key": key}
        return self.unembed(self.hidden(tokens, **options))

    def hidden(
        self,
        tokens: Integer[Array, "batch seq"],
        *,
        mask: Mask | None = None,
        segments: Integer[Array, "batch seq"] | None = None,
        positions: Integer[Array, "#batch seq"] | None = None,
        key: PRNGKeyArray | None = None,
    ) -> Float[Array, "batch seq width"]:
        """What the logits are made of; the arguments are those of a call."""
        real = real_tokens(tokens.shape, mask)
        if positions is None:
            positions = count_positions(real, segments)
        windows = (None, self.config.window)
        visible = [causal_view(real, segments=segments, window=window) for window in windows]
        return self._run(tokens, positions, visible, None, key)[0]

    def init_cache(self, batch: int, length: int) -> Cache:
        """An empty cache for `length` tokens in each of `batch` rows."""
        c = self.config
        return empty_cache(c.layers, batch, length, c.kv_heads, c.head_dim, self.embed.dtype)

    def decode(
        self, tokens: Integer[Array, "batch new"], cache: Cache, *, mask: Mask | None = None
    ) -> tuple[Float[Array, "batch new width"], Cache]:
        """Appends tokens to a cache; what `hidden` would give for them, and the cache."""
        cache = admit(cache, tokens.shape, mask)
        windows = (None, self.config.window)
        views = [cached_view(cache, tokens.shape[1], window=window) for window in windows]
        return self._run(tokens, views[0][0], [view[1] for view in views], cache, None)

    def unembed(self, hidden: Float[Array, "batch seq width"]) -> Float[Array, "batch seq vocab"]:
        """The logits of hidden states."""
        if self.head is None:
            logits = product("bsd,vd->bsv", hidden, self.embed)
        else:
            logits = product("bsd,dv->bsv", hidden, self.head)
        cap = self.config.logit_cap
        return logits if cap is None else cap * jnp.tanh(logits / cap)

    def _run(self, tokens, positions, visible, cache, key):
        # Indexing would give a token that is not in the vocabulary the embedding of one that is.
        x = jnp.take(self.embed, tokens, axis=0)
        c = self.config
        # The scale, too, is of the dtype: published weights were trained with it rounded.
        x = x * jnp.asarray(math.sqrt(c.width), x.dtype)
        angles = [rotary_angles(positions, f, wide(x.dtype)) for f in _frequencies(c)]
        kinds = list(zip(angles, visible, strict=True))

        def layer_fn(x, cache, inputs, index, key):
            layer, local = inputs
            # Layers of both kinds are scanned together, so that each chooses its own.
            turns, seen = jax.tree.map(lambda all, near: jnp.where(local, near, all), *kinds)
            y = _norm(x, layer.attention_norm, c)
            y, cache = _attention(layer, y, turns, seen, cache, index, key, c)
            x = x + _norm(y, layer.attention_post_norm, c)
            y = _mlp(layer, _norm(x, layer.mlp_norm, c))
            return x + _norm(y, layer.mlp_post_norm, c), cache

        layers = (self.layers, jnp.asarray(c.local or (False,) * c.layers))
        x, cache = scan_layers(layer_fn, x, layers, cache=cache, key=key, remat=c.remat)
        return _norm(x, self.norm, c), cache


def _frequencies(config: GemmaConfig) -> list[Float[np.ndarray, " half"]]:
    """Of layers that see everything, and of those that see a window."""
    c = config
    everywhere = rotary_frequencies(c.head_dim, c.rope_base, c.rope_scaling)
    if c.local_rope_base is None:
        return [everywhere, everywhere]
    return [everywhere, rotary_frequencies(c.head_dim, c.local_rope_base)]


def _norm(x, scale, config):
    """RMSNorm, whose scale is how much it is more than 1; without one, nothing."""
    if scale is None:
        return x
    y = x.astype(wide(x.dtype))
    y = y * jax.lax.rsqrt(jnp.mean(y**2, axis=-1, keepdims=True) + config.norm_eps)
    scale = 1 + scale.astype(y.dtype).reshape((1,) * (x.ndim - 1) + scale.shape)
    return (y * scale).astype(x.dtype)


def _attention(layer, x, angles, visible, cache, index, key, config):
    c = config
    q = _norm(product("bsd,dhk->bshk", x, layer.wq), layer.q_norm, c)
    k = _norm(product("bsd,dhk->bshk", x, layer.wk), layer.k_norm, c)
    v = product("bsd,dhk->bshk", x, layer.wv)
    cache, k, v = extend(cache, index, rotate(k, angles), v)
    options = {"softcap": c.score_cap, "rate": c.attention_dropout, "key": key}
    scale = float((c.score_scale or c.head_dim) ** -0.5)
    out = attend(rotate(q, angles), k, v, visible=visible, scale=scale, **options)
    return product("bshk,hkd->bsd", out, layer.wo), cache


def _mlp(layer, x):
    gate = product("bsd,dh->bsh", x, layer.gate)
    up = product("bsd,dh->bsh", x, layer.up)
    return product("bsh,hd->bsd", jax.nn.gelu(gate) * up, layer.down)
