"""The GPT-OSS decoder: a mixture of experts with biases, attention sinks, and sliding windows in
some layers."""

import functools as ft
from dataclasses import KW_ONLY, dataclass

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from ._attention import as_array, attend, attend_near, real_tokens
from ._attention_layers import AttentionLayers, initial_attention
from ._base_config import GroupedConfig, HeadSizes, check_config, check_even_heads
from ._basic import (
    initial_mlp,
    initial_tables,
    look_up,
    normal,
    recomputed,
    rms_norm,
    wide,
)
from ._cache import extend
from ._check_config import check_chosen, check_local
from ._decoder import RoutedDecoder, TableHead
from ._einsum import keys_values, outputs, product, queries
from ._moe import add_use, mix_experts, no_use
from ._rotary import Yarn, rotate, scaled_angles
from ._scan_layers import scan_layers

# The gain of the sigmoid in the experts.
_GAIN = 1.702


@dataclass(frozen=True)
class GptOssConfig(GroupedConfig, HeadSizes):
    """The configuration of a `GptOss`.

    **Arguments:**

    - `vocab`, `width`, `layers`, `heads`, `kv_heads`, `head_size`, `rope_base`, `rope_scaling`,
      `norm_eps`, `tied`, `attention_dropout`, `context`, `remat`, `unroll`, `eos`, `bos`, `pad`,
      `decoding`: as in [`LlamaConfig`][redcoast.models.LlamaConfig].
    - `hidden`: the hidden size of each expert.
    - `experts`, `chosen`, `router_loss_weight`: as in
      [`MixtralConfig`][redcoast.models.MixtralConfig].
    - `local`: for each layer, whether it has a sliding attention window; by default, no layer has.
    - `window`: the size of that window in tokens, including the token itself.
    - `limit`: the hidden features of the experts are clamped to it.
    """

    experts: int = 32
    chosen: int = 4
    _: KW_ONLY
    head_size: int | None = None
    rope_base: int | float = 150000.0
    rope_scaling: Yarn | None = None
    local: tuple[bool, ...] = ()
    window: int | None = None
    limit: int | float = 7.0
    norm_eps: int | float = 1e-5
    router_loss_weight: int | float = 0.001
    context: int = 131072

    def __post_init__(self):
        check_config(self, "chosen")
        check_even_heads(self)
        check_chosen(self)
        check_local(self)


class GptOssLayers(AttentionLayers):
    """The parameters of all decoder layers, stacked along their first dimension."""

    sinks: Float[Array, "layers heads"]
    mlp_norm: Float[Array, "layers width"]
    router: Float[Array, "layers width experts"]
    router_bias: Float[Array, "layers experts"]
    gate: Float[Array, "layers experts width hidden"]
    gate_bias: Float[Array, "layers experts hidden"]
    up: Float[Array, "layers experts width hidden"]
    up_bias: Float[Array, "layers experts hidden"]
    down: Float[Array, "layers experts hidden width"]
    down_bias: Float[Array, "layers experts width"]

    def __init__(self, config: GptOssConfig, *, key: PRNGKeyArray):
        c = config
        keys = jax.random.split(key, 8)
        super().__init__(c, initial_attention(c, keys[:4]), biases="qkvo")
        self.sinks = jnp.zeros((c.layers, c.heads))
        self.mlp_norm = jnp.ones((c.layers, c.width))
        self.router = normal(keys[4], (c.layers, c.width, c.experts), fan_in=c.width)
        self.router_bias = jnp.zeros((c.layers, c.experts))
        self.gate, self.up, self.down = initial_mlp(c, *keys[5:], c.experts)
        inside = (c.layers, c.experts, c.hidden)
        self.gate_bias, self.up_bias = jnp.zeros(inside), jnp.zeros(inside)
        self.down_bias = jnp.zeros((c.layers, c.experts, c.width))


class GptOss(TableHead, RoutedDecoder):
    """The GPT-OSS decoder (OpenAI, 2025, <https://arxiv.org/abs/2508.10925>).

    ```python
    config = GptOssConfig(vocab=256, width=128, layers=4, heads=4, kv_heads=2, hidden=128)
    model = GptOss(config, key=jax.random.key(0))
    logits = model(jnp.zeros((8, 64), jnp.int32))  # (8, 64, 256)
    ```
    """

    embed: Float[Array, "vocab width"]
    layers: GptOssLayers
    norm: Float[Array, " width"]
    head: Float[Array, "width vocab"] | None
    config: GptOssConfig = eqx.field(static=True)

    def __init__(self, config: GptOssConfig, *, key: PRNGKeyArray):
        """Initialises the parameters: normal with variance 1 / fan-in, truncated at three standard
        deviations. The output projections of the layers are divided by sqrt(2 * layers). Biases and
        attention sinks are zero."""
        embed, layers, head = jax.random.split(key, 3)
        self.embed, self.head = initial_tables(config, embed, head)
        self.layers = GptOssLayers(config, key=layers)
        self.norm = jnp.ones(config.width)
        self.config = config

    def _run(self, tokens, mask, positions, see, cache, key):
        c = self.config
        everywhere, near = see(window=None), see(window=c.window)
        real = as_array(real_tokens(tokens.shape, mask))
        x = look_up(self.embed, tokens)  # (batch, seq, width)
        angles = scaled_angles(positions, c.head_dim, c.rope_base, c.rope_scaling, wide(x.dtype))

        def layer_fn(x, carry, inputs, index, key):
            (cache, use), (layer, local) = carry, inputs
            y = rms_norm(x, layer.attention_norm, c.norm_eps)
            q = queries(layer, y)  # (batch, seq, heads, head_dim)
            k, v = keys_values(layer, y)  # (batch, seq, kv_heads, head_dim)
            # Keys are rotated before they are stored, each by its own position.
            cache, k, v = extend(cache, index, rotate(k, angles), v)
            q = rotate(q, angles)
            options = {"sinks": layer.sinks, "rate": c.attention_dropout, "key": key}
            if any(c.local):
                y = attend_near(q, k, v, local=local, visible=(everywhere, near), **options)
            else:
                y = attend(q, k, v, visible=everywhere, **options)
            x = x + outputs(layer, y)  # (batch, seq, width)
            y = rms_norm(x, layer.mlp_norm, c.norm_eps)
            # (batch, seq, experts)
            scores = product("bsd,de->bse", y, layer.router, layer.router_bias)
            experts = ft.partial(_mlp, layer, c.limit)
            y, more = mix_experts(experts, y, scores, real, chosen=c.chosen)
            return x + y, (cache, add_use(use, more))

        layers = (self.layers, jnp.asarray(c.local or (False,) * c.layers))
        carry = (cache, no_use(c.experts, wide(x.dtype)))
        x, (cache, use) = scan_layers(layer_fn, x, layers, cache=carry, key=key, **c.loop_options)
        return rms_norm(x, self.norm, c.norm_eps), cache, use


def _mlp(layer, limit, x):
    # (batch, experts, tokens, hidden)
    gate = product("betd,edh->beth", x, layer.gate) + layer.gate_bias[None, :, None]
    up = product("betd,edh->beth", x, layer.up) + layer.up_bias[None, :, None]
    y = recomputed(ft.partial(_activate, limit))(gate, up)  # (batch, experts, tokens, hidden)
    return product("beth,ehd->betd", y, layer.down) + layer.down_bias[None, :, None]


def _activate(limit, gate, up):
    gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
    # With this gain the sigmoid approximates GELU, and 1 lets the gate alone pass.
    return gate * jax.nn.sigmoid(_GAIN * gate) * (up + 1)
