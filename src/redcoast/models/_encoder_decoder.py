"""The interface of encoder-decoders."""

from abc import abstractmethod
from dataclasses import replace
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from equinox import AbstractVar
from jaxtyping import Array, Float, Integer

from ._attention import causal_view, count_positions, full_view, real_tokens
from ._basic import split_key
from ._cache import admit, cached_view, empty_cache
from ._check_config import check_length
from ._check_tokens import check_tokens
from ._cross_cache import CrossCache, DecoderMask, Memory, cross_view, read_memory
from ._inputs import AnyArray, HiddenStates, Key, Mask, Segments, Tokens

# An encoder attends to nothing but its own tokens.
NO_MEMORY = (None, None, None)


class CrossDecoder(eqx.Module):
    """A decoder that also attends to a memory, and its cache."""

    embed: AbstractVar[Float[Array, "vocab width"]]
    decoder: AbstractVar[Any]
    config: AbstractVar[Any]

    @abstractmethod
    def _run(self, stack, tokens, positions, visible, cross, cache, key) -> tuple[Array, Any]:
        """Returns the final hidden states of `stack`, the encoder or the decoder, and the cache.
        `cross` has the memory of the decoder, or its keys and values in all layers, and what of it
        is seen; or it is `NO_MEMORY`."""

    def init_cache(
        self, batch: int, length: int, *, memory: Memory, memory_mask: Mask | None = None
    ) -> CrossCache:
        """Returns an empty cache for `batch` rows of up to `length` decoder tokens.

        The cache also holds the keys and values of `memory`, the output of `encode`. `memory_mask`
        is 1 at its real tokens.
        """
        c = self.config
        own = empty_cache(c.decoder_layers, batch, length, c.heads, c.head_dim, self.embed.dtype)
        return CrossCache(own, *read_memory(self.decoder.layers.cross, batch, memory, memory_mask))

    def decode(
        self, tokens: Tokens, cache: CrossCache, *, mask: Mask | None = None
    ) -> tuple[HiddenStates, CrossCache]:
        """Appends tokens to a cache. Returns their hidden states and the updated cache."""
        check_tokens(tokens, self.config.vocab, mask=mask)
        own = admit(cache.own, tokens.shape, mask)
        positions, see = cached_view(own, tokens.shape[1])
        # The keys and values of the memory were computed with the cache, so the memory is not
        # needed.
        cross = (None, (cache.k, cache.v), full_view(cache.mask))
        x, own = self._run(self.decoder, tokens, positions, see(), cross, own, None)
        return x, replace(cache, own=own)


