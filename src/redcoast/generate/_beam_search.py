"""Beam search, step for step as in `transformers`, whose token ids it gives.

For each row there are as many running hypotheses as finished ones. Running hypotheses compete by
the sums of their log-probabilities, finished ones by the sum over a power of the length. A row
ends when its best running hypothesis, if it ended now, would be no better than its worst finished
one (`early_stopping=False`).
"""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from ._logits import INVALID
from ._prompt import Mask, follow, prefill
from ._request import Request
from ._sampling import is_any

Dims = tuple[int | None, ...]


def batch_dims(cache: Any, rows: int) -> Dims:
    """For each array of a cache of so many rows, which dimension they are along."""
    more = jax.eval_shape(lambda cache: cache.take(jnp.zeros(rows + 1, jnp.int32)), cache)
    return tuple(map(_changed, jax.tree.leaves(cache), jax.tree.leaves(more)))


def _changed(x: Array, y: jax.ShapeDtypeStruct) -> int | None:
    return next((d for d in range(x.ndim) if x.shape[d] != y.shape[d]), None)


def repeat_rows(cache: Any, dims: Dims, times: int) -> Any:
    """The cache with each row as often as said, one after the other."""
    leaves, structure = jax.tree.flatten(cache)
    return structure.unflatten(
        x if d is None else jnp.repeat(x, times, axis=d) for x, d in zip(leaves, dims, strict=True)
    )


def reorder_rows(cache: Any, before: Any, dims: Dims, parent: Int[Array, "batch beams"]) -> Any:
    """The cache with the beams of each row replaced by their parents, of the same row.

    What a step did not touch since `before`, such as what is kept of an encoder, is alike for all
    beams of a row, and stays.
    """
    leaves, structure = jax.tree.flatten(cache)
    old = jax.tree.leaves(before)
    return structure.unflatten(
        x if d is None or x is y else _take_parents(x, d, parent)
        for x, y, d in zip(leaves, old, dims, strict=True)
    )


def _take_parents(x: Array, d: int, parent: Int[Array, "batch beams"]) -> Array:
    apart = x.reshape(*x.shape[:d], *parent.shape, *x.shape[d + 1 :])
    take = lambda beams, parent: jnp.take(beams, parent, axis=d)
    return jax.vmap(take, in_axes=(d, 0), out_axes=d)(apart, parent).reshape(x.shape)


# Added to the scores of what must not be selected. Finite, so that it still ranks them.
_REFUSED = -1e9


class Running(eqx.Module):
    """Hypotheses that go on, best first; `parent` is the one that each came from."""

    tokens: Int[Array, "batch beams room"]
    scores: Float[Array, "batch beams"]
    parent: Int[Array, "batch beams"]


class Finished(eqx.Module):
    """The best hypotheses that have ended, best first; `filled` where there is one."""

    tokens: Int[Array, "batch beams room"]
    scores: Float[Array, "batch beams"]
    filled: Bool[Array, "batch beams"]


class Search(eqx.Module):
    """The state of a search: `open` rows may still improve, `valid` ones met no NaN."""

    running: Running
    finished: Finished
    open: Bool[Array, " batch"]
    valid: Bool[Array, " batch"]
    count: Int[Array, ""]


class Candidates(eqx.Module):
    """The best continuations of the running hypotheses; `ends` where one is whole."""

    tokens: Int[Array, "batch candidates room"]
    scores: Float[Array, "batch candidates"]
    parent: Int[Array, "batch candidates"]
    ends: Bool[Array, "batch candidates"]


def search(
    model: Any, tokens: Shaped[Array, "batch ..."], mask: Mask | None, request: Request
) -> Int[Array, "batch room"]:
    """The best hypothesis for each row."""
    logits, cache = prefill(model, tokens, mask, request)
    batch, beams = logits.shape[0], request.beams
    dims = batch_dims(cache, batch)
    cache = repeat_rows(cache, dims, beams)
    found = _select(jnp.repeat(logits, beams, axis=0), _begin(batch, request), request)

    def going(carry):
        return (carry[1].count < request.limit) & jnp.any(carry[1].open)

    def step(carry):
        cache, found = carry
        newest = jax.lax.dynamic_index_in_dim(found.running.tokens, found.count - 1, 2, False)
        logits, longer = follow(model, newest.reshape(-1), cache)
        found = _select(logits, found, request)
        return reorder_rows(longer, cache, dims, found.running.parent), found

    _, found = jax.lax.while_loop(going, step, (cache, found))
    return jnp.where(found.valid[:, None], found.finished.tokens[:, 0], INVALID)


