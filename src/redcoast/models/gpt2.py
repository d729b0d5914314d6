"""The GPT-2 decoder: learned positions, pre-layer-norm, tied head, optional cross-attention."""

from dataclasses import dataclass, replace

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from ._attention import attend, causal_view, count_positions, full_view, real_tokens
from ._base_config import DecoderConfig, TokenSizes, check_config
from ._basic import dropout, layer_norm, look_up, output_scale, small_normal, split_key
from ._cache import Cache, admit, cached_view, empty_cache, extend
from ._check_config import check_length
from ._check_tokens import check_tokens
from ._cross_cache import CrossCache, Memory, MemoryMask, read_memory
from ._decoder import TableHead
from ._einsum import feed_forward, keys_values, outputs, queries
from ._encoder import CrossLayers
from ._inputs import HiddenStates, Key, Mask, Positions, Segments, Tokens
from ._scan_layers import scan_layers


@dataclass(frozen=True)
class GPT2Config(TokenSizes, DecoderConfig):
    """The configuration of a `GPT2`.

    **Arguments:**

    - `vocab`, `width`, `layers`, `heads`: the vocabulary size, the size of the residual stream, the
      number of layers and the number of heads.
    - `hidden`: the hidden size of the feed-forward network, usually `4 * width`.
    - `positions`: the maximum length in tokens (position embeddings are learned).
    - `activation`: the activation function of the feed-forward network, by its name in
      `config.json` files.
    - `norm_eps`: added to the variance in layer norms.
    - `tied`: whether the output head shares the weights of the embedding.
    - `scale_scores`, `scale_by_layer`: whether attention scores are divided by the square root of
      the head size, and in layer `i` (counted from 0) by `i + 1`.
    - `cross_attention`: whether each layer also attends to a memory.
    - `embed_dropout`, `residual_dropout`, `attention_dropout`: the dropout rates of the embeddings,
      of the outputs that are added to the residual stream, and of the attention weights.
    - `remat`, `unroll`, `eos`, `bos`, `pad`, `decoding`: as in
      [`LlamaConfig`][redcoast.models.LlamaConfig].

    **Raises:**

    `ValueError` if a value is out of range or conflicts with another; `TypeError` if a size is not
    an integer.
    """

    positions: int = 1024
    activation: str = "gelu_new"
    norm_eps: int | float = 1e-5
    tied: bool = True
    scale_scores: bool = True
    scale_by_layer: bool = False
    cross_attention: bool = False
    embed_dropout: int | float = 0.1
    residual_dropout: int | float = 0.1
    attention_dropout: int | float = 0.1

    def __post_init__(self):
        check_config(self, "positions")


