"""The interface of decoders."""

import functools as ft
from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import equinox as eqx
from equinox import AbstractVar
from jaxtyping import Array, Float, PyTree

from ._attention import Visible, causal_view, count_positions, real_tokens
from ._cache import Cache, admit, cached_view, empty_cache
from ._check_config import check_length
from ._check_tokens import check_tokens
from ._einsum import LowRank, product
from ._inputs import HiddenStates, Key, Mask, Positions, Segments, Tokens
from ._moe import router_loss


class TableHead(eqx.Module):
    """An output head that is a separate matrix, or the embedding."""

    embed: AbstractVar[Float[Array, "vocab width"]]
    head: AbstractVar[Float[Array, "width vocab"] | None]

    def unembed(self, hidden: HiddenStates) -> Float[Array, "batch seq vocab"]:
        """Returns the logits of hidden states."""
        return tied_or_own_head(hidden, self.embed, self.head)


def tied_or_own_head(
    hidden: HiddenStates,
    embed: Array | LowRank,
    head: Array | LowRank | None,
    bias: Array | None = None,
) -> Float[Array, "batch seq vocab"]:
    """Returns the products of hidden states with the head, or with the embedding if it is tied."""
    if head is None:
        # The embedding has the vocabulary first, and is used as it is.
        return product("bsd,vd->bsv", hidden, embed, bias)
    return product("bsd,dv->bsv", hidden, head, bias)


class Decoder(eqx.Module):
    """A decoder: computes the hidden states of tokens, their logits, and a cache to continue from.

    A family defines its parameters, and computes hidden states in `_run`.
    """

    embed: AbstractVar[Float[Array, "vocab embed_width"]]
    config: AbstractVar[Any]

    @abstractmethod
    def unembed(self, hidden: HiddenStates) -> Float[Array, "batch seq vocab"]:
        """Returns the logits of hidden states."""

    @abstractmethod
    def _run(
        self,
        tokens: Tokens,
        mask: Mask | None,
        positions: Positions,
        see: Callable[..., Visible],
        cache: Cache | None,
        key: Key,
    ) -> tuple[HiddenStates, Any, Any]:
        """Returns the final hidden states; the cache, if there is one; and, if there are experts,
        the number of tokens routed to each expert and the sum of its probabilities.
        `see(window=...)` returns which keys each token sees."""

    def __call__(
        self,
        tokens: Tokens,
        *,
        mask: Mask | None = None,
        segments: Segments | None = None,
        positions: Positions | None = None,
        key: Key = None,
    ) -> Float[Array, "batch seq vocab"]:
        """Returns the logits of the next token at each position.

        **Arguments:**

        - `tokens`: token ids from 0 to `vocab - 1`, also at padding. Any other id gives NaN, or
          raises an error outside of `jax.jit`.
        - `mask`: 1 at real tokens and 0 at padding tokens, which may be on either side. The logits
          of real tokens do not depend on padding; the logits of padding tokens are meaningless.
        - `segments`: for rows with several packed sequences, the number of the sequence that each
          token belongs to. Tokens attend only to their own sequence.
        - `positions`: the position of each token, by default counted over the real tokens of the
          row or segment. If positions are learned, one that is `config.positions` or more gives
          NaN.
        - `key`: PRNG key for dropout. Without it, dropout is disabled.

        **Raises:**

        `ValueError` if positions are learned and a row is longer than `config.positions`, unless
        `segments` or `positions` is given.
        """
        options = {"mask": mask, "segments": segments, "positions": positions, "key": key}
        return self.unembed(self.hidden(tokens, **options))

    def hidden(
        self,
        tokens: Tokens,
        *,
        mask: Mask | None = None,
        segments: Segments | None = None,
        positions: Positions | None = None,
        key: Key = None,
    ) -> HiddenStates:
        """Returns the final hidden states, from which `unembed` computes the logits. The arguments
        are those of `__call__`."""
        return self._run_from_start(tokens, mask, segments, positions, key)[0]

    def decode(
        self, tokens: Tokens, cache: PyTree, *, mask: Mask | None = None
    ) -> tuple[HiddenStates, PyTree]:
        """Appends tokens to a cache. Returns their hidden states and the updated cache."""
        check_tokens(tokens, self.config.vocab, mask=mask)
        if mask is None:
            check_length(self.config, tokens.shape[1])
        cache = admit(cache, tokens.shape, mask)
        return self._run(tokens, mask, *cached_view(cache, tokens.shape[1]), cache, None)[:2]

    def init_cache(self, batch: int, length: int) -> Cache:
        """Returns an empty key-value cache for `batch` rows of up to `length` tokens. While
        tracing, more of them cannot be refused, and are written over the last ones."""
        c = self.config
        kv_heads = getattr(c, "kv_heads", c.heads)
        return empty_cache(c.layers, batch, length, kv_heads, c.head_dim, self.embed.dtype)

    def _run_from_start(self, tokens, mask, segments, positions, key):
        vocab = self.config.vocab
        check_tokens(tokens, vocab, mask=mask, segments=segments, positions=positions)
        if segments is None and positions is None:
            check_length(self.config, tokens.shape[1])
        real = real_tokens(tokens.shape, mask)  # (batch, seq), or no array at all
        if positions is None:
            positions = count_positions(real, segments)  # (batch, seq)
        see = ft.partial(causal_view, real, segments=segments)
        return self._run(tokens, mask, positions, see, None, key)


class RoutedDecoder(Decoder):
    """A decoder whose layers are mixtures of experts."""

    def hidden_and_router_loss(
        self,
        tokens: Tokens,
        *,
        mask: Mask | None = None,
        segments: Segments | None = None,
        positions: Positions | None = None,
        key: Key = None,
    ) -> tuple[HiddenStates, Float[Array, ""]]:
        """Returns the final hidden states, and the load-balancing loss of the routers for training
        (Fedus et al., 2021, equations 4 to 6, <https://arxiv.org/abs/2101.03961>).

        The loss is lowest if all experts are used equally. The arguments are the same as for
        `__call__`.

        ```python
        hidden, router_loss = model.hidden_and_router_loss(tokens, mask=mask)
        loss = cross_entropy(model.unembed(hidden), targets, mask=mask)
        loss = loss + model.config.router_loss_weight * router_loss
        ```

        **Raises:**

        `ValueError` if the model has no experts, as some models of a family.
        """
        if self.config.experts is None:
            raise ValueError("This model has no experts, and so no loss of their routers.")
        x, _, (count, probability) = self._run_from_start(tokens, mask, segments, positions, key)
        return x, router_loss(count, probability, self.config.chosen)