def _begin(batch: int, request: Request) -> Search:
    shape = (batch, request.beams)
    tokens = jnp.full((*shape, request.room), request.pad, jnp.int32)
    # All beams start alike: only the first is continued.
    first = (jnp.arange(request.beams) == 0)[None]
    refused = jnp.full(shape, _REFUSED, jnp.float32)
    scores = jnp.where(first, 0.0, refused)
    rows = jnp.ones(batch, bool)
    return Search(
        Running(tokens, scores, jnp.zeros(shape, jnp.int32)),
        Finished(tokens, refused, jnp.zeros(shape, bool)),
        rows,
        rows,
        jnp.zeros((), jnp.int32),
    )


def _select(logits: Float[Array, "rows vocab"], last: Search, request: Request) -> Search:
    """The search one token later."""
    found = _candidates(logits, last, request)
    running = _continue(found, request)
    norm = jnp.take(jnp.asarray(request.norms), last.count)
    finished = _finish(found, last, norm)
    # If the best running hypothesis ended here it would score `bound`. Without all filled, any
    # is worth going on.
    bound = running.scores[:, :1] / norm
    worst = jnp.where(finished.filled, jnp.min(finished.scores, axis=1, keepdims=True), _REFUSED)
    invalid = last.open & jnp.any(jnp.isnan(found.scores), axis=1)
    return Search(
        running,
        finished,
        last.open & jnp.any(bound > worst, axis=1),
        last.valid & ~invalid,
        last.count + 1,
    )


def _candidates(logits: Float[Array, "rows vocab"], last: Search, request: Request) -> Candidates:
    batch, beams, vocab = *last.running.scores.shape, logits.shape[-1]
    log_probs = jax.nn.log_softmax(logits.astype(jnp.float32)).reshape(batch, beams, vocab)
    scores = (log_probs + last.running.scores[:, :, None]).reshape(batch, beams * vocab)
    # As many that, were all that can end a row among them, enough would be left to go on.
    keep = min(max(2, 1 + len(request.eos)) * beams, beams * vocab)
    scores, places = jax.lax.top_k(scores, keep)
    parent, newest = places // vocab, places % vocab
    tokens = jnp.take_along_axis(last.running.tokens, parent[:, :, None], axis=1)
    tokens = jax.lax.dynamic_update_index_in_dim(tokens, newest, last.count, 2)
    ends = is_any(newest, request.eos) | (last.count + 1 >= request.limit)
    return Candidates(tokens, scores, parent, ends)


def _continue(found: Candidates, request: Request) -> Running:
    scores = found.scores + jnp.where(found.ends, _REFUSED, 0.0)
    scores, best = jax.lax.top_k(scores, request.beams)
    tokens = jnp.take_along_axis(found.tokens, best[:, :, None], axis=1)
    return Running(tokens, scores, jnp.take_along_axis(found.parent, best, axis=1))


def _finish(found: Candidates, last: Search, norm: Float[Array, ""]) -> Finished:
    beams = last.finished.scores.shape[1]
    # The other candidates are there to go on with.
    ends = found.ends & (jnp.arange(found.ends.shape[1]) < beams)[None]
    scores = found.scores / norm
    scores += jnp.where(last.open[:, None], 0.0, _REFUSED)
    scores += jnp.where(ends, 0.0, _REFUSED)
    tokens = jnp.concatenate([last.finished.tokens, found.tokens], axis=1)
    filled = jnp.concatenate([last.finished.filled, ends], axis=1)
    scores, best = jax.lax.top_k(jnp.concatenate([last.finished.scores, scores], axis=1), beams)
    tokens = jnp.take_along_axis(tokens, best[:, :, None], axis=1)
    return Finished(tokens, scores, jnp.take_along_axis(filled, best, axis=1))
