"""Decodes a batch step by step, with separate options for each row."""

import dataclasses
import functools as ft
from collections.abc import Callable, Iterator

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Array, Bool, Float, Int, PyTree

from ..core._pytree import SplitTree
from ..generate._logits import filter_logits, first_greatest
from ..generate._prefill import (
    PromptChunks,
    by_layer_with,
    keep_places,
    place_all,
    places_of,
    replicated,
)
from ..generate._processors import process, tokens_in
from ..generate._prompt import append_tokens
from ..generate._request import Logits, Request
from ..losses._cross_entropy import in_chunks, join_chunks
from ._row_options import MOST_TOP, RowOptions

CHUNK = 16  # positions of a prompt whose logits are in memory at a time


class Scores(eqx.Module):
    """Log-probabilities of tokens, and the most likely tokens at their positions."""

    chosen: Float[Array, "*places"]
    top: Float[Array, "*places top"]
    top_tokens: Int[Array, "*places top"]


class RowProgress(eqx.Module):
    """The state of the rows: their newest tokens, or one of `NO_TOKENS`, the number of steps, all
    tokens if a choice depends on their order, whether each token of the vocabulary is in the
    prompt, and how many times it is among the new tokens."""

    tokens: Int[Array, " rows"]
    count: Int[Array, ""]
    history: Int[Array, "rows length"] | None
    in_prompt: Bool[Array, "rows vocab"]
    times: Int[Array, "rows vocab"]
    scores: Scores


def decode_rows(
    model: PyTree,
    tokens: Int[np.ndarray, "rows prompt"],
    mask: Bool[np.ndarray, "rows prompt"],
    request: Request,
    options: RowOptions,
    steps: int,
    *,
    score_prompt: bool,
    allow: Callable[[], np.ndarray] | None,
) -> Iterator[tuple[RowProgress, Scores | None]]:
    """Yields the progress after each of at most `steps` steps; after the first one, with the scores
    of the prompt's tokens if requested. Position `i` has the scores of token `i + 1`.

    The model and the choice of tokens are separate programs. The choice is compiled once for a
    number of rows, and not for each length. `allow` returns the tokens that are allowed next in
    each row, as bits (see `_as_bools`). Without it, the next step can start before the tokens of
    this one are known.
    """
    stacked = SplitTree.of(model)
    everywhere = replicated(places_of(stacked))
    chunks = PromptChunks(model, tokens, mask, request)
    real = chunks.prompt
    # The token after each one; behind the last, any.
    following = np.roll(np.asarray(real)[:, -chunks.columns :], -1, axis=1)
    start, parts, cache, last = 0, [], None, None
    for hidden, of_last, after in chunks:
        cache, last = after, of_last
        size = hidden.shape[1]
        if score_prompt:
            # Padding, -1, gets the score of some token, which is not shown.
            tokens_after = np.maximum(following[:, start : start + size], 0)
            parts.append(_score_chunk(stacked, hidden, tokens_after, everywhere))
        start += size
    scores = None
    if score_prompt:
        scores = jax.tree.map(lambda *x: np.concatenate(x, axis=1), *map(jax.device_get, parts))
    logits = _begin(stacked, last, everywhere)
    model, cache = by_layer_with(model, cache)
    split_model, places = SplitTree.of(model), places_of(cache)
    # The choice depends on the room only if it depends on earlier tokens.
    room = None
    if request.needs_history:
        room = request.room
    progress = _start(real, logits.shape[1], room, everywhere)
    request = dataclasses.replace(request, room=room or 0)
    for step in range(steps):
        if step:
            logits, cache = _advance(cache, split_model, progress.tokens, places, everywhere)
        allowed = None
        if allow is not None:
            allowed = allow()
        progress = _choose(logits, progress, request, options, allowed, everywhere)
        yield progress, scores
        scores = None  # of the prompt, with the first token


@ft.partial(jax.jit, static_argnums=2)
def _begin(model: SplitTree, last: Array, everywhere: NamedSharding | None) -> Logits:
    """Returns the logits of the first new token."""
    logits = model.join().unembed(last)[:, 0].astype(jnp.float32)
    return place_all(logits, everywhere)