class EncoderDecoder(CrossDecoder):
    """An encoder of tokens, and a decoder that attends to its output."""

    encoder: AbstractVar[Any]

    @abstractmethod
    def unembed(self, hidden: HiddenStates) -> Float[Array, "batch seq vocab"]:
        """Returns the logits of hidden states."""

    def __call__(
        self,
        tokens: Tokens,
        decoder_tokens: Integer[AnyArray, "batch decoder_seq"],
        *,
        mask: Mask | None = None,
        decoder_mask: DecoderMask | None = None,
        segments: Segments | None = None,
        decoder_segments: Integer[AnyArray, "#batch decoder_seq"] | None = None,
        key: Key = None,
    ) -> Float[Array, "batch decoder_seq vocab"]:
        """Returns the logits of the next token at each position of the decoder.

        **Arguments:**

        - `tokens`, `decoder_tokens`: the input token ids of the encoder and of the decoder (see
          `shift_right`), from 0 to `vocab - 1`, also at padding. Any other id gives NaN, or raises
          an error outside of `jax.jit`.
        - `mask`, `decoder_mask`: 1 at real tokens and 0 at padding tokens, which may be on either
          side. The logits of real tokens do not depend on padding; the logits of padding tokens are
          meaningless.
        - `segments`, `decoder_segments`: for rows with several packed sequences, the number of the
          sequence that each token belongs to. Decoder tokens attend to encoder tokens with the same
          number.
        - `key`: PRNG key for dropout. Without it, dropout is disabled.

        **Raises:**

        `ValueError` if the encoder and the decoder have different numbers of rows, if only one of
        them has segments, or if positions are learned and a row without segments is longer than
        `config.positions`.
        """
        options = {"mask": mask, "decoder_mask": decoder_mask, "key": key}
        options |= {"segments": segments, "decoder_segments": decoder_segments}
        return self.unembed(self.hidden(tokens, decoder_tokens, **options))

    def hidden(
        self,
        tokens: Tokens,
        decoder_tokens: Integer[AnyArray, "batch decoder_seq"],
        *,
        mask: Mask | None = None,
        decoder_mask: DecoderMask | None = None,
        segments: Segments | None = None,
        decoder_segments: Integer[AnyArray, "#batch decoder_seq"] | None = None,
        key: Key = None,
    ) -> Float[Array, "batch decoder_seq width"]:
        """Returns the final hidden states, from which `unembed` computes the logits. The arguments
        are those of `__call__`."""
        check_tokens(tokens, self.config.vocab, mask=mask, segments=segments)
        check_tokens(
            decoder_tokens,
            self.config.vocab,
            name="decoder_tokens",
            decoder_mask=decoder_mask,
            decoder_segments=decoder_segments,
        )
        encoder_key, key = split_key(key, 2)
        cross_visible = cross_view(
            tokens.shape, decoder_tokens.shape, mask, segments, decoder_segments
        )
        memory = self.encode(tokens, mask=mask, segments=segments, key=encoder_key)
        real = _real(self, decoder_tokens, decoder_mask, decoder_segments)
        visible = causal_view(real, segments=decoder_segments)  # (batch, queries, keys), or a view
        positions = count_positions(real, decoder_segments)  # (batch, decoder_seq)
        cross = (memory, None, cross_visible)
        return self._run(self.decoder, decoder_tokens, positions, visible, cross, None, key)[0]

    def encode(
        self,
        tokens: Tokens,
        *,
        mask: Mask | None = None,
        segments: Segments | None = None,
        key: Key = None,
    ) -> HiddenStates:
        """Returns the encoder's hidden states, which the decoder attends to. The arguments are
        those of `__call__`."""
        check_tokens(tokens, self.config.vocab, mask=mask, segments=segments)
        real = _real(self, tokens, mask, segments)
        visible, positions = full_view(real, segments), count_positions(real, segments)
        return self._run(self.encoder, tokens, positions, visible, NO_MEMORY, None, key)[0]


def _real(self, tokens, mask, segments):
    if segments is None:
        check_length(self.config, tokens.shape[1])
    return real_tokens(tokens.shape, mask)


def shift_right(
    labels: Integer[Array | np.ndarray, "*batch seq"], *, start: int, pad: int | None = None
) -> Any:
    """Shifts labels to the right by one, which gives the input tokens of a decoder.

    ```python
    config = T5Config(vocab=99, width=8, layers=1, decoder_layers=1, heads=2, hidden=16)
    labels = np.array([[5, 7, 1], [6, 1, -100]])
    tokens = shift_right(labels, start=config.decoder_start)  # [[0, 5, 7], [0, 6, 1]]
    ```

    **Arguments:**

    - `labels`: the target tokens of the decoder, integers of shape (..., seq).
    - `start`: the token that the decoder starts with, `decoder_start` in the configuration.
    - `pad`: replaces negative labels, such as the -100 that marks padding for some losses; by
      default `start`.

    **Returns:**

    Tokens of the same shape and dtype: `start`, followed by all labels but the last. A NumPy array
    if `labels` is one.

    **Raises:**

    `TypeError` if the labels are not integers. `ValueError` if `start` or `pad` is negative or does
    not fit their dtype, or if there are no labels.
    """
    if not jnp.issubdtype(labels.dtype, np.integer):
        raise TypeError(f"`labels` must be integers, but have dtype {labels.dtype}.")
    if labels.ndim == 0 or labels.shape[-1] == 0:
        raise ValueError(
            f"`labels` has shape {labels.shape}, so there is nothing to shift. It must have a last "
            "dimension with at least one label."
        )
    if pad is None:
        pad = start
    for name, token in (("start", start), ("pad", pad)):
        if not 0 <= token <= np.iinfo(labels.dtype).max:
            raise ValueError(
                f"`{name}` is {token}, but must be from 0 to {np.iinfo(labels.dtype).max}, the "
                f"largest {labels.dtype}."
            )
    # Collate functions run on the host, where a JAX array would be moved to a device.
    xp = jnp
    if isinstance(labels, np.ndarray):
        xp = np
    first = xp.full_like(labels[..., :1], start)  # (..., 1)
    shifted = xp.concatenate([first, labels[..., :-1]], axis=-1)
    return xp.where(shifted < 0, xp.full_like(shifted, pad), shifted)
