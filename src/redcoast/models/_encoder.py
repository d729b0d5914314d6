"""The layers of encoders, and of GPT-2, BART and Whisper: attention and a feed-forward network,
with biases."""

from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from ._attention import Visible, attend
from ._attention_layers import AttentionLayers, sample_attention
from ._basic import ACTIVATIONS, dropout, layer_norm, ones, small_normal, split_key, zeros
from ._by_layer import StackedLayers
from ._einsum import Projections, feed_forward, keys_values, outputs, product, queries
from ._inputs import HiddenStates, Key
from ._scan_layers import scan_layers


class EncoderLayers(AttentionLayers):
    """The parameters of all layers of an encoder, or of an OPT, stacked along their first
    dimension."""

    mlp_norm: Float[Array, "layers width"] | None
    mlp_norm_shift: Float[Array, "layers width"] | None
    up: Float[Array, "layers width hidden"]
    up_bias: Float[Array, "layers hidden"] | None
    down: Float[Array, "layers hidden width"]
    down_bias: Float[Array, "layers width"] | None

    def __init__(
        self,
        config: Any,
        *,
        qkv_bias: bool = True,
        bias: bool = True,
        affine: bool = True,
        sample: Callable[..., Array] = small_normal,
        out_scale: float = 1.0,
        key: PRNGKeyArray,
    ):
        """`sample(key, shape, scale)` returns initial weights; the scale of those that add to the
        residual stream is `out_scale`. Norms have a learned scale and shift if `affine`."""
        c = config
        *of_attention, up, down = jax.random.split(key, 6)
        weights = sample_attention(c, of_attention, sample, out_scale)
        # ViT and its relatives may have biases in all but Q, K and V.
        biases = ""
        if bias:
            biases = "o"
            if qkv_bias:
                biases = "qkvo"
        super().__init__(c, weights, biases=biases, norm=affine, shift=affine)
        stream, inside = (c.layers, c.width), (c.layers, c.hidden)
        self.mlp_norm, self.mlp_norm_shift = ones(stream, when=affine), zeros(stream, when=affine)
        self.up, self.up_bias = sample(up, (*stream, c.hidden)), zeros(inside, when=bias)
        self.down = sample(down, (*inside, c.width), out_scale)
        self.down_bias = zeros(stream, when=bias)


def attention_output(
    layer: PyTree,
    q: Float[Array, "batch queries heads k"],
    kv: Sequence[Float[Array, "batch keys heads k"]],
    visible: Visible,
    config: Any,
    key: Key,
) -> Float[Array, "batch queries width"]:
    """Computes the output of one layer's attention, given its queries, keys and values, to be added
    to the residual stream."""
    weights_key, key = split_key(key, 2)
    # (batch, queries, heads, head_dim)
    out = attend(q, *kv, visible=visible, rate=config.attention_dropout, key=weights_key)
    return dropout(outputs(layer, out), config.dropout, key)


def pre_norm_layers(
    part: PyTree, x: HiddenStates, visible: Visible, config: Any, key: Key
) -> HiddenStates:
    """Applies the layers of an encoder with norms before attention and the feed-forward network,
    and the last norm."""
    c = config

    def layer_fn(x, cache, layer, index, key):
        attention_key, key = split_key(key, 2)
        y = layer_norm(x, layer.attention_norm, layer.attention_norm_shift, c.norm_eps)
        q, kv = queries(layer, y), keys_values(layer, y)  # (batch, seq, heads, head_dim)
        x = x + attention_output(layer, q, kv, visible, c, attention_key)
        y = layer_norm(x, layer.mlp_norm, layer.mlp_norm_shift, c.norm_eps)
        return x + dropout(feed_forward(layer, y, c.activation), c.dropout, key), cache

    x, _ = scan_layers(layer_fn, x, part.layers, key=key, **c.loop_options)
    return layer_norm(x, part.norm, part.norm_shift, c.norm_eps)


class CrossLayers(StackedLayers):
    """The parameters of all layers of an encoder or a decoder, stacked along their first dimension.
    Those of a decoder may attend to a memory."""

    attention: Projections
    cross: Projections | None
    mlp_norm: Float[Array, "layers width"]
    mlp_norm_shift: Float[Array, "layers width"]
    up: Float[Array, "layers width hidden"]
    up_bias: Float[Array, "layers hidden"]
    down: Float[Array, "layers hidden width"]
    down_bias: Float[Array, "layers width"]

    def __init__(
        self,
        config: Any,
        layers: int,
        *,
        cross: bool,
        key_bias: bool = True,
        out_scale: float = 1.0,
        key: PRNGKeyArray,
    ):
        """`cross` is whether there is attention to a memory. The scale of the weights that add to
        the residual stream is `out_scale`."""
        attention, of_cross, up, down = jax.random.split(key, 4)
        stream, hidden = (layers, config.width), (layers, config.hidden)
        scales = (0.02, 0.02, 0.02, 0.02 * out_scale)  # of Q, K, V and outputs
        create = eqx.Partial(Projections, config, layers, scales=scales, key_bias=key_bias)
        self.attention, self.cross = create(key=attention), None
        if cross:
            self.cross = create(key=of_cross)
        self.mlp_norm, self.mlp_norm_shift = jnp.ones(stream), jnp.zeros(stream)
        self.up, self.up_bias = small_normal(up, (*stream, config.hidden)), jnp.zeros(hidden)
        self.down = small_normal(down, (*hidden, config.width), out_scale)
        self.down_bias = jnp.zeros(stream)


def mlp_output(layer: PyTree, x: HiddenStates, config: Any, key: Key) -> HiddenStates:
    """Computes the output of one layer's feed-forward network, with dropout of its hidden features,
    to be added to the residual stream."""
    hidden_key, key = split_key(key, 2)
    hidden = ACTIVATIONS[config.activation](product("bsd,dh->bsh", x, layer.up, layer.up_bias))
    hidden = dropout(hidden, config.activation_dropout, hidden_key)  # (batch, seq, hidden)
    return dropout(product("bsh,hd->bsd", hidden, layer.down, layer.down_bias), config.dropout, key)
