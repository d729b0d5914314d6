"""The T5 encoder-decoder: positions as distances between tokens, and RMSNorm; with a gated
feed-forward network and a head of its own it is T5 v1.1, FLAN-T5, ByT5 and mT5."""

from dataclasses import dataclass
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Integer, PRNGKeyArray

from ._attention import Mask, attend, causal_view, count_positions, full_view, real_tokens
from ._basic import ACTIVATIONS, check_activation, normal, rms_norm
from ._cache import admit, cached_view, empty_cache, extend
from ._checks import check_config, check_heads, check_rates
from ._cross_cache import CrossCache, DecoderMask, Memory, cross_view, read_memory
from ._dropout import dropout, split_key
from ._einsum import Projections, keys_values, outputs, product, queries
from ._relative import check_buckets, relative_bias
from ._scan import Remat, scan_layers


@dataclass(frozen=True)
class T5Config:
    """The sizes of a `T5`.

    **Arguments:**

    - `vocab`, `width`: how many different tokens, and the size of the residual stream.
    - `layers`, `decoder_layers`: how many layers the encoder and the decoder have.
    - `heads`, `hidden`: how many heads, and the hidden size of the feed-forward network.
    - `head_size`: the size of a head; `width / heads` by default.
    - `buckets`, `distance`: how many ranges of distances between tokens are told apart, at least
      4; and the distance from which on all are one range, more than half as much.
    - `activation`, `gated`: of the feed-forward network, by its name in `config.json` files; and
      whether what it gives is multiplied with a second product.
    - `norm_eps`: what RMSNorm adds to the mean square.
    - `tied`: whether the head is the embedding.
    - `scale_head`: whether what goes into the head is divided by the root of the width; by
      default that of a tied head is.
    - `dropout`: the rate at which embeddings, attention weights, the feed-forward network's
      hidden features, and what is added to the residual stream or leaves it are dropped.
    - `remat`: what is computed again in the backward pass, to save memory: `"none"`, `"dots"`
      (everything but the products with weights) or `"full"` (everything in a layer).
    - `kind`: by what name `config.json` files are written; nothing is computed from it.
    - `decoder_start`: the token that the decoder begins with.
    - `eos`, `bos`, `pad`: the tokens that end a text, begin it, and fill what is behind.

    **Raises:**

    `ValueError` if the sizes do not fit together.
    """

    vocab: int
    width: int
    layers: int
    decoder_layers: int
    heads: int
    hidden: int
    head_size: int | None = None
    buckets: int = 32
    distance: int = 128
    activation: str = "relu"
    gated: bool = False
    norm_eps: int | float = 1e-6
    tied: bool = True
    scale_head: bool | None = None
    dropout: int | float = 0.1
    remat: Remat = "none"
    kind: Literal["t5", "mt5"] = "t5"
    decoder_start: int = 0
    eos: tuple[int, ...] = ()
    bos: int | None = None
    pad: int | None = None

    def __post_init__(self):
        check_config(self, "vocab", "width", "layers", "decoder_layers", "heads", "hidden")
        check_heads(self)
        check_rates(self, "dropout")
        check_activation(self.activation)
        check_buckets(self.buckets, self.distance)
        if self.scale_head and not self.tied:
            raise ValueError("Only a tied head is scaled: with `scale_head` set `tied`.")

    @property
    def head_dim(self) -> int:
        return self.head_size or self.width // self.heads

    @property
    def scaled(self) -> bool:
        return self.tied if self.scale_head is None else self.scale_head


class T5Layers(eqx.Module):
    """The parameters of all layers of the encoder or the decoder, stacked."""

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
        # Scores are not divided by the root of a head's size, so queries are that much smaller.
        fan_in = (c.width * c.head_dim, c.width, c.width, c.heads * c.head_dim)
        scales = tuple(x**-0.5 for x in fan_in)
        create = eqx.Partial(Projections, c, layers, scales=scales, biased=False)
        self.attention = create(key=attention)
        self.cross = create(key=cross) if decoder else None
        self.mlp_norm = jnp.ones((layers, c.width))
        self.gate = normal(gate, into, fan_in=c.width) if c.gated else None
        self.up = normal(up, into, fan_in=c.width)
        self.down = normal(down, (layers, c.hidden, c.width), fan_in=c.hidden)


