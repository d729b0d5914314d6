"""The T5 encoder-decoder: relative position biases and RMSNorm.

With a gated feed-forward network and an untied head, it is T5 v1.1, FLAN-T5, ByT5 or mT5.
"""

from dataclasses import dataclass
from typing import Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from ._attention import attend, count_positions
from ._base_config import DecoderConfig, StackSizes, check_config
from ._basic import ACTIVATIONS, activate_gated, dropout, look_up, normal, rms_norm, split_key
from ._by_layer import StackedLayers
from ._cache import extend
from ._check_config import check_decoder_start
from ._decoder import tied_or_own_head
from ._einsum import Projections, keys_values, outputs, product, queries
from ._encoder_decoder import EncoderDecoder
from ._inputs import HiddenStates
from ._relative import check_buckets, relative_bias
from ._scan_layers import scan_layers


@dataclass(frozen=True)
class T5Config(StackSizes, DecoderConfig):
    """The configuration of a `T5`.

    **Arguments:**

    - `vocab`, `width`, `layers`, `decoder_layers`, `heads`, `hidden`, `decoder_start`: as in
      [`BartConfig`][redcoast.models.BartConfig].
    - `head_size`: the size of each head; `width / heads` by default.
    - `buckets`, `distance`: the number of relative position buckets, at least 4; and the distance
      from which on all distances share one bucket, more than `buckets / 2`.
    - `activation`, `gated`: the activation function of the feed-forward network, by its name in
      `config.json` files; and whether the network is gated, as in GEGLU.
    - `norm_eps`: added to the mean square in RMSNorm.
    - `tied`: whether the output head shares the weights of the embedding.
    - `scale_head`: whether the input of the head is divided by the square root of the width; by
      default only if the head is tied.
    - `dropout`: the dropout rate of the embeddings, the attention weights, the hidden features of
      the feed-forward network, the outputs that are added to the residual stream, and the final
      hidden states.
    - `kind`: the `model_type` under which `save_pretrained` saves the model. It does not change the
      results.
    - `remat`, `unroll`, `eos`, `bos`, `pad`, `decoding`: as in
      [`LlamaConfig`][redcoast.models.LlamaConfig].
    """

    head_size: int | None = None
    buckets: int = 32
    distance: int = 128
    activation: str = "relu"
    gated: bool = False
    norm_eps: int | float = 1e-6
    tied: bool = True
    scale_head: bool | None = None
    dropout: int | float = 0.1
    kind: Literal["t5", "mt5"] = "t5"
    decoder_start: int = 0

    def __post_init__(self):
        check_config(self)
        check_decoder_start(self)
        check_buckets(self.buckets, self.distance)
        if self.scale_head and not self.tied:
            raise ValueError("`scale_head=True` needs `tied=True`: only a tied head is scaled.")

    @property
    def scaled(self) -> bool:
        if self.scale_head is None:
            return self.tied
        return self.scale_head


class T5Layers(StackedLayers):
    """The parameters of all layers of the encoder or decoder, stacked along their first
    dimension."""

    attention: Projections
    cross: Projections | None
    mlp_norm: Float[Array, "layers width"]
    gate: Float[Array, "layers width hidden"] | None
    up: Float[Array, "layers width hidden"]
    down: Float[Array, "layers hidden width"]

    def __init__(self, config: T5Config, layers: int, *, decoder: bool, key: PRNGKeyArray):
        c = config
        attention, cross, gate, up, down = jax.random.split(key, 5)
        into = (layers, c.width, c.hidden)
        # T5 does not divide scores by the square root of the head size, so queries start smaller.
        fan_in = (c.width * c.head_dim, c.width, c.width, c.heads * c.head_dim)
        scales = tuple(x**-0.5 for x in fan_in)
        create = eqx.Partial(Projections, c, layers, scales=scales, biased=False)
        self.attention, self.cross, self.gate = create(key=attention), None, None
        if decoder:
            self.cross = create(key=cross)
        self.mlp_norm = jnp.ones((layers, c.width))
        if c.gated:
            self.gate = normal(gate, into, fan_in=c.width)
        self.up = normal(up, into, fan_in=c.width)
        self.down = normal(down, (layers, c.hidden, c.width), fan_in=c.hidden)


class T5Stack(eqx.Module):
    """The encoder or the decoder. All its layers share one table of relative position biases."""

    relative_bias: Float[Array, "buckets heads"]
    layers: T5Layers
    norm: Float[Array, " width"]

    def __init__(self, config: T5Config, layers: int, *, decoder: bool, key: PRNGKeyArray):
        table, key = jax.random.split(key)
        self.relative_bias = normal(table, (config.buckets, config.heads), fan_in=config.width)
        self.layers = T5Layers(config, layers, decoder=decoder, key=key)
        self.norm = jnp.ones(config.width)


