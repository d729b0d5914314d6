"""The Mixtral decoder: LLaMA with mixture-of-experts feed-forward networks.

Options turn it into Qwen3-MoE (norms of Q and K in each head, weights of experts as they are).
"""

import functools as ft
from dataclasses import dataclass

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from ..core._decoding import GREEDY, Decoding
from ._attention import as_array, attend, real_tokens, wide
from ._basic import initial_attention, initial_mlp, initial_tables, look_up, normal, rms_norm
from ._by_layer import StackedLayers
from ._cache import extend
from ._check_config import check_chosen, check_config, check_heads
from ._einsum import product
from ._moe import gated_experts, mix_experts
from ._rotary import RopeScaling, Yarn, rotate, scaled_angles
from ._scan_layers import Remat, scan_layers


@dataclass(frozen=True)
class MixtralConfig:
    """The configuration of a `Mixtral`.

    **Arguments:**

    - `vocab`, `width`, `layers`: the vocabulary size, the size of the residual stream and the
      number of decoder layers.
    - `heads`, `kv_heads`: the number of query heads, and the number of key and value heads, which
      must divide it.
    - `hidden`: the hidden size of each expert.
    - `experts`, `chosen`: the number of experts in each layer, and the number of experts that each
      token is routed to (top-k).
    - `head_size`: the size of each head, an even number; `width / heads` by default.
    - `rope_base`, `rope_scaling`: the base of the rotary embeddings' wavelengths, and how they are
      scaled for long contexts.
    - `norm_eps`: added to the mean square in RMSNorm.
    - `tied`: whether the output head shares the weights of the embedding.
    - `window`: the size of the sliding attention window in tokens, including the token itself; no
      window by default.
    - `qk_norm`: whether Q and K are normalised.
    - `weights_sum_to_one`: whether the weights of a token's experts are divided by their sum.
    - `attention_dropout`: the dropout rate of the attention weights.
    - `router_loss_weight`: the weight of the router loss of `hidden_and_router_loss` in a training
      loss. The model itself does not use it.
    - `context`: the length in tokens that the weights were trained for. It is not enforced.
    - `remat`: what to rematerialise: `"none"`, `"dots"` (not products with weights outside of the
      experts) or `"full"`.
    - `unroll`: how many layers one iteration of the loop over the layers runs; by default all of
      them on a CPU, if they are at most four, and otherwise one.
    - `eos`, `bos`, `pad`: the token ids that end a sequence, and those of its start and of padding.
    - `decoding`: the defaults of [`redcoast.generate`][] for this model.

    **Raises:**

    `ValueError` if a value is out of range or conflicts with another; `TypeError` if a size is not
    an integer.
    """

    vocab: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    hidden: int
    experts: int = 8
    chosen: int = 2
    head_size: int | None = None
    rope_base: int | float = 1000000.0
    rope_scaling: RopeScaling | Yarn | None = None
    norm_eps: int | float = 1e-5
    tied: bool = False
    window: int | None = None
    qk_norm: bool = False
    weights_sum_to_one: bool = True
    attention_dropout: int | float = 0.0
    router_loss_weight: int | float = 0.001
    context: int = 32768
    remat: Remat = "none"
    unroll: int | None = None
    eos: tuple[int, ...] = ()
    bos: int | None = None
    pad: int | None = None
    decoding: Decoding = GREEDY

    from ._methods import head_dim

    def __post_init__(self):
        check_config(self, "chosen")
        check_heads(self, even=True)
        check_chosen(self)


