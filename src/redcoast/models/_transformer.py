"""The decoder of LLaMA, Phi-3, Mixtral and their relatives: RMSNorm, rotary embeddings,
grouped-query attention, and a SwiGLU or experts that are SwiGLUs.

The families differ in options. Each family documents its own.
"""

import dataclasses
import functools as ft
from dataclasses import KW_ONLY, dataclass
from typing import Any

import jax
import jax.numpy as jnp
from equinox import AbstractVar
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from ._attention import as_array, attend, attend_near, real_tokens
from ._attention_layers import AttentionLayers, initial_attention
from ._base_config import GroupedConfig, RotarySizes, check_config, check_rotary_dim
from ._basic import (
    dropout,
    initial_mlp,
    initial_tables,
    look_up,
    normal,
    ones,
    rms_norm,
    split_key,
    wide,
)
from ._cache import Cache, extend
from ._check_config import check_chosen, check_local
from ._decoder import Decoder, tied_or_own_head
from ._einsum import gated_feed_forward, keys_values, product, queries
from ._inputs import HiddenStates
from ._moe import add_use, gated_experts, mix_experts, no_use
from ._rotary import (
    LongRope,
    RopeScaling,
    Yarn,
    rotary_angles,
    rotary_frequencies,
    rotate,
    scaled_angles,
)
from ._scan_layers import scan_layers