class GPT2(TableHead):
    """The GPT-2 decoder (Radford et al., 2019, "Language Models are Unsupervised Multitask
    Learners").

    ```python
    config = GPT2Config(vocab=256, width=128, layers=4, heads=4, hidden=512, positions=64)
    model = GPT2(config, key=jax.random.key(0))
    logits = model(jnp.zeros((8, 64), jnp.int32))  # (8, 64, 256)
    ```
    """

    embed: Float[Array, "vocab width"]
    position_embed: Float[Array, "positions width"]
    layers: CrossLayers
    norm: Float[Array, " width"]
    norm_shift: Float[Array, " width"]
    head: Float[Array, "width vocab"] | None
    config: GPT2Config = eqx.field(static=True)

    def __init__(self, config: GPT2Config, *, key: PRNGKeyArray):
        """Initialises the parameters: normal with standard deviation 0.02, truncated at three
        standard deviations. The output projections of the layers are divided by
        sqrt(2 * layers)."""
        embed, positions, layers, head = jax.random.split(key, 4)
        self.embed = small_normal(embed, (config.vocab, config.width))
        self.position_embed = small_normal(positions, (config.positions, config.width))
        scale = output_scale(config.layers)
        create = eqx.Partial(CrossLayers, config, config.layers, out_scale=scale)
        self.layers = create(cross=config.cross_attention, key=layers)
        self.norm, self.norm_shift = jnp.ones(config.width), jnp.zeros(config.width)
        self.head = None
        if not config.tied:
            self.head = small_normal(head, (config.width, config.vocab))
        self.config = config

    def __call__(
        self,
        tokens: Tokens,
        *,
        mask: Mask | None = None,
        segments: Segments | None = None,
        positions: Positions | None = None,
        memory: Memory | None = None,
        memory_mask: MemoryMask | None = None,
        key: Key = None,
    ) -> Float[Array, "batch seq vocab"]:
        """Returns the logits of the next token at each position.

        **Arguments:**

        - `tokens`, `mask`, `segments`, `positions`, `key`: as for a
          [`Llama`][redcoast.models.Llama].
        - `memory`, `memory_mask`: with `cross_attention`, the hidden states that all tokens of a
          row attend to, and 1 at those that are not padding.

        **Raises:**

        `ValueError` if a row is longer than `config.positions` (unless `segments` or `positions` is
        given), or if only one of `memory` and `cross_attention` is given.
        """
        options = {"mask": mask, "segments": segments, "positions": positions, "key": key}
        options |= {"memory": memory, "memory_mask": memory_mask}
        return self.unembed(self.hidden(tokens, **options))

    def hidden(
        self,
        tokens: Tokens,
        *,
        mask: Mask | None = None,
        segments: Segments | None = None,
        positions: Positions | None = None,
        memory: Memory | None = None,
        memory_mask: MemoryMask | None = None,
        key: Key = None,
    ) -> HiddenStates:
        """Returns the final hidden states, from which `unembed` computes the logits. The arguments
        are those of `__call__`."""
        vocab = self.config.vocab
        check_tokens(tokens, vocab, mask=mask, segments=segments, positions=positions)
        real = real_tokens(tokens.shape, mask)
        if positions is None:
            if segments is None:
                check_length(self.config, tokens.shape[1])
            positions = count_positions(real, segments)
        cross = self._read(tokens.shape[0], memory, memory_mask)
        return self._run(tokens, positions, causal_view(real, segments=segments), cross, key=key)[0]

    def init_cache(
        self,
        batch: int,
        length: int,
        *,
        memory: Memory | None = None,
        memory_mask: MemoryMask | None = None,
    ) -> Cache | CrossCache:
        """Returns an empty key-value cache for `batch` rows of up to `length` tokens.

        With `cross_attention`, the cache also holds the keys and values of `memory`, which are
        computed here once.
        """
        c = self.config
        own = empty_cache(c.layers, batch, length, c.heads, c.head_dim, self.embed.dtype)
        cross = self._read(batch, memory, memory_mask)
        if cross is None:
            return own
        return CrossCache(own, *cross)

    def decode(
        self, tokens: Tokens, cache: Cache | CrossCache, *, mask: Mask | None = None
    ) -> tuple[HiddenStates, Cache | CrossCache]:
        """Appends tokens to a cache. Returns their hidden states and the updated cache."""
        check_tokens(tokens, self.config.vocab, mask=mask)
        if mask is None:
            check_length(self.config, tokens.shape[1])
        if isinstance(cache, CrossCache):
            own, cross = cache.own, (cache.k, cache.v, cache.mask)
        else:
            own, cross = cache, None
        own = admit(own, tokens.shape, mask)
        positions, see = cached_view(own, tokens.shape[1])
        x, own = self._run(tokens, positions, see(), cross, cache=own)
        if isinstance(cache, CrossCache):
            return x, replace(cache, own=own)
        return x, own

    def _read(self, rows, memory, mask):
        if (memory is not None) != self.config.cross_attention:
            raise ValueError(
                "`memory` must be given if `config.cross_attention` is True, and only then."
            )
        if (layers := self.layers.cross) is None:
            return None
        return read_memory(layers, rows, memory, mask)

    def _run(self, tokens, positions, visible, cross, cache=None, key=None):
        c = self.config
        embed_key, key = split_key(key, 2)
        x = look_up(self.embed, tokens) + look_up(self.position_embed, positions)
        x = dropout(x, c.embed_dropout, embed_key)
        stored, cross_visible = [None, None], None  # keys and values of the memory in all layers
        if cross is not None:
            *stored, real = cross
            cross_visible = full_view(real)

        def layer_fn(x, cache, inputs, index, key):
            layer, kv = inputs
            keys = split_key(key, 3)
            y, cache = _attention(layer.attention, x, visible, cache, index, keys[0], c)
            x = x + y
            if layer.cross is not None:
                x = x + _attention(layer.cross, x, cross_visible, None, index, keys[1], c, kv=kv)[0]
            y = layer_norm(x, layer.mlp_norm, layer.mlp_norm_shift, c.norm_eps)
            y = feed_forward(layer, y, c.activation)
            return x + dropout(y, c.residual_dropout, keys[2]), cache

        x, cache = scan_layers(
            layer_fn, x, (self.layers, stored), cache=cache, key=key, **c.loop_options
        )
        return layer_norm(x, self.norm, self.norm_shift, c.norm_eps), cache


def _attention(layer, x, visible, cache, index, key, config, *, kv=None):
    weights_key, key = split_key(key, 2)
    x = layer_norm(x, layer.norm, layer.norm_shift, config.norm_eps)
    q = queries(layer, x)  # (batch, seq, heads, head_dim)
    if kv is None:
        cache, *kv = extend(cache, index, *keys_values(layer, x))
    if config.scale_by_layer:
        q = q / (index + 1).astype(q.dtype)  # the scores of layer i are divided by i + 1
    options = {"rate": config.attention_dropout, "key": weights_key}
    if not config.scale_scores:
        options["scale"] = 1.0
    out = attend(q, *kv, visible=visible, **options)  # (batch, seq, heads, head_dim)
    return dropout(outputs(layer, out), config.residual_dropout, key), cache