class MixtralLayers(StackedLayers):
    """The parameters of all decoder layers, stacked along their first dimension."""

    attention_norm: Float[Array, "layers width"]
    wq: Float[Array, "layers width heads head_dim"]
    wk: Float[Array, "layers width kv_heads head_dim"]
    wv: Float[Array, "layers width kv_heads head_dim"]
    wo: Float[Array, "layers heads head_dim width"]
    q_norm: Float[Array, "layers head_dim"] | None
    k_norm: Float[Array, "layers head_dim"] | None
    mlp_norm: Float[Array, "layers width"]
    router: Float[Array, "layers width experts"]
    gate: Float[Array, "layers experts width hidden"]
    up: Float[Array, "layers experts width hidden"]
    down: Float[Array, "layers experts hidden width"]

    def __init__(self, config: MixtralConfig, *, key: PRNGKeyArray):
        c = config
        keys = jax.random.split(key, 8)
        self.attention_norm, self.mlp_norm = (jnp.ones((c.layers, c.width)) for _ in range(2))
        self.wq, self.wk, self.wv, self.wo = initial_attention(c, *keys[:4])
        self.q_norm = jnp.ones((c.layers, c.head_dim)) if c.qk_norm else None
        self.k_norm = jnp.ones((c.layers, c.head_dim)) if c.qk_norm else None
        self.router = normal(keys[4], (c.layers, c.width, c.experts), fan_in=c.width)
        self.gate, self.up, self.down = initial_mlp(c, *keys[5:], c.experts)


class Mixtral(eqx.Module):
    """The Mixtral decoder (Jiang et al., 2024, <https://arxiv.org/abs/2401.04088>).

    ```python
    config = MixtralConfig(vocab=256, width=128, layers=4, heads=4, kv_heads=2, hidden=352)
    model = Mixtral(config, key=jax.random.key(0))
    logits = model(jnp.zeros((8, 64), jnp.int32))  # (8, 64, 256)
    ```
    """

    embed: Float[Array, "vocab width"]
    layers: MixtralLayers
    norm: Float[Array, " width"]
    head: Float[Array, "width vocab"] | None
    config: MixtralConfig = eqx.field(static=True)

    from ._methods import decoder_call as __call__
    from ._methods import decoder_decode as decode
    from ._methods import decoder_hidden as hidden
    from ._methods import decoder_init_cache as init_cache
    from ._methods import experts_hidden_and_router_loss as hidden_and_router_loss
    from ._methods import tied_or_own_head as unembed

    def __init__(self, config: MixtralConfig, *, key: PRNGKeyArray):
        """Initialises the parameters: normal with variance 1 / fan-in, truncated at three standard
        deviations. The output projections of the layers are divided by sqrt(2 * layers)."""
        embed, layers, head = jax.random.split(key, 3)
        self.embed, self.head = initial_tables(config, embed, head)
        self.layers = MixtralLayers(config, key=layers)
        self.norm = jnp.ones(config.width)
        self.config = config

    def _run(self, tokens, mask, positions, see, cache, key):
        c = self.config
        visible, real = see(window=c.window), as_array(real_tokens(tokens.shape, mask))
        x = look_up(self.embed, tokens)
        angles = scaled_angles(positions, c.head_dim, c.rope_base, c.rope_scaling, wide(x.dtype))

        def layer_fn(x, carry, layer, index, key):
            cache, *use = carry
            y = rms_norm(x, layer.attention_norm, c.norm_eps)
            q, k, v = (product("bsd,dhk->bshk", y, w) for w in (layer.wq, layer.wk, layer.wv))
            if c.qk_norm:
                q = rms_norm(q, layer.q_norm, c.norm_eps)
                k = rms_norm(k, layer.k_norm, c.norm_eps)
            q, k = rotate(q, angles), rotate(k, angles)
            cache, k, v = extend(cache, index, k, v)
            y = attend(q, k, v, visible=visible, rate=c.attention_dropout, key=key)
            x = x + product("bshk,hkd->bsd", y, layer.wo)
            y = rms_norm(x, layer.mlp_norm, c.norm_eps)
            scores = product("bsd,de->bse", y, layer.router)
            options = {"chosen": c.chosen, "weights_sum_to_one": c.weights_sum_to_one}
            y, more = mix_experts(ft.partial(gated_experts, layer), y, scores, real, **options)
            return x + y, (cache, *(a + b for a, b in zip(use, more, strict=True)))

        carry = (cache, *jnp.zeros((2, c.experts), wide(x.dtype)))
        options = {"key": key, "remat": c.remat, "unroll": c.unroll}
        x, carry = scan_layers(layer_fn, x, self.layers, cache=carry, **options)
        return rms_norm(x, self.norm, c.norm_eps), carry[0], carry[1:]