@ft.partial(jax.jit, static_argnums=(3, 4), donate_argnums=0)
def _advance(
    cache: PyTree,
    model: SplitTree,
    tokens: Int[Array, " rows"],
    places: tuple[NamedSharding | None, ...],
    everywhere: NamedSharding | None,
) -> tuple[Logits, PyTree]:
    """Returns the logits after one more token of each row, and the cache."""
    # A row whose logits were NaN continues with any token, which is never returned.
    logits, cache = append_tokens(model.join(), jnp.maximum(tokens, 0), cache)
    # Keeps the shardings of the first step: if they changed, each step would be recompiled.
    return place_all(logits.astype(jnp.float32), everywhere), keep_places(cache, places)


@ft.partial(jax.jit, static_argnums=(1, 2, 3))
def _start(
    prompt: Int[Array, "rows prompt"],
    vocab: int,
    room: int | None,
    everywhere: NamedSharding | None,
) -> RowProgress:
    """The progress before the first step, with a history of the prompt and `room` new tokens."""
    rows = prompt.shape[0]
    history = None
    if room is not None:
        history = jnp.pad(prompt, ((0, 0), (0, room)), constant_values=-1)
    progress = RowProgress(
        tokens=jnp.zeros(rows, jnp.int32),
        count=jnp.zeros((), jnp.int32),
        history=history,
        in_prompt=tokens_in(prompt, vocab),
        times=jnp.zeros((rows, vocab), jnp.int32),
        scores=_no_scores(rows, vocab),
    )
    return place_all(progress, everywhere)


@ft.partial(jax.jit, static_argnums=5)
def _choose(
    logits: Logits,
    before: RowProgress,
    request: Request,
    options: RowOptions,
    allowed: Array | np.ndarray | None,
    everywhere: NamedSharding | None,
) -> RowProgress:
    """Chooses the next token of each row."""
    rows, vocab = jnp.arange(logits.shape[0]), logits.shape[1]
    biased = jnp.asarray(options.bias_tokens)
    place = jnp.where(biased < 0, vocab, biased)  # padding is outside, and dropped
    add = lambda scores: scores.at[rows[:, None], place].add(options.bias, mode="drop")
    scores = _where_any(biased >= 0, add, logits)
    scores = _penalised(scores, before, options)
    scores = process(scores, before.history, before.count, None, request)
    # Rows that are too short to end, (rows, 1).
    early = (before.count < jnp.asarray(options.least))[:, None]
    ends = lambda: early & tokens_in(jnp.asarray(options.ends), vocab)
    scores = _where_any(early, lambda s: jnp.where(ends(), -jnp.inf, s), scores)
    if allowed is not None:
        scores = jnp.where(_as_bools(allowed, vocab), scores, -jnp.inf)
    scores = jnp.where(jnp.isnan(logits), logits, scores)  # is reported
    tokens = _draw(scores, before.count, options)
    history = before.history
    if history is not None:
        # Behind the prompt, which takes all columns but `room`.
        place = history.shape[1] - request.room + before.count
        history = jax.lax.dynamic_update_slice_in_dim(history, tokens[:, None], place, 1)
    progress = RowProgress(
        tokens=tokens,
        count=before.count + 1,
        history=history,
        in_prompt=before.in_prompt,
        times=before.times.at[rows, jnp.maximum(tokens, 0)].add(1),
        scores=jax.lax.cond(
            jnp.any(options.logprobs),
            lambda: _scores(logits, jnp.maximum(tokens, 0)),
            lambda: _no_scores(*logits.shape),
        ),
    )
    return place_all(progress, everywhere)


def _where_any(
    some: Bool[Array, "..."], change: Callable[[Logits], Logits], scores: Logits
) -> Logits:
    return jax.lax.cond(jnp.any(some), change, lambda scores: scores, scores)


def _penalised(scores: Logits, before: RowProgress, options: RowOptions) -> Logits:
    """Applies the penalty of tokens in the prompt or the new tokens, and then the penalties of new
    tokens."""
    times = before.times.astype(jnp.float32)

    def change(scores: Logits) -> Logits:
        repetition = options.repetition
        lower = jnp.where(scores < 0, scores * repetition, scores / repetition)
        scores = jnp.where(before.in_prompt | (times > 0), lower, scores)
        present = jnp.where(times > 0, options.presence, 0.0)  # (rows, vocab)
        return scores - present - options.frequency * times

    are_penalised = (options.repetition != 1) | (options.presence != 0) | (options.frequency != 0)
    return _where_any(jnp.asarray(are_penalised), change, scores)


