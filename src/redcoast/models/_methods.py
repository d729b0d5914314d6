"""Methods that several models share.

A class imports them in its body instead of inheriting them. An assignment, such as
`hidden = decoder_hidden`, would do the same, but mkdocstrings does not render it.

A decoder has a method `_run(tokens, mask, positions, see, cache, key)`, which returns the final
hidden states and the cache. `see(window=...)` returns which keys each token sees. That of an
encoder-decoder is `_run(stack, tokens, positions, visible, cross, cache, key)`, where `cross` is
what the decoder attends to: the memory, or its keys and values in all layers; and its mask.
"""

import functools as ft
from typing import Any

from jaxtyping import Array, Float, Integer, PRNGKeyArray

from ._attention import causal_view, count_positions, full_view, real_tokens
from ._cache import Cache, admit, cached_view, empty_cache
from ._check_config import check_length
from ._cross_cache import CrossCache, DecoderMask, Memory, cross_view, read_memory
from ._dropout import split_key
from ._einsum import product
from ._inputs import AnyArray, Mask
from ._moe import router_loss


@property
def head_dim(self: Any) -> int:
    return getattr(self, "head_size", None) or self.width // self.heads


def decoder_call(
    self: Any,
    tokens: Integer[AnyArray, "batch seq"],
    *,
    mask: Mask | None = None,
    segments: Integer[AnyArray, "batch seq"] | None = None,
    positions: Integer[AnyArray, "#batch seq"] | None = None,
    key: PRNGKeyArray | None = None,
) -> Float[Array, "batch seq vocab"]:
    """Returns the logits of the next token at each position.

    **Arguments:**

    - `tokens`: token ids from 0 to `vocab - 1`. A larger id gives NaN.
    - `mask`: 1 at real tokens and 0 at padding tokens, which may be on either side. The logits
      of real tokens do not depend on padding; those of padding tokens are meaningless.
    - `segments`: for rows with several packed sequences, the number of the sequence that each
      token belongs to. Tokens attend only to their own sequence.
    - `positions`: the position of each token, by default counted over the real tokens of the
      row or segment. If positions are learned, one of `config.positions` or more gives NaN.
    - `key`: PRNG key for dropout. Without it, dropout is disabled.

    **Raises:**

    `ValueError` if positions are learned and a row is longer than `config.positions`, unless
    `segments` or `positions` is given.
    """
    options = {"mask": mask, "segments": segments, "positions": positions, "key": key}
    return self.unembed(self.hidden(tokens, **options))


def decoder_hidden(
    self: Any,
    tokens: Integer[AnyArray, "batch seq"],
    *,
    mask: Mask | None = None,
    segments: Integer[AnyArray, "batch seq"] | None = None,
    positions: Integer[AnyArray, "#batch seq"] | None = None,
    key: PRNGKeyArray | None = None,
) -> Float[Array, "batch seq width"]:
    """Returns the final hidden states, from which `unembed` computes the logits.

    The arguments are those of `__call__`.
    """
    return _run_from_start(self, tokens, mask, segments, positions, key)[0]


def experts_hidden_and_router_loss(
    self: Any,
    tokens: Integer[AnyArray, "batch seq"],
    *,
    mask: Mask | None = None,
    segments: Integer[AnyArray, "batch seq"] | None = None,
    positions: Integer[AnyArray, "#batch seq"] | None = None,
    key: PRNGKeyArray | None = None,
) -> tuple[Float[Array, "batch seq width"], Float[Array, ""]]:
    """Returns the final hidden states, and the load-balancing loss of the routers for training
    (Fedus et al., 2021, equations 4 to 6, <https://arxiv.org/abs/2101.03961>).

    The loss is lowest if all experts are used equally. The arguments are those of `__call__`.

    ```python
    hidden, router_loss = model.hidden_and_router_loss(tokens, mask=mask)
    loss = cross_entropy(model.unembed(hidden), targets, mask=mask)
    loss = loss + model.config.router_loss_weight * router_loss
    ```
    """
    x, _, (count, probability) = _run_from_start(self, tokens, mask, segments, positions, key)
    return x, router_loss(count, probability, self.config.chosen)


def _run_from_start(self, tokens, mask, segments, positions, key):
    if segments is None and positions is None:
        check_length(self.config, tokens.shape[1])
    real = real_tokens(tokens.shape, mask)
    if positions is None:
        positions = count_positions(real, segments)
    see = ft.partial(causal_view, real, segments=segments)
    return self._run(tokens, mask, positions, see, None, key)


def decoder_init_cache(self: Any, batch: int, length: int) -> Cache:
    """Returns an empty key-value cache for `batch` rows of up to `length` tokens."""
    c = self.config
    kv_heads = getattr(c, "kv_heads", c.heads)
    return empty_cache(c.layers, batch, length, kv_heads, c.head_dim, self.embed.dtype)


def decoder_decode(
    self: Any, tokens: Integer[AnyArray, "batch new"], cache: Cache, *, mask: Mask | None = None
) -> tuple[Float[Array, "batch new width"], Cache]:
    """Appends tokens to a cache. Returns their hidden states and the updated cache."""
    if mask is None:
        check_length(self.config, tokens.shape[1])
    cache = admit(cache, tokens.shape, mask)
    return self._run(tokens, mask, *cached_view(cache, tokens.shape[1]), cache, None)[:2]


