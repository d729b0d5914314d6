"""The LLaMA decoder: RMSNorm, rotary embeddings, grouped-query attention and SwiGLU.

Options turn it into Mistral (a sliding window), Qwen2 (biases for Q, K and V), Qwen3 (norms of Q
and K in each head), OLMo 2 (norms of outputs) or SmolLM3 (layers without rotary embeddings).
"""

from dataclasses import dataclass

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from ..core._decoding import GREEDY, Decoding
from ._attention import attend, wide
from ._basic import initial_attention, initial_mlp, initial_tables, look_up, rms_norm
from ._by_layer import StackedLayers
from ._cache import extend
from ._check_config import check_config, check_heads
from ._einsum import gated_feed_forward, keys_values, product, queries
from ._rotary import RopeScaling, Yarn, rotate, scaled_angles
from ._scan_layers import Remat, scan_layers


@dataclass(frozen=True)
class LlamaConfig:
    """The configuration of a `Llama`.

    **Arguments:**

    - `vocab`, `width`, `layers`: the vocabulary size, the size of the residual stream and the
      number of decoder layers.
    - `heads`, `kv_heads`: the number of query heads, and the number of key and value heads, which
      must divide it.
    - `hidden`: the hidden size of the feed-forward network, usually about `8 / 3 * width`.
    - `head_size`: the size of each head, an even number; `width / heads` by default.
    - `rope_base`, `rope_scaling`: the base of the rotary embeddings' wavelengths, and how they are
      scaled for long contexts.
    - `norm_eps`: added to the mean square in RMSNorm.
    - `tied`: whether the output head shares the weights of the embedding.
    - `window`: the size of the sliding attention window in tokens, including the token itself; no
      window by default.
    - `rope_layers`: whether each layer has rotary embeddings; all layers by default.
    - `qkv_bias`, `qk_norm`: whether Q, K and V have biases, and whether Q and K are normalised.
    - `output_norms`: whether the outputs of attention and feed-forward network are normalised, in
      place of their inputs. The norms of Q and K are then over all heads.
    - `attention_dropout`: the dropout rate of the attention weights.
    - `context`: the length in tokens that the weights were trained for. It is not enforced.
    - `remat`: what to rematerialise: `"none"`, `"dots"` (not products with weights) or `"full"`.
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
    head_size: int | None = None
    rope_base: int | float = 10000.0
    rope_scaling: RopeScaling | Yarn | None = None
    norm_eps: int | float = 1e-5
    tied: bool = False
    window: int | None = None
    rope_layers: tuple[bool, ...] = ()
    qkv_bias: bool = False
    qk_norm: bool = False
    output_norms: bool = False
    attention_dropout: int | float = 0.0
    context: int = 2048
    remat: Remat = "none"
    unroll: int | None = None
    eos: tuple[int, ...] = ()
    bos: int | None = None
    pad: int | None = None
    decoding: Decoding = GREEDY

    from ._methods import head_dim

    def __post_init__(self):
        check_config(self)
        check_heads(self, even=True)
        if all(self.rope_layers):
            object.__setattr__(self, "rope_layers", ())
        if self.rope_layers and len(self.rope_layers) != self.layers:
            raise ValueError(
                f"`rope_layers` has {len(self.rope_layers)} entries, but there are {self.layers} "
                "layers. It must have one for each layer."
            )


class LlamaLayers(StackedLayers):
    """The parameters of all decoder layers, stacked along their first dimension."""

    attention_norm: Float[Array, "layers width"]
    wq: Float[Array, "layers width heads head_dim"]
    wk: Float[Array, "layers width kv_heads head_dim"]
    wv: Float[Array, "layers width kv_heads head_dim"]
    wo: Float[Array, "layers heads head_dim width"]
    bq: Float[Array, "layers heads head_dim"] | None
    bk: Float[Array, "layers kv_heads head_dim"] | None
    bv: Float[Array, "layers kv_heads head_dim"] | None
    q_norm: Float[Array, "layers head_dim"] | Float[Array, "layers heads head_dim"] | None
    k_norm: Float[Array, "layers head_dim"] | Float[Array, "layers kv_heads head_dim"] | None
    mlp_norm: Float[Array, "layers width"]
    gate: Float[Array, "layers width hidden"]
    up: Float[Array, "layers width hidden"]
    down: Float[Array, "layers hidden width"]

    def __init__(self, config: LlamaConfig, *, key: PRNGKeyArray):
        c = config
        keys = jax.random.split(key, 7)
        q, kv = (c.layers, c.heads, c.head_dim), (c.layers, c.kv_heads, c.head_dim)
        self.attention_norm, self.mlp_norm = (jnp.ones((c.layers, c.width)) for _ in range(2))
        self.wq, self.wk, self.wv, self.wo = initial_attention(c, *keys[:4])
        self.bq, self.bk, self.bv = (jnp.zeros(s) if c.qkv_bias else None for s in (q, kv, kv))
        norms = (q, kv) if c.output_norms else 2 * ((c.layers, c.head_dim),)
        self.q_norm, self.k_norm = (jnp.ones(s) if c.qk_norm else None for s in norms)
        self.gate, self.up, self.down = initial_mlp(c, *keys[4:])


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

    from ._methods import decoder_call as __call__
    from ._methods import decoder_decode as decode
    from ._methods import decoder_hidden as hidden
    from ._methods import decoder_init_cache as init_cache
    from ._methods import tied_or_own_head as unembed

    def __init__(self, config: LlamaConfig, *, key: PRNGKeyArray):
        """Initialises the parameters: normal with variance 1 / fan-in, truncated at three standard
        deviations. The output projections of the layers are divided by sqrt(2 * layers)."""
        embed, layers, head = jax.random.split(key, 3)
        self.embed, self.head = initial_tables(config, embed, head)
        self.layers = LlamaLayers(config, key=layers)
        self.norm = jnp.ones(config.width)
        self.config = config

    def _run(self, tokens, mask, positions, see, cache, key):
        c = self.config
        visible = see(window=c.window)
        x = look_up(self.embed, tokens)
        angles = scaled_angles(positions, c.head_dim, c.rope_base, c.rope_scaling, wide(x.dtype))
        norm = lambda x, scale: rms_norm(x, scale, c.norm_eps)
        same = lambda x, scale: x
        before, after = (same, norm) if c.output_norms else (norm, same)

        def layer_fn(x, cache, inputs, index, key):
            (layer, rotated), (cos, sin) = inputs, angles
            if rotated is not None:
                cos, sin = jnp.where(rotated, cos, 1), jnp.where(rotated, sin, 0)
            y = before(x, layer.attention_norm)
            q, (k, v) = queries(layer, y), keys_values(layer, y)
            if c.qk_norm:
                q, k = norm(q, layer.q_norm), norm(k, layer.k_norm)
            q, k = rotate(q, (cos, sin)), rotate(k, (cos, sin))
            cache, k, v = extend(cache, index, k, v)
            y = attend(q, k, v, visible=visible, rate=c.attention_dropout, key=key)
            x = x + after(product("bshk,hkd->bsd", y, layer.wo), layer.attention_norm)
            y = gated_feed_forward(layer, before(x, layer.mlp_norm), "silu")
            return x + after(y, layer.mlp_norm), cache

        layers = (self.layers, jnp.asarray(c.rope_layers) if c.rope_layers else None)
        x, cache = scan_layers(
            layer_fn, x, layers, cache=cache, key=key, remat=c.remat, unroll=c.unroll
        )
        return rms_norm(x, self.norm, c.norm_eps), cache