def _draw(scores: Logits, count: Int[Array, ""], options: RowOptions) -> Int[Array, " rows"]:
    """The best token of each row, or a sample for rows with a temperature."""
    sampled = jnp.asarray(options.temperature) > 0

    def sample(scores: Logits) -> Logits:
        temperature = jnp.where(sampled, options.temperature, 1.0)
        top_k, tail, min_p = map(jnp.asarray, (options.top_k, options.tail, options.min_p))
        logits = filter_logits(scores, temperature)
        filters = (
            (top_k < scores.shape[1], {"top_k": top_k}),
            (tail > 0, {"tail": tail}),
            (min_p > 0, {"min_p": min_p}),
        )
        unit = jnp.ones((), jnp.float32)
        for is_filtered, option in filters:
            # Filters divide by no temperature again: `logits` are divided already.
            keep = ft.partial(filter_logits, temperature=unit, **option)
            filtered = _where_any(is_filtered & sampled, keep, logits)
            logits = jnp.where(is_filtered, filtered, logits)

        def noise(seed: Array, number: Array) -> Array:
            # As in `redcoast.generate`, where the row index is the `number` in a request.
            key = jax.random.fold_in(jax.random.key(seed), count)
            return jax.random.gumbel(jax.random.fold_in(key, number), scores.shape[1:], jnp.float32)

        # The largest of logits and Gumbel noise is a sample of their softmax.
        noises = jax.vmap(noise)(jnp.asarray(options.seeds), jnp.asarray(options.numbers))
        return jnp.where(sampled, logits + noises, scores)

    return first_greatest(_where_any(sampled, sample, scores))


def _as_bools(bits: Array | np.ndarray, vocab: int) -> Bool[Array, "rows vocab"]:
    """The first `vocab` bits of each row of 32-bit words, the least significant bit first."""
    places = jnp.arange(32, dtype=jnp.uint32)[None, None]
    wide = (jnp.asarray(bits)[:, :, None] >> places) & jnp.uint32(1)
    return (wide == 1).reshape(wide.shape[0], -1)[:, :vocab]


def _no_scores(rows: int, vocab: int) -> Scores:
    top = jnp.zeros((rows, min(MOST_TOP, vocab)), jnp.float32)
    return Scores(jnp.zeros(rows, jnp.float32), top, top.astype(jnp.int32))


def _scores(logits: Logits, tokens: Int[Array, " rows"]) -> Scores:
    """The log-probabilities of tokens, from the model's unprocessed logits."""
    logprobs = jax.nn.log_softmax(logits.astype(jnp.float32))
    chosen = jnp.take_along_axis(logprobs, tokens[:, None], axis=1)[:, 0]
    return Scores(chosen, *jax.lax.top_k(logprobs, min(MOST_TOP, logits.shape[1])))


@ft.partial(jax.jit, static_argnums=3)
def _score_chunk(
    model: SplitTree,
    hidden: Float[Array, "rows chunk width"],
    following: Int[Array | np.ndarray, "rows chunk"],
    everywhere: NamedSharding | None,
) -> Scores:
    """The scores of the tokens that follow those of a chunk of the prompt."""
    unembed = model.join().unembed
    rows, length = following.shape

    def score(part: tuple[Array, Array]) -> Scores:
        hidden, tokens = part
        logits = unembed(hidden)  # (rows, CHUNK, vocab)
        scores = _scores(logits.reshape(rows * CHUNK, -1), tokens.reshape(-1))
        return jax.tree.map(lambda x: x.reshape(rows, CHUNK, *x.shape[1:]), scores)

    # The logits of one chunk are in memory at a time.
    parts = in_chunks(hidden, CHUNK), in_chunks(jnp.asarray(following), CHUNK)
    scores = jax.lax.map(score, parts)
    return place_all(jax.tree.map(ft.partial(join_chunks, seq=length), scores), everywhere)