def tied_or_own_head(
    self: Any, hidden: Float[Array, "batch seq width"]
) -> Float[Array, "batch seq vocab"]:
    """Returns the logits of hidden states."""
    bias = getattr(self, "head_bias", None)
    if self.head is None:
        return product("bsd,vd->bsv", hidden, self.embed, bias)
    return product("bsd,dv->bsv", hidden, self.head, bias)


def encoder_decoder_call(
    self: Any,
    tokens: Integer[AnyArray, "batch seq"],
    decoder_tokens: Integer[AnyArray, "batch decoder_seq"],
    *,
    mask: Mask | None = None,
    decoder_mask: DecoderMask | None = None,
    segments: Integer[AnyArray, "batch seq"] | None = None,
    decoder_segments: Integer[AnyArray, "batch decoder_seq"] | None = None,
    key: PRNGKeyArray | None = None,
) -> Float[Array, "batch decoder_seq vocab"]:
    """Returns the logits of the next token at each position of the decoder.

    **Arguments:**

    - `tokens`, `decoder_tokens`: the input token ids of the encoder and of the decoder (see
      `shift_right`), from 0 to `vocab - 1`. A larger id gives NaN.
    - `mask`, `decoder_mask`: 1 at real tokens and 0 at padding tokens, which may be on either
      side. The logits of real tokens do not depend on padding; those of padding tokens are
      meaningless.
    - `segments`, `decoder_segments`: for rows with several packed sequences, the number of the
      sequence that each token belongs to. Decoder tokens attend to encoder tokens with the same
      number.
    - `key`: PRNG key for dropout. Without it, dropout is disabled.

    **Raises:**

    `ValueError` if the encoder and the decoder have different numbers of rows, if only one of them
    has segments, or if positions are learned and a row without segments is longer than
    `config.positions`.
    """
    options = {"mask": mask, "decoder_mask": decoder_mask, "key": key}
    options |= {"segments": segments, "decoder_segments": decoder_segments}
    return self.unembed(self.hidden(tokens, decoder_tokens, **options))


def encoder_decoder_hidden(
    self: Any,
    tokens: Integer[AnyArray, "batch seq"],
    decoder_tokens: Integer[AnyArray, "batch decoder_seq"],
    *,
    mask: Mask | None = None,
    decoder_mask: DecoderMask | None = None,
    segments: Integer[AnyArray, "batch seq"] | None = None,
    decoder_segments: Integer[AnyArray, "batch decoder_seq"] | None = None,
    key: PRNGKeyArray | None = None,
) -> Float[Array, "batch decoder_seq width"]:
    """Returns the final hidden states, from which `unembed` computes the logits.

    The arguments are those of `__call__`.
    """
    encoder_key, key = split_key(key, 2)
    seen = cross_view(tokens.shape, decoder_tokens.shape, mask, segments, decoder_segments)
    memory = self.encode(tokens, mask=mask, segments=segments, key=encoder_key)
    real = _real(self, decoder_tokens, decoder_mask, decoder_segments)
    visible = causal_view(real, segments=decoder_segments)
    positions = count_positions(real, decoder_segments)
    cross = (memory, None, seen)
    return self._run(self.decoder, decoder_tokens, positions, visible, cross, None, key)[0]


def encoder_decoder_encode(
    self: Any,
    tokens: Integer[AnyArray, "batch seq"],
    *,
    mask: Mask | None = None,
    segments: Integer[AnyArray, "batch seq"] | None = None,
    key: PRNGKeyArray | None = None,
) -> Float[Array, "batch seq width"]:
    """Returns the encoder's hidden states, which the decoder attends to.

    The arguments are those of `__call__`.
    """
    real = _real(self, tokens, mask, segments)
    visible, positions = full_view(real, segments), count_positions(real, segments)
    return self._run(self.encoder, tokens, positions, visible, None, None, key)[0]


def _real(self, tokens, mask, segments):
    if segments is None:
        check_length(self.config, tokens.shape[1])
    return real_tokens(tokens.shape, mask)


def encoder_decoder_init_cache(
    self: Any, batch: int, length: int, *, memory: Memory, memory_mask: Mask | None = None
) -> CrossCache:
    """Returns an empty cache for `batch` rows of up to `length` decoder tokens.

    The cache also holds the keys and values of `memory`, the output of `encode`. `memory_mask` is 1
    at its real tokens.
    """
    c = self.config
    own = empty_cache(c.decoder_layers, batch, length, c.heads, c.head_dim, self.embed.dtype)
    return CrossCache(own, *read_memory(self.decoder.layers.cross, batch, memory, memory_mask))


def encoder_decoder_decode(
    self: Any,
    tokens: Integer[AnyArray, "batch new"],
    cache: CrossCache,
    *,
    mask: Mask | None = None,
) -> tuple[Float[Array, "batch new width"], CrossCache]:
    """Appends tokens to a cache. Returns their hidden states and the updated cache."""
    own = admit(cache.own, tokens.shape, mask)
    positions, see = cached_view(own, tokens.shape[1])
    cross = (None, (cache.k, cache.v), full_view(cache.mask))
    x, own = self._run(self.decoder, tokens, positions, see(), cross, own, None)
    return x, cache.with_own(own)
