"""The Gemma decoder: LLaMA with scaled embeddings, zero-centred norm scales and a gated GELU.

Options turn it into Gemma 2 (additional post-norms, soft-capped scores and logits, sliding windows
in some layers) or the text part of Gemma 3 (norms of Q and K in each head, and a separate
rotary base for the layers with a window).
"""

import math
from dataclasses import KW_ONLY, dataclass

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from ._attention import attend, attend_near
from ._attention_layers import AttentionLayers, initial_attention
from ._base_config import GroupedConfig, check_config
from ._basic import (
    initial_mlp,
    initial_tables,
    look_up,
    softcap,
    wide,
    wide_rms_norm,
    zeros,
)
from ._cache import extend
from ._check_config import check_even, check_local
from ._decoder import Decoder, tied_or_own_head
from ._einsum import gated_feed_forward, product
from ._inputs import HiddenStates
from ._rotary import RopeScaling, rotary_angles, rotary_frequencies, rotate
from ._scan_layers import scan_layers


@dataclass(frozen=True)
class GemmaConfig(GroupedConfig):
    """The configuration of a `Gemma`.

    **Arguments:**

    - `vocab`, `width`, `layers`, `heads`, `kv_heads`, `hidden`, `rope_base`, `rope_scaling`,
      `norm_eps`, `tied`, `attention_dropout`, `context`, `remat`, `unroll`, `eos`, `bos`, `pad`,
      `decoding`: as in [`LlamaConfig`][redcoast.models.LlamaConfig].
    - `head_dim`: the size of each head, an even number.
    - `local`: for each layer, whether it has a sliding attention window; by default, no layer has.
    - `window`: the size of that window in tokens, including the token itself.
    - `local_rope_base`: the base of the rotary embeddings in the layers with a window, where
      `rope_scaling` does not apply. By default they use the same embeddings as all other layers.
    - `post_norms`: whether the outputs that a layer adds to the residual stream are normalised.
    - `qk_norm`: whether Q and K are normalised in each head.
    - `score_scale`: attention scores are divided by its square root; the head size by default.
    - `score_cap`, `logit_cap`: soft caps (by tanh) of the attention scores and of the logits.
    """

    _: KW_ONLY
    head_dim: int = 256
    rope_scaling: RopeScaling | None = None
    local: tuple[bool, ...] = ()
    window: int | None = None
    local_rope_base: int | float | None = None
    post_norms: bool = False
    qk_norm: bool = False
    score_scale: int | float | None = None
    score_cap: int | float | None = None
    logit_cap: int | float | None = None
    tied: bool = True

    def __post_init__(self):
        check_config(self, "head_dim")
        check_even(self, "head_dim")
        check_local(self)


class GemmaLayers(AttentionLayers):
    """The parameters of all decoder layers, stacked along their first dimension."""

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
        keys = jax.random.split(key, 7)
        super().__init__(c, initial_attention(c, keys[:4]), biases="")
        stream, head = (c.layers, c.width), (c.layers, c.head_dim)
        # A norm multiplies by 1 more than its scale.
        self.attention_norm, self.mlp_norm = jnp.zeros(stream), jnp.zeros(stream)
        self.q_norm, self.k_norm = zeros(head, when=c.qk_norm), zeros(head, when=c.qk_norm)
        self.attention_post_norm = zeros(stream, when=c.post_norms)
        self.mlp_post_norm = zeros(stream, when=c.post_norms)
        self.gate, self.up, self.down = initial_mlp(c, *keys[4:])


class Gemma(Decoder):
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
        """Initialises the parameters: normal with variance 1 / fan-in, truncated at three standard
        deviations. The output projections of the layers are divided by sqrt(2 * layers)."""
        embed, layers, head = jax.random.split(key, 3)
        self.embed, self.head = initial_tables(config, embed, head)
        self.layers = GemmaLayers(config, key=layers)
        self.norm = jnp.zeros(config.width)
        self.config = config

    def unembed(self, hidden: HiddenStates) -> Float[Array, "batch seq vocab"]:
        return softcap(tied_or_own_head(hidden, self.embed, self.head), self.config.logit_cap)

    def _run(self, tokens, mask, positions, see, cache, key):
        c = self.config
        everywhere, near = see(window=None), see(window=c.window)
        x = look_up(self.embed, tokens)  # (batch, seq, width)
        # The published weights were trained with this scale rounded to the dtype of `x`.
        x = x * jnp.asarray(math.sqrt(c.width), x.dtype)  # (batch, seq, width)
        frequencies = rotary_frequencies(c.head_dim, c.rope_base, c.rope_scaling)
        near_frequencies = frequencies
        if c.local_rope_base is not None:
            near_frequencies = rotary_frequencies(c.head_dim, c.local_rope_base)
        angles = rotary_angles(positions, frequencies, wide(x.dtype))
        near_angles = rotary_angles(positions, near_frequencies, wide(x.dtype))
        # Some sizes were published with the width over the heads, which is not their head size.
        scale = float((c.score_scale or c.head_dim) ** -0.5)

        def layer_fn(x, cache, inputs, index, key):
            layer, local = inputs
            # Layers with and without a window are scanned together, so each selects its angles.
            turns = jax.tree.map(lambda a, b: jnp.where(local, b, a), angles, near_angles)
            y = _norm(x, layer.attention_norm, c)
            q = _norm(product("bsd,dhk->bshk", y, layer.wq), layer.q_norm, c)  # before the rotation
            k = _norm(product("bsd,dhk->bshk", y, layer.wk), layer.k_norm, c)
            v = product("bsd,dhk->bshk", y, layer.wv)  # (batch, seq, kv_heads, head_dim)
            cache, k, v = extend(cache, index, rotate(k, turns), v)
            q = rotate(q, turns)  # (batch, seq, heads, head_dim)
            options = {"softcap": c.score_cap, "rate": c.attention_dropout, "key": key}
            if any(c.local):
                visible = (everywhere, near)
                y = attend_near(q, k, v, local=local, visible=visible, scale=scale, **options)
            else:
                y = attend(q, k, v, visible=everywhere, scale=scale, **options)
            y = product("bshk,hkd->bsd", y, layer.wo)  # (batch, seq, width)
            x = x + _norm(y, layer.attention_post_norm, c)
            y = gated_feed_forward(layer, _norm(x, layer.mlp_norm, c), "gelu_new")
            return x + _norm(y, layer.mlp_post_norm, c), cache

        layers = (self.layers, jnp.asarray(c.local or (False,) * c.layers))
        x, cache = scan_layers(layer_fn, x, layers, cache=cache, key=key, **c.loop_options)
        return _norm(x, self.norm, c), cache, None


def _norm(x, scale, config):
    """RMSNorm with the scale `1 + scale`. Returns `x` unchanged if `scale` is None."""
    if scale is None:
        return x
    return wide_rms_norm(x, scale, config.norm_eps, offset=1)
