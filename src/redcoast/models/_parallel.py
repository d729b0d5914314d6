"""The decoder of GPT-J and GPT-NeoX: attention and the feed-forward network in parallel, and rotary
embeddings of some features of each head."""

from dataclasses import KW_ONLY, dataclass
from typing import Any

import jax
import jax.numpy as jnp
from equinox import AbstractVar
from jaxtyping import Array, Float, PRNGKeyArray

from ._attention import attend
from ._attention_layers import sample_attention
from ._base_config import DecoderConfig, TokenSizes, check_config
from ._basic import dropout, layer_norm, look_up, ones, output_scale, split_key, wide, zeros
from ._by_layer import StackedLayers
from ._cache import extend
from ._decoder import Decoder, tied_or_own_head
from ._einsum import Projections, feed_forward, outputs, product, queries
from ._inputs import HiddenStates
from ._rotary import rotary_angles, rotary_frequencies, rotate, rotate_pairs
from ._scan_layers import scan_layers


@dataclass(frozen=True)
class ParallelConfig(TokenSizes, DecoderConfig):
    """The sizes and options of a `ParallelDecoder`. Each family documents its own.

    - `attention_bias`, `head_bias`: whether attention, and the output head, have biases.
    """

    _: KW_ONLY
    rotary_dim: int = 64
    rope_base: int | float = 10000.0
    rope_pairs: bool = True  # whether rotary embeddings rotate neighbouring features
    mlp_norm: bool = False  # whether the feed-forward network has its own norm
    parallel: bool = True  # whether it reads the residual stream before attention, not after it
    attention_bias: bool = False
    head_bias: bool = True
    activation: str = "gelu_new"
    norm_eps: int | float = 1e-5
    tied: bool = False
    embed_dropout: int | float = 0.0
    residual_dropout: int | float = 0.0
    attention_dropout: int | float = 0.0
    context: int = 2048

    def __post_init__(self):
        check_config(self, "rotary_dim")
        if self.rotary_dim % 2 or self.rotary_dim > self.head_dim:
            raise ValueError(
                f"`rotary_dim` must be even and at most the head size {self.head_dim}, but is "
                f"{self.rotary_dim}."
            )
        if not self.parallel and not self.mlp_norm:
            raise ValueError("Without `parallel`, the feed-forward network needs its `mlp_norm`.")


class ParallelLayers(Projections, StackedLayers):
    """The parameters of all layers, stacked along their first dimension."""

    mlp_norm: Float[Array, "layers width"] | None
    mlp_norm_shift: Float[Array, "layers width"] | None
    up: Float[Array, "layers width hidden"]
    up_bias: Float[Array, "layers hidden"]
    down: Float[Array, "layers hidden width"]
    down_bias: Float[Array, "layers width"]

    def __init__(self, config: ParallelConfig, *, key: PRNGKeyArray):
        c = config
        *of_attention, up, down = jax.random.split(key, 6)
        scale = output_scale(c.layers)
        stream, of_heads = (c.layers, c.width), (c.layers, c.heads, c.head_dim)
        self.norm, self.norm_shift = jnp.ones(stream), jnp.zeros(stream)
        weights = sample_attention(c, of_attention, _normal, scale)
        self.wq, self.wk, self.wv, self.wo = weights
        self.bq, self.bk, self.bv = (zeros(of_heads, when=c.attention_bias) for _ in range(3))
        self.bo = zeros(stream, when=c.attention_bias)
        self.mlp_norm = ones(stream, when=c.mlp_norm)
        self.mlp_norm_shift = zeros(stream, when=c.mlp_norm)
        self.up = _normal(up, (c.layers, c.width, c.hidden))
        self.up_bias = jnp.zeros((c.layers, c.hidden))
        self.down = _normal(down, (c.layers, c.hidden, c.width), scale)
        self.down_bias = jnp.zeros(stream)


def _normal(key, shape, scale=1.0):
    return jax.random.normal(key, shape) * (0.02 * scale)


class ParallelDecoder(Decoder):
    """A decoder with the options of its configuration."""

    embed: Float[Array, "vocab width"]
    layers: ParallelLayers
    norm: Float[Array, " width"]
    norm_shift: Float[Array, " width"]
    head: Float[Array, "width vocab"] | None
    head_bias: Float[Array, " vocab"] | None
    config: AbstractVar[Any]

    def __init__(self, config: ParallelConfig, *, key: PRNGKeyArray):
        """Initialises the parameters: normal with standard deviation 0.02. The output projections
        of the layers are divided by sqrt(2 * layers)."""
        embed, layers, head = jax.random.split(key, 3)
        self.embed = _normal(embed, (config.vocab, config.width))
        self.layers = ParallelLayers(config, key=layers)
        self.norm, self.norm_shift = jnp.ones(config.width), jnp.zeros(config.width)
        self.head, self.head_bias = None, zeros((config.vocab,), when=config.head_bias)
        if not config.tied:
            self.head = _normal(head, (config.width, config.vocab))
        self.config = config

    def unembed(self, hidden: HiddenStates) -> Float[Array, "batch seq vocab"]:
        return tied_or_own_head(hidden, self.embed, self.head, self.head_bias)

    def _run(self, tokens, mask, positions, see, cache, key):
        c, visible = self.config, see()
        embed_key, key = split_key(key, 2)
        x = dropout(look_up(self.embed, tokens), c.embed_dropout, embed_key)  # (batch, seq, width)
        frequencies = rotary_frequencies(c.rotary_dim, c.rope_base)  # (rotary_dim / 2,)
        angles = rotary_angles(positions, frequencies, wide(x.dtype))
        # GPT-J rotates neighbouring features, and GPT-NeoX features that are half of the rotated
        # ones apart.
        turn = rotate
        if c.rope_pairs:
            turn = rotate_pairs

        def layer_fn(x, cache, layer, index, key):
            attention_key, mlp_key = split_key(key, 2)
            weights_key, out_key = split_key(attention_key, 2)
            y = layer_norm(x, layer.norm, layer.norm_shift, c.norm_eps)
            q = turn(queries(layer, y), angles)  # (batch, seq, heads, head_dim)
            k = turn(product("bsd,dhk->bshk", y, layer.wk, layer.bk), angles)
            v = product("bsd,dhk->bshk", y, layer.wv, layer.bv)  # (batch, seq, heads, head_dim)
            cache, k, v = extend(cache, index, k, v)
            # (batch, seq, heads, head_dim)
            z = attend(q, k, v, visible=visible, rate=c.attention_dropout, key=weights_key)
            z = dropout(outputs(layer, z), c.residual_dropout, out_key)  # (batch, seq, width)
            # Without a norm of its own, the network reads the input of attention.
            if c.mlp_norm and c.parallel:
                y = layer_norm(x, layer.mlp_norm, layer.mlp_norm_shift, c.norm_eps)
            elif c.mlp_norm:
                y = layer_norm(x + z, layer.mlp_norm, layer.mlp_norm_shift, c.norm_eps)
            y = dropout(feed_forward(layer, y, c.activation), c.residual_dropout, mlp_key)
            # Both outputs are added to what entered the layer.
            return x + z + y, cache

        x, cache = scan_layers(layer_fn, x, self.layers, cache=cache, key=key, **c.loop_options)
        return layer_norm(x, self.norm, self.norm_shift, c.norm_eps), cache, None