class T5(EncoderDecoder):
    """The T5 encoder-decoder (Raffel et al., 2020, <https://arxiv.org/abs/1910.10683>), with the
    gated feed-forward network of Shazeer (2020, <https://arxiv.org/abs/2002.05202>).

    ```python
    config = T5Config(vocab=256, width=128, layers=4, decoder_layers=4, heads=4, hidden=512)
    model = T5(config, key=jax.random.key(0))
    tokens, labels = jnp.ones((8, 64), jnp.int32), jnp.ones((8, 16), jnp.int32)
    logits = model(tokens, shift_right(labels, start=config.decoder_start))  # (8, 16, 256)
    ```
    """

    embed: Float[Array, "vocab width"]
    encoder: T5Stack
    decoder: T5Stack
    head: Float[Array, "width vocab"] | None
    config: T5Config = eqx.field(static=True)

    def __init__(self, config: T5Config, *, key: PRNGKeyArray):
        """Initialises the parameters: normal, truncated at three standard deviations.

        The variance is 1 for the embedding and 1 / fan-in for all other weights; for query
        projections, it is also divided by the head size.
        """
        embed, encoder, decoder, head = jax.random.split(key, 4)
        self.embed, self.head = normal(embed, (config.vocab, config.width), fan_in=1), None
        self.encoder = T5Stack(config, config.layers, decoder=False, key=encoder)
        self.decoder = T5Stack(config, config.decoder_layers, decoder=True, key=decoder)
        if not config.tied:
            self.head = normal(head, (config.width, config.vocab), fan_in=config.width)
        self.config = config

    def unembed(self, hidden: HiddenStates) -> Float[Array, "batch seq vocab"]:
        if self.config.scaled:
            hidden = hidden * self.config.width**-0.5
        return tied_or_own_head(hidden, self.embed, self.head)

    def _run(self, stack, tokens, positions, visible, cross, cache, key):
        c = self.config
        # Real tokens are contiguous, so slots give the same distances as positions, in all rows.
        of_queries = of_keys = jnp.arange(tokens.shape[1])[None]
        if cache is not None:
            of_queries, of_keys = positions, count_positions(cache.mask)
        # Buckets of the decoder are all for earlier tokens.
        options = {"far": c.distance, "causal": stack.layers.cross is not None}
        bias = relative_bias(stack.relative_bias, of_queries, of_keys, **options)
        embed_key, key, last_key = split_key(key, 3)
        x = dropout(look_up(self.embed, tokens), c.dropout, embed_key)  # (batch, seq, width)
        # The memory's keys and values come from a cache or are computed in each layer.
        memory, stored, cross_visible = cross

        def layer_fn(x, cache, inputs, index, key):
            layer, kv = inputs
            keys = split_key(key, 3)
            y = rms_norm(x, layer.attention.norm, c.norm_eps)
            cache, *own = extend(cache, index, *keys_values(layer.attention, y))
            x = x + _attention(layer.attention, y, own, visible, bias, keys[0], c)
            if layer.cross is not None:
                y = rms_norm(x, layer.cross.norm, c.norm_eps)
                if kv is None:
                    kv = keys_values(layer.cross, memory)
                x = x + _attention(layer.cross, y, kv, cross_visible, None, keys[1], c)
            hidden_key, out_key = split_key(keys[2], 2)
            y = rms_norm(x, layer.mlp_norm, c.norm_eps)
            up = product("bsd,dh->bsh", y, layer.up)  # (batch, seq, hidden)
            if layer.gate is None:
                y = ACTIVATIONS[c.activation](up)
            else:
                y = activate_gated(c.activation, product("bsd,dh->bsh", y, layer.gate), up)
            y = product("bsh,hd->bsd", dropout(y, c.dropout, hidden_key), layer.down)
            return x + dropout(y, c.dropout, out_key), cache

        layers = (stack.layers, stored)
        x, cache = scan_layers(layer_fn, x, layers, cache=cache, key=key, **c.loop_options)
        return dropout(rms_norm(x, stack.norm, c.norm_eps), c.dropout, last_key), cache


def _attention(layer, x, kv, visible, bias, key, config):
    weights_key, key = split_key(key, 2)
    q, rate = queries(layer, x), config.dropout
    # Cross-attention has no bias: positions of two sequences have no distance.
    out = attend(q, *kv, visible=visible, bias=bias, scale=1.0, rate=rate, key=weights_key)
    return dropout(outputs(layer, out), rate, key)