@dataclass(frozen=True)
class TransformerConfig(GroupedConfig, RotarySizes):
    """The sizes and options of a `Transformer`. Each family documents its own.

    `experts` is None if there are none, and `residual_dropout` is None if a family has no such
    dropout.
    """

    _: KW_ONLY
    head_size: int | None = None
    rotary_dim: int | None = None
    rope_scaling: RopeScaling | Yarn | LongRope | None = None
    rope_layers: tuple[bool, ...] = ()
    query_growth: int | float = 0.0
    local: tuple[bool, ...] = ()
    local_rope_base: int | float | None = None
    norm_eps: int | float = 1e-5
    window: int | None = None
    qkv_bias: bool = False
    qk_norm: bool = False
    output_norms: bool = False
    embed_scale: int | float = 1.0
    residual_scale: int | float = 1.0
    score_factor: int | float | None = None
    logit_divisor: int | float = 1.0
    experts: int | None = None
    chosen: int = 2
    weights_sum_to_one: bool = True
    residual_dropout: int | float | None = None
    router_loss_weight: int | float = 0.001
    context: int = 2048
    kind: str | None = None

    def __post_init__(self):
        check_config(self, "chosen")
        check_chosen(self)
        # Configurations of the same model are equal.
        if all(self.rope_layers):
            object.__setattr__(self, "rope_layers", ())
        if self.rope_layers and len(self.rope_layers) != self.layers:
            raise ValueError(
                f"`rope_layers` has {len(self.rope_layers)} entries, but there are {self.layers} "
                "layers. It must have one for each layer."
            )
        if all(self.local):
            object.__setattr__(self, "local", ())
        check_local(self)
        check_rotary_dim(self)
        if self.query_growth and self.rope_scaling is None:
            raise ValueError(
                "`query_growth` needs a `rope_scaling` with an `original` context, such as `Yarn`."
            )
        if isinstance(self.rope_scaling, LongRope):
            self.rope_scaling.check_pairs(self.rotated // 2)


class TransformerLayers(AttentionLayers):
    """The parameters of all decoder layers, stacked along their first dimension. A feed-forward
    network without experts has no such dimension."""

    q_norm: Float[Array, "layers head_dim"] | Float[Array, "layers heads head_dim"] | None
    k_norm: Float[Array, "layers head_dim"] | Float[Array, "layers kv_heads head_dim"] | None
    mlp_norm: Float[Array, "layers width"]
    router: Float[Array, "layers width experts"] | None
    gate: Float[Array, "layers *experts width hidden"]
    up: Float[Array, "layers *experts width hidden"]
    down: Float[Array, "layers *experts hidden width"]

    def __init__(self, config: TransformerConfig, *, key: PRNGKeyArray):
        c = config
        # A model without experts keeps its initial weights, whatever options there are for others.
        keys = jax.random.split(key, 7 + (c.experts is not None))
        super().__init__(c, initial_attention(c, keys[:4]), biases="qkv" * c.qkv_bias)
        q, kv = (c.head_dim,), (c.head_dim,)
        if c.output_norms:
            q, kv = (c.heads, c.head_dim), (c.kv_heads, c.head_dim)  # over all heads
        self.q_norm = ones((c.layers, *q), when=c.qk_norm)
        self.k_norm = ones((c.layers, *kv), when=c.qk_norm)
        self.mlp_norm = jnp.ones((c.layers, c.width))
        if c.experts is None:
            self.router = None
            self.gate, self.up, self.down = initial_mlp(c, *keys[4:])
        else:
            self.router = normal(keys[4], (c.layers, c.width, c.experts), fan_in=c.width)
            self.gate, self.up, self.down = initial_mlp(c, *keys[5:], c.experts)


class Transformer(Decoder):
    """A decoder with the options of its configuration."""

    embed: Float[Array, "vocab width"]
    layers: TransformerLayers
    norm: Float[Array, " width"]
    head: Float[Array, "width vocab"] | None
    config: AbstractVar[Any]

    def __init__(self, config: TransformerConfig, *, key: PRNGKeyArray):
        """Initialises the parameters: normal with variance 1 / fan-in, truncated at three standard
        deviations. The output projections of the layers are divided by sqrt(2 * layers)."""
        embed, layers, head = jax.random.split(key, 3)
        self.embed, self.head = initial_tables(config, embed, head)
        self.layers = TransformerLayers(config, key=layers)
        self.norm = jnp.ones(config.width)
        self.config = config

    def unembed(self, hidden: HiddenStates) -> Float[Array, "batch seq vocab"]:
        logits = tied_or_own_head(hidden, self.embed, self.head)
        if self.config.logit_divisor == 1:
            return logits
        return logits / self.config.logit_divisor

    def expect(self, cache: Cache, lengths: Int[Array, " batch"]) -> Cache:
        """Sets the maximum number of tokens of each row, which `LongRope` depends on."""
        if not isinstance(self.config.rope_scaling, LongRope):
            return cache
        return dataclasses.replace(cache, lengths=lengths)

    def _run(self, tokens, mask, positions, see, cache, key):
        c = self.config
        real = real_tokens(tokens.shape, mask)
        visible = [see(window=c.window)]  # in layers with a window, and in those without
        if c.local:
            visible.append(see())
        x = _times(look_up(self.embed, tokens), c.embed_scale)  # (batch, seq, width)
        angles = _angles(positions, c, cache, wide(x.dtype))
        growth = _growth(positions, c, x.dtype)

        def layer_fn(x, carry, inputs, index, key):
            (cache, use), (layer, rotated, local) = carry, inputs
            attention_key = mlp_key = None
            if c.residual_dropout is not None:
                key, attention_key, mlp_key = split_key(key, 3)
            turns = _angles_of_layer(angles, rotated, local)
            y = _norm_before(x, layer.attention_norm, c)
            q = queries(layer, y)  # (batch, seq, heads, head_dim)
            k, v = keys_values(layer, y)  # (batch, seq, kv_heads, head_dim)
            if c.qk_norm:
                q, k = rms_norm(q, layer.q_norm, c.norm_eps), rms_norm(k, layer.k_norm, c.norm_eps)
            q, k = rotate(q, turns), rotate(k, turns)
            if growth is not None:
                q = q * growth  # (batch, seq, heads, head_dim)
            cache, k, v = extend(cache, index, k, v)
            options = {"scale": c.score_factor, "rate": c.attention_dropout, "key": key}
            if local is None:
                y = attend(q, k, v, visible=visible[0], **options)
            else:
                y = attend_near(q, k, v, local=local, visible=visible[::-1], **options)
            y = product("bshk,hkd->bsd", y, layer.wo)  # (batch, seq, width)
            x = _add(x, y, layer.attention_norm, attention_key, c)
            y = _norm_before(x, layer.mlp_norm, c)
            y, use = _feed_forward(layer, y, use, real, c)
            return _add(x, y, layer.mlp_norm, mlp_key, c), (cache, use)

        layers = (self.layers, _flags(c.rope_layers), _flags(c.local))
        carry = (cache, no_use(c.experts, wide(x.dtype)))  # bfloat16 cannot count
        x, (cache, use) = scan_layers(layer_fn, x, layers, cache=carry, key=key, **c.loop_options)
        return rms_norm(x, self.norm, c.norm_eps), cache, use


def _flags(of_layers: tuple[bool, ...]) -> Bool[Array, " layers"] | None:
    """An option of each layer, as an input of the scan, or None if all layers are alike."""
    if of_layers:
        return jnp.asarray(of_layers)
    return None


def _norm_before(x, scale, c):
    """The input of attention or of the network, with a norm unless the norms are of outputs."""
    if c.output_norms:
        return x
    return rms_norm(x, scale, c.norm_eps)


def _add(x, y, scale, key, c):
    """Adds the output of attention or of the network to the residual stream."""
    if c.output_norms:
        y = rms_norm(y, scale, c.norm_eps)
    return x + _times(dropout(y, c.residual_dropout or 0.0, key), c.residual_scale)


def _times(x, factor):
    if factor == 1:
        return x
    # The factor is rounded to the dtype first, as in `transformers`.
    return x * jnp.asarray(factor, x.dtype)


def _growth(positions, c, dtype):
    """The factor of queries, which grows with their distance from the first token."""
    if not c.query_growth:
        return None
    contexts = jnp.floor(positions / c.rope_scaling.original).astype(wide(dtype))
    growth = 1 + c.query_growth * jnp.log1p(contexts)  # (batch, seq)
    return growth.astype(dtype)[:, :, None, None]


def _angles(positions, c, cache, dtype):
    """The cosines and sines of all layers; and of the layers with a window, if they differ."""
    lengths = None
    if cache is not None:
        lengths = cache.lengths
    scaled = scaled_angles(positions, c.rotated, c.rope_base, c.rope_scaling, dtype, lengths)
    if not c.local or c.local_rope_base is None:
        return scaled, None
    return scaled, rotary_angles(positions, rotary_frequencies(c.rotated, c.local_rope_base), dtype)


def _angles_of_layer(angles, rotated, local):
    scaled, near = angles
    if near is not None:
        # Layers of both kinds are in one scan, so each selects its angles.
        scaled = jax.tree.map(ft.partial(jnp.where, local), near, scaled)
    if rotated is None:
        return scaled
    cos, sin = scaled
    return jnp.where(rotated, cos, 1), jnp.where(rotated, sin, 0)  # a rotation by 0


def _feed_forward(layer, x, use, real, c):
    """The outputs of the network or of the experts, and the use of experts so far."""
    if layer.router is None:
        return gated_feed_forward(layer, x, "silu"), use
    scores = product("bsd,de->bse", x, layer.router)  # (batch, seq, experts)
    options = {"chosen": c.chosen, "weights_sum_to_one": c.weights_sum_to_one}
    experts = ft.partial(gated_experts, layer)
    x, more = mix_experts(experts, x, scores, as_array(real), **options)
    return x, add_use(use, more)
