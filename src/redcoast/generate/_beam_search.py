"""Beam search with the same algorithm, and the same token ids, as `transformers`.

Each row has equally many running and finished hypotheses. Running hypotheses are ranked by the sum
of their log-probabilities, finished ones by this sum divided by a power of their length.
`early_stopping` determines when a row ends.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree

from ._cache_rows import cache_batch_dims, reorder_rows, repeat_rows
from ._logits import ALL_EXCLUDED, INVALID
from ._processors import least_new, process
from ._prompt import ReadPrompt, append_tokens, first_logits
from ._request import Logits, Prompt, Request
from ._sampling import is_any

# Added to the scores of hypotheses that must not be selected. It is finite, so they stay ranked.
_EXCLUDED = -1e9


class Running(eqx.Module):
    """Running hypotheses, best first. `parent` is the index of the beam that each extends."""

    tokens: Int[Array, "batch beams room"]
    scores: Float[Array, "batch beams"]
    parent: Int[Array, "batch beams"]


class Finished(eqx.Module):
    """The best finished hypotheses, best first. `filled` is false at unused entries."""

    tokens: Int[Array, "batch beams room"]
    scores: Float[Array, "batch beams"]
    filled: Bool[Array, "batch beams"]


class Search(eqx.Module):
    """The state of a search. `open` rows may still improve; `valid` rows had no NaN."""

    running: Running
    finished: Finished
    open: Bool[Array, " batch"]
    valid: Bool[Array, " batch"]
    count: Int[Array, ""]


class Candidates(eqx.Module):
    """The best continuations of the running hypotheses. `ends` is true at complete ones."""

    tokens: Int[Array, "batch candidates room"]
    scores: Float[Array, "batch candidates"]
    parent: Int[Array, "batch candidates"]
    ends: Bool[Array, "batch candidates"]


def search_beams(
    model: PyTree, read: ReadPrompt, request: Request
) -> tuple[Int[Array, "results room"], PyTree]:
    """Returns the best hypotheses of each row, `copies` of them, and the cache."""
    logits, cache = first_logits(model, read, request), read.cache
    prompt = jnp.asarray(read.prompt)
    batch, beams = logits.shape[0], request.beams  # each row has one set of logits so far
    dims = cache_batch_dims(cache, batch)
    cache = repeat_rows(cache, dims, beams)
    search = _select(jnp.repeat(logits, beams, axis=0), _begin(batch, request), prompt, request)

    def keep_going(carry):
        return (carry[1].count < request.limit) & jnp.any(carry[1].open)

    def step(carry):
        cache, search = carry
        # (batch, beams): the tokens that the model has not read yet
        newest = jax.lax.dynamic_index_in_dim(search.running.tokens, search.count - 1, 2, False)
        logits, longer = append_tokens(model, newest.reshape(-1), cache)
        search = _select(logits, search, prompt, request)
        # The cache is that of the old beams. Each new beam continues the one it came from.
        return reorder_rows(longer, cache, dims, search.running.parent), search

    cache, search = jax.lax.while_loop(keep_going, step, (cache, search))
    best = search.finished.tokens[:, : request.copies]  # (batch, copies, room)
    exists = search.finished.filled & (search.finished.scores > -jnp.inf)
    best = jnp.where(exists[:, : request.copies, None], best, ALL_EXCLUDED)
    return jnp.where(search.valid[:, None, None], best, INVALID).reshape(-1, request.room), cache


def _begin(batch: int, request: Request) -> Search:
    shape = (batch, request.beams)  # of all scores
    tokens = jnp.full((*shape, request.room), request.pad, jnp.int32)
    # All beams start equal, so only the first is continued.
    first = (jnp.arange(request.beams) == 0)[None]
    excluded = jnp.full(shape, _EXCLUDED, jnp.float32)
    scores = jnp.where(first, 0.0, excluded)
    rows = jnp.ones(batch, bool)
    return Search(
        Running(tokens, scores, jnp.zeros(shape, jnp.int32)),
        Finished(tokens, excluded, jnp.zeros(shape, bool)),
        rows,
        rows,
        jnp.zeros((), jnp.int32),
    )


def _select(logits: Logits, last: Search, prompt: Prompt, request: Request) -> Search:
    """Advances the search by one token."""
    candidates = _candidates(logits, last, prompt, request)
    scores = candidates.scores + jnp.where(candidates.ends, _EXCLUDED, 0.0)  # ends cannot run on
    scores, best = jax.lax.top_k(scores, request.beams)  # (batch, beams)
    tokens = jnp.take_along_axis(candidates.tokens, best[:, :, None], axis=1)
    running = Running(tokens, scores, jnp.take_along_axis(candidates.parent, best, axis=1))
    norm = jnp.take(jnp.asarray(request.norms), last.count)
    finished = _finish(candidates, last, norm)
    # A row that has ended is computed on, and its NaN are of no interest.
    invalid = last.open & jnp.any(jnp.isnan(candidates.scores), axis=1)
    return Search(
        running,
        finished,
        last.open & _may_improve(running, finished, norm, request),
        last.valid & ~invalid,
        last.count + 1,
    )


def _may_improve(
    running: Running, finished: Finished, norm: Float[Array, ""], request: Request
) -> Bool[Array, " batch"]:
    """Whether a running hypothesis may become better than the worst finished one."""
    if request.early_stopping is True:
        return ~jnp.all(finished.filled, axis=1)
    if request.early_stopping == "never":  # a longer hypothesis has a larger divisor
        norm = jnp.take(jnp.asarray(request.norms), request.limit - 1)
    bound = running.scores[:, :1] / norm  # of the best one, (batch, 1)
    # While some entries are unfilled, every row stays open.
    worst = jnp.where(finished.filled, jnp.min(finished.scores, axis=1, keepdims=True), _EXCLUDED)
    return jnp.any(bound > worst, axis=1)


def _candidates(logits: Logits, last: Search, prompt: Prompt, request: Request) -> Candidates:
    batch, beams, vocab = *last.running.scores.shape, logits.shape[-1]
    history = None
    if request.needs_history:  # the prompt and the tokens of each beam, with -1 at padding
        new = jnp.where(jnp.arange(request.room)[None, None] < last.count, last.running.tokens, -1)
        before = jnp.broadcast_to(prompt[:, None], (batch, beams, prompt.shape[1]))
        history = jnp.concatenate([before, new], axis=2).reshape(batch * beams, -1)
    log_probs = jax.nn.log_softmax(logits.astype(jnp.float32))  # (rows, vocab)
    least = least_new(jnp.repeat(prompt, beams, axis=0), request)
    log_probs = process(log_probs, history, last.count, least, request)
    log_probs = log_probs.reshape(batch, beams, vocab)  # rows are beams of rows
    scores = (log_probs + last.running.scores[:, :, None]).reshape(batch, beams * vocab)
    # Enough candidates that `beams` of them continue even if all possible ends are among them.
    keep = min(max(2, 1 + len(request.eos)) * beams, beams * vocab)
    scores, places = jax.lax.top_k(scores, keep)  # over all beams of a row
    parent, newest = places // vocab, places % vocab  # (batch, candidates)
    tokens = jnp.take_along_axis(last.running.tokens, parent[:, :, None], axis=1)
    tokens = jax.lax.dynamic_update_index_in_dim(tokens, newest, last.count, 2)
    # At the limit all hypotheses are complete, also without an end.
    ends = is_any(newest, request.eos) | (last.count + 1 >= request.limit)
    return Candidates(tokens, scores, parent, ends)


def _finish(candidates: Candidates, last: Search, norm: Float[Array, ""]) -> Finished:
    beams = last.finished.scores.shape[1]
    # The other candidates can only be continued.
    ends = candidates.ends & (jnp.arange(candidates.ends.shape[1]) < beams)[None]
    scores = candidates.scores / norm  # finished ones compare by their mean, or a power of it
    scores += jnp.where(last.open[:, None], 0.0, _EXCLUDED)  # the results of a closed row stay
    scores += jnp.where(ends, 0.0, _EXCLUDED)
    # (batch, beams + candidates, room), of which the best stay.
    tokens = jnp.concatenate([last.finished.tokens, candidates.tokens], axis=1)
    filled = jnp.concatenate([last.finished.filled, ends], axis=1)
    scores, best = jax.lax.top_k(jnp.concatenate([last.finished.scores, scores], axis=1), beams)
    tokens = jnp.take_along_axis(tokens, best[:, :, None], axis=1)
    return Finished(tokens, scores, jnp.take_along_axis(filled, best, axis=1))