class T5Stack(eqx.Module):
    """The encoder or the decoder; all its layers share what they add to scores at a distance."""

    relative_bias: Float[Array, "buckets heads"]
    layers: T5Layers
    norm: Float[Array, " width"]

    def __init__(self, config: T5Config, layers: int, *, decoder: bool, key: PRNGKeyArray):
        table, key = jax.random.split(key)
        self.relative_bias = normal(table, (config.buckets, config.heads), fan_in=config.width)
        self.layers = T5Layers(config, layers, decoder=decoder, key=key)
        self.norm = jnp.ones(config.width)


class T5(eqx.Module):
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
        """Initial parameters of these sizes by `key`: normal, truncated at three standard
        deviations, with variance 1 for the embedding and 1 / fan-in for the rest, of queries'
        divided by the size of a head."""
        embed, encoder, decoder, head = jax.random.split(key, 4)
        shape = (config.width, config.vocab)
        self.embed = normal(embed, shape[::-1], fan_in=1)
        self.encoder = T5Stack(config, config.layers, decoder=False, key=encoder)
        self.decoder = T5Stack(config, config.decoder_layers, decoder=True, key=decoder)
        self.head = None if config.tied else normal(head, shape, fan_in=config.width)
        self.config = config

    def __call__(
        self,
        tokens: Integer[Array, "batch seq"],
        decoder_tokens: Integer[Array, "batch decoder_seq"],
        *,
        mask: Mask | None = None,
        decoder_mask: DecoderMask | None = None,
        segments: Integer[Array, "batch seq"] | None = None,
        decoder_segments: Integer[Array, "batch decoder_seq"] | None = None,
        key: PRNGKeyArray | None = None,
    ) -> Float[Array, "batch decoder_seq vocab"]:
        """The logits of the token that follows each of the decoder's tokens.

        **Arguments:**

        - `tokens`, `decoder_tokens`: what the encoder reads, and what the decoder goes on from,
          as `shift_right` makes it; below the vocabulary's size; one that is not gets NaN.
        - `mask`, `decoder_mask`: 1 at real tokens, 0 at padding on either side. The logits of
          real tokens do not depend on padding; those of padding mean nothing.
        - `segments`, `decoder_segments`: of texts packed into one row, the number of each.
        - `key`: of the dropout; without it there is none.

        Both must have as many rows, and both segments or none: otherwise a `ValueError`.
        """
        options = {"mask": mask, "decoder_mask": decoder_mask, "key": key}
        options |= {"segments": segments, "decoder_segments": decoder_segments}
        return self.unembed(self.hidden(tokens, decoder_tokens, **options))

    def hidden(
        self,
        tokens: Integer[Array, "batch seq"],
        decoder_tokens: Integer[Array, "batch decoder_seq"],
        *,
        mask: Mask | None = None,
        decoder_mask: DecoderMask | None = None,
        segments: Integer[Array, "batch seq"] | None = None,
        decoder_segments: Integer[Array, "batch decoder_seq"] | None = None,
        key: PRNGKeyArray | None = None,
    ) -> Float[Array, "batch decoder_seq width"]:
        """What the logits are made of; the arguments are those of a call."""
        encoder_key, key = split_key(key, 2)
        seen = cross_view(tokens.shape, decoder_tokens.shape, mask, segments, decoder_segments)
        memory = self.encode(tokens, mask=mask, segments=segments, key=encoder_key)
        real = real_tokens(decoder_tokens.shape, decoder_mask)
        visible = causal_view(real, segments=decoder_segments)
        # Real tokens are next to each other: distances are those of slots, alike in all rows.
        slots = jnp.arange(decoder_tokens.shape[1])[None]
        bias = self._bias(slots, slots, causal=True)
        cross = (memory, None, seen)
        return self._run(self.decoder, decoder_tokens, bias, visible, cross, None, key)[0]

    def encode(
        self,
        tokens: Integer[Array, "batch seq"],
        *,
        mask: Mask | None = None,
        segments: Integer[Array, "batch seq"] | None = None,
        key: PRNGKeyArray | None = None,
    ) -> Float[Array, "batch seq width"]:
        """What the decoder attends to; the arguments are those of a call."""
        visible = full_view(real_tokens(tokens.shape, mask), segments)
        slots = jnp.arange(tokens.shape[1])[None]
        bias = self._bias(slots, slots, causal=False)
        return self._run(self.encoder, tokens, bias, visible, None, None, key)[0]

    def init_cache(
        self, batch: int, length: int, *, memory: Memory, memory_mask: Mask | None = None
    ) -> CrossCache:
        """An empty cache for `length` of the decoder's tokens in each of `batch` rows, beside the
        keys and values of the memory, what `encode` gave; and which of it is real."""
        c = self.config
        cross: Any = self.decoder.layers.cross
        own = empty_cache(c.decoder_layers, batch, length, c.heads, c.head_dim, self.embed.dtype)
        return CrossCache(own, *read_memory(cross, batch, memory, memory_mask))

    def decode(
        self, tokens: Integer[Array, "batch new"], cache: CrossCache, *, mask: Mask | None = None
    ) -> tuple[Float[Array, "batch new width"], CrossCache]:
        """Appends tokens to a cache; what `hidden` would give for them, and the cache."""
        own = admit(cache.own, tokens.shape, mask)
        positions, visible = cached_view(own, tokens.shape[1])
        bias = self._bias(positions, count_positions(own.mask), causal=True)
        cross = (None, (cache.k, cache.v), full_view(cache.mask))
        x, own = self._run(self.decoder, tokens, bias, visible, cross, own, None)
        return x, cache.moved_on(own)

    def unembed(self, hidden: Float[Array, "batch seq width"]) -> Float[Array, "batch seq vocab"]:
        """The logits of hidden states."""
        if self.config.scaled:
            hidden = hidden * self.config.width**-0.5
        if self.head is None:
            return product("bsd,vd->bsv", hidden, self.embed)
        return product("bsd,dv->bsv", hidden, self.head)

    def _bias(self, queries, keys, *, causal):
        table = (self.decoder if causal else self.encoder).relative_bias
        return relative_bias(table, queries, keys, far=self.config.distance, causal=causal)

    def _run(self, stack, tokens, bias, visible, cross, cache, key):
        c = self.config
        embed_key, key, last_key = split_key(key, 3)
        # Indexing would give a token that is not in the vocabulary the embedding of one that is.
        x = dropout(jnp.take(self.embed, tokens, axis=0), c.dropout, embed_key)
        # The keys and values of the memory are in a cache, or computed in each layer.
        nothing: Any = (None, None, None)
        memory, stored, seen = cross or nothing

        def layer_fn(x, cache, inputs, index, key):
            layer, kv = inputs
            keys = split_key(key, 3)
            y = rms_norm(x, layer.attention.norm, c.norm_eps)
            cache, *own = extend(cache, index, *keys_values(layer.attention, y))
            x = x + _attention(layer.attention, y, own, visible, bias, keys[0], c)
            if layer.cross is not None:
                y = rms_norm(x, layer.cross.norm, c.norm_eps)
                kv = keys_values(layer.cross, memory) if kv is None else kv
                x = x + _attention(layer.cross, y, kv, seen, None, keys[1], c)
            y = rms_norm(x, layer.mlp_norm, c.norm_eps)
            return x + _mlp(layer, y, keys[2], c), cache

        layers = (stack.layers, stored)
        x, cache = scan_layers(layer_fn, x, layers, cache=cache, key=key, remat=c.remat)
        return dropout(rms_norm(x, stack.norm, c.norm_eps), c.dropout, last_key), cache


def _attention(layer, x, kv, visible, bias, key, config):
    weights_key, key = split_key(key, 2)
    q, rate = queries(layer, x), config.dropout
    out = attend(q, *kv, visible=visible, bias=bias, scale=1.0, rate=rate, key=weights_key)
    return dropout(outputs(layer, out), rate, key)


def _mlp(layer, x, key, config):
    hidden_key, key = split_key(key, 2)
    up = product("bsd,dh->bsh", x, layer.up)
    act = ACTIVATIONS[config.activation]
    hidden = act(up) if layer.gate is None else act(product("bsd,dh->bsh", x, layer.gate)) * up
    hidden = dropout(hidden, config.dropout, hidden_key)
    return dropout(product("bsh,hd->bsd", hidden, layer.down), config.dropout, key)
