"""Greedy decoding and sampling."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree

from ..core._token_losses import token_losses
from ._cache_rows import cache_batch_dims, repeat_rows
from ._logits import NO_TOKENS, choose_tokens
from ._processors import History, least_new, new_history
from ._prompt import ReadPrompt, append_tokens, first_logits
from ._request import Logits, Request, Rows


class Last(eqx.Module):
    """The newest token of each row, its log-probability if requested, whether the row has ended,
    its number of tokens, and the number of steps so far; all tokens of the row, if a choice depends
    on them; and its minimum number of steps."""

    tokens: Int[Array, " batch"]
    scores: Float[Array, " batch"] | None
    ended: Bool[Array, " batch"]
    lengths: Int[Array, " batch"]
    count: Int[Array, ""]
    history: History | None
    least: Int[Array, " rows_or_1"] | None


class New(eqx.Module):
    """The new tokens of each row, their log-probabilities if requested, and their number."""

    tokens: Int[Array, "results room"]
    scores: Float[Array, "results room"] | None
    lengths: Int[Array, " results"]


def sample(model: PyTree, read: ReadPrompt, request: Request) -> tuple[New, PyTree]:
    """Generates tokens until all rows have ended. Returns also the cache."""
    cache, last = begin(model, read, request)
    shape = (last.tokens.shape[0], request.room)
    scores = None
    if request.scored:
        scores = jnp.zeros(shape, jnp.float32)
    new = New(jnp.full(shape, request.pad, jnp.int32), scores, last.lengths)

    def write(new, last):
        # The token of step i is in column i, since `count` is one more.
        put = lambda x, step: jax.lax.dynamic_update_slice_in_dim(
            x, step[:, None], last.count - 1, 1
        )
        tokens, scores = jax.tree.map(put, (new.tokens, new.scores), (last.tokens, last.scores))
        return New(tokens, scores, last.lengths)

    def keep_going(carry):
        return (carry[1].count < request.limit) & ~jnp.all(carry[1].ended)

    def step(carry):
        cache, last, new = carry
        cache, last = advance(model, cache, last, request)
        return cache, last, write(new, last)

    cache, _, new = jax.lax.while_loop(keep_going, step, (cache, last, write(new, last)))
    return new, cache


def begin(model: PyTree, read: ReadPrompt, request: Request) -> tuple[PyTree, Last]:
    """Returns the cache and the first new token."""
    logits, cache = first_logits(model, read, request), read.cache
    prompt = jnp.asarray(read.prompt)
    if request.copies > 1:
        cache = repeat_rows(cache, cache_batch_dims(cache, logits.shape[0]), request.copies)
        logits = jnp.repeat(logits, request.copies, axis=0)  # a prompt is read once for its results
        prompt = jnp.repeat(prompt, request.copies, axis=0)
    rows = jnp.zeros(logits.shape[0], jnp.int32)
    history = new_history(prompt, request)
    scores = None
    if request.scored:
        scores = rows.astype(jnp.float32)
    count = jnp.zeros((), jnp.int32)
    least = least_new(prompt, request)
    nothing = Last(rows, scores, rows.astype(bool), rows, count, history, least)
    return cache, _next(logits, nothing, request)


def advance(model: PyTree, cache: PyTree, last: Last, request: Request) -> tuple[PyTree, Last]:
    """Generates one more token for each row."""
    logits, cache = append_tokens(model, last.tokens, cache)
    return cache, _next(logits, last, request)


def _next(logits: Logits, last: Last, request: Request) -> Last:
    history, count = last.history, last.count
    tokens = choose_tokens(logits, history, count, last.least, request)
    tokens = jnp.where(last.ended, request.pad, tokens)
    scores = None
    if request.scored:
        scores = jnp.where(last.ended, 0, score_tokens(logits, tokens))
    if history is not None:
        place = history.shape[1] - request.room + count  # new tokens follow the prompt
        history = jax.lax.dynamic_update_slice_in_dim(history, tokens[:, None], place, 1)
    ended = last.ended | is_any(tokens, (*request.eos, *NO_TOKENS))
    lengths = last.lengths + (~last.ended).astype(jnp.int32)  # the token that ends a row counts
    return Last(tokens, scores, ended, lengths, count + 1, history, last.least)


def score_tokens(logits: Logits, tokens: Rows) -> Float[Array, " rows"]:
    """Returns the log-probabilities of tokens, of float32 logits as those that they were chosen
    from."""
    return -token_losses(logits.astype(jnp.float32), jnp.maximum(tokens, 0))


def is_any(tokens: Int[Array, "..."], some: tuple[int, ...]) -> Bool[Array, "..."]:
    is_some = jnp.zeros(tokens.shape, bool)
    for token in some:
        is_some |= tokens == token
    return is_some
