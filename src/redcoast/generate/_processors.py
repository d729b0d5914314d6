"""The options of decoding that change the scores before a token is chosen.

They have the definitions and the order of `transformers`. A history contains the prompt and the new
tokens of each row so far, and -1 at padding and later positions. Its last `room` columns are for
the new tokens.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ._request import Request, Scalar

Scores = Float[Array, "rows vocab"]
History = Int[Array, "rows length"]
Least = Int[Array, " rows_or_1"] | None


def new_history(prompt: Int[Array, "rows prompt"], request: Request) -> History | None:
    """Returns the history before the first new token; None if no choice depends on it."""
    if not request.needs_history:
        return None
    return jnp.pad(prompt, ((0, 0), (0, request.room)), constant_values=-1)


def least_new(prompt: Int[Array, "rows prompt"], request: Request) -> Least:
    """Returns the number of new tokens before which a row must not end; None if there is none.

    `prompt` holds -1 at padding, which is not part of the prompt: the length of a row does not
    depend on the other rows.
    """
    if request.least_with_prompt is None and request.least is None:
        return None
    if request.least_with_prompt is None:
        return jnp.asarray(request.least)[None]
    lengths = jnp.sum(prompt >= 0, axis=1, dtype=jnp.int32)  # (rows,)
    missing = jnp.asarray(request.least_with_prompt) - lengths
    if request.least is None:
        return missing
    return jnp.maximum(missing, request.least)


def process(
    scores: Scores, history: History | None, count: Int[Array, ""], least: Least, request: Request
) -> Scores:
    """Applies the options to logits, or to log-probabilities in beam search. `count` is the number
    of new tokens so far, and `least` is what `least_new` returned."""
    raw = scores
    if request.logits_fn is not None:
        scores = request.logits_fn(raw)
        if getattr(scores, "shape", None) != raw.shape or scores.dtype != raw.dtype:
            raise ValueError(
                f"`logits_fn` returned {jax.typeof(scores)}. It must return logits of the shape "
                f"and the dtype that it gets, {jax.typeof(raw)}."
            )
    if request.repetition_penalty is not None:
        scores = penalise(scores, history, request.repetition_penalty)
    if request.ngram:
        scores = _exclude(scores, repeats_ngram(history, count, request, scores.shape[1]))
    for word in request.bad_words:
        last = jnp.arange(scores.shape[1]) == word[-1]
        scores = _exclude(scores, follows(history, count, request, word[:-1])[:, None] & last[None])
    if least is not None:
        early = (count < least)[:, None]
        scores = _exclude(scores, early & _is(request.eos, scores))  # no end yet
    if request.forced_bos is not None:
        scores = _force(scores, (count == 0)[None, None], (request.forced_bos,))
    if request.forced_eos:
        last = jnp.reshape(count + 1 == request.limit, (-1, 1))
        scores = _force(scores, last, request.forced_eos)
    if request.suppress:
        scores = _exclude(scores, _is(request.suppress, scores))
    if request.begin_suppress:
        scores = _exclude(scores, (count == 0) & _is(request.begin_suppress, scores))
    return jnp.where(jnp.isnan(raw), raw, scores)  # is reported


def _exclude(scores: Scores, excluded: Bool[Array, "rows_or_1 vocab"]) -> Scores:
    return jnp.where(excluded, -jnp.inf, scores)


def _is(tokens: tuple[int, ...], scores: Scores) -> Bool[Array, "1 vocab"]:
    return jnp.any(jnp.arange(scores.shape[1])[:, None] == jnp.array(tokens)[None], axis=1)[None]


def _force(scores: Scores, now: Bool[Array, "rows_or_1 1"], tokens: tuple[int, ...]) -> Scores:
    return jnp.where(now, jnp.where(_is(tokens, scores), 0.0, -jnp.inf), scores)


def penalise(scores: Scores, history: History | None, penalty: Scalar) -> Scores:
    """Makes the tokens of the history less likely, if the penalty is above 1."""
    assert history is not None
    lower = jnp.where(scores < 0, scores * penalty, scores / penalty)
    return jnp.where(tokens_in(history, scores.shape[1]), lower, scores)


def tokens_in(tokens: Int[Array, "rows some"], vocab: int) -> Bool[Array, "rows vocab"]:
    """Whether each token of the vocabulary is in a row, in which -1 is ignored."""
    rows = tokens.shape[0]
    place = jnp.where(tokens < 0, vocab, tokens)  # -1 is written to an extra entry
    is_there = jnp.zeros((rows, vocab + 1), bool)
    return is_there.at[jnp.arange(rows)[:, None], place].set(True)[:, :vocab]


def repeats_ngram(
    history: History | None, count: Int[Array, ""], request: Request, vocab: int
) -> Bool[Array, "rows vocab"]:
    """Whether a token would complete a sequence of `ngram` tokens that the history holds."""
    assert history is not None
    size = request.ngram - 1
    rows, length = history.shape
    last = _last(history, count, request, size)  # (rows, size)
    starts = max(0, length - size)
    same = jnp.ones((rows, starts), bool)  # whether the latest tokens begin at each column, too
    for i in range(size):
        token = last[:, i, None]
        same &= (history[:, i : i + starts] == token) & (token >= 0)
    after = history[:, size:]  # what followed each of these beginnings
    return tokens_in(jnp.where(same, after, -1), vocab)


def follows(
    history: History | None, count: Int[Array, ""], request: Request, tokens: tuple[int, ...]
) -> Bool[Array, " rows_or_1"]:
    """Whether the latest tokens of a row are these."""
    if not tokens:
        return jnp.ones(1, bool)
    assert history is not None
    return jnp.all(_last(history, count, request, len(tokens)) == jnp.array(tokens)[None], axis=1)


def _last(
    history: History, count: Int[Array, ""], request: Request, size: int
) -> Int[Array, "rows size"]:
    # With columns before the first token, so that a short history matches nothing.
    wide = jnp.pad(history, ((0, 0), (size, 0)), constant_values=-1)
    end = history.shape[1] - request.room + count
    return jax.lax.dynamic_slice_in_dim(wide, end, size, axis=1)
