"""The BART encoder-decoder: learned positions and post-layer-norm."""

import math
from dataclasses import dataclass

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from ._base_config import DecoderConfig, StackSizes, check_config
from ._basic import dropout, layer_norm, look_up, small_normal, split_key
from ._cache import extend
from ._check_config import check_decoder_start
from ._einsum import keys_values, product, queries
from ._encoder import CrossLayers, attention_output, mlp_output
from ._encoder_decoder import EncoderDecoder
from ._inputs import HiddenStates
from ._scan_layers import scan_layers


@dataclass(frozen=True)
class BartConfig(StackSizes, DecoderConfig):
    """The configuration of a `Bart`.

    **Arguments:**

    - `vocab`, `width`: the vocabulary size and the size of the residual stream.
    - `layers`, `decoder_layers`: the number of layers of the encoder and of the decoder.
    - `heads`, `hidden`: the number of heads and the hidden size of the feed-forward network.
    - `positions`: the maximum length in tokens (position embeddings are learned).
    - `activation`: the activation function of the feed-forward network, by its name in
      `config.json` files.
    - `scale_embedding`: whether token embeddings are multiplied by the square root of the width.
    - `dropout`, `attention_dropout`, `activation_dropout`: the dropout rates of the embeddings and
      the outputs that are added to the residual stream; of the attention weights; and of the hidden
      features of the feed-forward network.
    - `decoder_start`: the token id that the decoder starts with.
    - `remat`, `unroll`, `eos`, `bos`, `pad`, `decoding`: as in
      [`LlamaConfig`][redcoast.models.LlamaConfig].
    """

    positions: int = 1024
    activation: str = "gelu"
    scale_embedding: bool = False
    dropout: int | float = 0.1
    attention_dropout: int | float = 0.0
    activation_dropout: int | float = 0.0
    decoder_start: int = 2

    def __post_init__(self):
        check_config(self, "positions")
        check_decoder_start(self)


# The first rows of BART's tables of positions are unused.
_UNUSED = 2
_EPS = 1e-5


class BartStack(eqx.Module):
    """The encoder or the decoder."""

    position_embed: Float[Array, "positions width"]
    embed_norm: Float[Array, " width"]
    embed_norm_shift: Float[Array, " width"]
    layers: CrossLayers

    def __init__(self, config: BartConfig, layers: int, *, decoder: bool, key: PRNGKeyArray):
        table, key = jax.random.split(key)
        self.position_embed = small_normal(table, (_UNUSED + config.positions, config.width))
        self.embed_norm, self.embed_norm_shift = jnp.ones(config.width), jnp.zeros(config.width)
        self.layers = CrossLayers(config, layers, cross=decoder, key=key)


class Bart(EncoderDecoder):
    """The BART encoder-decoder (Lewis et al., 2019, <https://arxiv.org/abs/1910.13461>).

    ```python
    config = BartConfig(vocab=256, width=128, layers=4, decoder_layers=4, heads=4, hidden=512)
    model = Bart(config, key=jax.random.key(0))
    tokens, labels = jnp.ones((8, 64), jnp.int32), jnp.ones((8, 16), jnp.int32)
    logits = model(tokens, shift_right(labels, start=config.decoder_start))  # (8, 16, 256)
    ```
    """

    embed: Float[Array, "vocab width"]
    encoder: BartStack
    decoder: BartStack
    logits_bias: Float[Array, " vocab"]
    config: BartConfig = eqx.field(static=True)

    def __init__(self, config: BartConfig, *, key: PRNGKeyArray):
        """Initialises the parameters: normal with standard deviation 0.02, truncated at three
        standard deviations."""
        embed, encoder, decoder = jax.random.split(key, 3)
        self.embed = small_normal(embed, (config.vocab, config.width))
        self.encoder = BartStack(config, config.layers, decoder=False, key=encoder)
        self.decoder = BartStack(config, config.decoder_layers, decoder=True, key=decoder)
        self.logits_bias = jnp.zeros(config.vocab)
        self.config = config

    def unembed(self, hidden: HiddenStates) -> Float[Array, "batch seq vocab"]:
        # The bias is not trained: users set it to keep tokens from being generated.
        bias = jax.lax.stop_gradient(self.logits_bias)
        return product("bsd,vd->bsv", hidden, self.embed, bias)

    def _run(self, stack, tokens, positions, visible, cross, cache, key):
        c = self.config
        embed_key, key = split_key(key, 2)
        x = look_up(self.embed, tokens)  # (batch, seq, width)
        if c.scale_embedding:
            x = x * math.sqrt(c.width)
        x = x + look_up(stack.position_embed, _UNUSED + positions)
        x = layer_norm(x, stack.embed_norm, stack.embed_norm_shift, _EPS)  # (batch, seq, width)
        x = dropout(x, c.dropout, embed_key)
        # The memory's keys and values come from a cache or are computed in each layer.
        memory, stored, cross_visible = cross

        def layer_fn(x, cache, inputs, index, key):
            layer, kv = inputs
            keys = split_key(key, 3)
            # BART's norms come after each sublayer, so attention reads the residual stream itself.
            cache, *own = extend(cache, index, *keys_values(layer.attention, x))
            x = _attention(layer.attention, x, own, visible, keys[0], c)
            if layer.cross is not None:
                if kv is None:
                    kv = keys_values(layer.cross, memory)
                x = _attention(layer.cross, x, kv, cross_visible, keys[1], c)
            x = x + mlp_output(layer, x, c, keys[2])
            return layer_norm(x, layer.mlp_norm, layer.mlp_norm_shift, _EPS), cache

        layers = (stack.layers, stored)
        return scan_layers(layer_fn, x, layers, cache=cache, key=key, **c.loop_options)


def _attention(layer, x, kv, visible, key, config):
    x = x + attention_output(layer, queries(layer, x), kv, visible, config, key)
    return layer_norm(x, layer.norm, layer.norm_shift, _EPS)
