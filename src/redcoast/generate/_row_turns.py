"""Decoding more results than rows: a row that ends makes room for a prompt that waits.

All rows of a cache fill the same slots. So a prompt that takes over a row is read into a cache of
its own, in the slots before the next one, and then copied. Once all slots are filled, the rows are
moved to the front.
"""

import dataclasses
import functools as ft
from collections import deque

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PyTree

from ..core._pytree import SplitTree
from ..distributed._arrays import whole
from ..models._cache import move_slots, split_layers
from ..models._inputs import AnyArray
from ._cache_rows import Dims, cache_batch_dims
from ._compiled import Result, check_generated
from ._generated import Generated
from ._logits import NO_TOKENS, choose_tokens
from ._model_calls import last_logits
from ._prefill import (
    Places,
    PromptChunks,
    as_real,
    by_layer_with,
    chunks_for,
    keep_places,
    place_all,
    places_of,
    replicated,
)
from ._processors import least_new, new_history
from ._prompt import append_tokens
from ._request import LastHidden, Logits, Prompt, Request, Rows
from ._sampling import is_any, score_tokens


class Turns(eqx.Module):
    """The state of the rows.

    - `numbers`: the result that each row generates.
    - `tokens`, `counts`, `ended`: its newest token, its number of tokens, and whether it has ended.
    - `new`, `scores`: its tokens so far, and their log-probabilities.
    - `history`, `least`: as in `Last`.
    """

    numbers: Int[Array, " rows"]
    tokens: Int[Array, " rows"]
    counts: Int[Array, " rows"]
    ended: Bool[Array, " rows"]
    new: Int[Array, "rows room"]
    scores: Float[Array, "rows room"]
    history: Int[Array, "rows length"] | None
    least: Int[Array, " rows"] | None


def decode_in_turn(
    model: PyTree, tokens: AnyArray, mask: AnyArray | None, request: Request, rows: int
) -> Result:
    """Generates results in `rows` rows, each the same as if all were generated at once."""
    tokens = np.asarray(tokens)
    return _Decoding(model, tokens, as_real(tokens, mask), request, rows).run()


class _Decoding:
    def __init__(
        self, model: PyTree, tokens: np.ndarray, real: np.ndarray, request: Request, rows: int
    ):
        self.model, self.request, self.tokens, self.real = model, request, tokens, real
        self.limit, self.rows = int(request.limit), rows
        columns = sum(chunks_for(model, tokens.shape[1]))
        # With room for twice as many new tokens as a row has, rows are moved at most once in as
        # many steps as a row has new tokens.
        self.slots = 1 << (columns + 2 * self.limit - 1).bit_length()
        self.reading = dataclasses.replace(request, room=self.slots, copies=1)
        results = len(tokens) * request.copies
        self.new = np.full((results, self.limit), request.pad, np.int32)
        self.scores = np.zeros((results, self.limit), np.float32)
        self.lengths = np.zeros(results, np.int32)
        self.waiting = deque(range(rows, results))
        # The result of each row, or None; and the number of slots of its prompt.
        self.results: list[int | None] = list(range(rows))
        self.columns = [columns] * rows
        self.least_filled = self.filled = columns

    def run(self) -> Result:
        cache, turns = self._start()
        while True:
            cache, turns = self._take_turns(cache, turns)
            if all(result is None for result in self.results):
                break
            if self.filled == self.slots:
                cache = self._move(cache, turns)
            # Both are arguments of one compiled program, whatever their values are.
            most = np.asarray([self.slots - self.filled, len(self.waiting)], np.int32)
            cache, turns, steps = _advance_rows(
                cache, turns, self.split_model, most, self.request, self.places
            )
            self.filled += int(steps)
        check_generated(self.new)
        if not self.request.scored:
            return jax.device_put(self.new)
        mask = np.arange(self.limit)[None] < self.lengths[:, None]
        return Generated(*map(jax.device_put, (self.new, self.scores, mask)))

    def _start(self) -> tuple[PyTree, Turns]:
        """Reads the first prompts together."""
        first = np.arange(self.rows) // self.request.copies  # the prompt of each row
        chunks = PromptChunks(self.model, self.tokens[first], self.real[first], self.reading)
        ((_, last, cache),) = deque(chunks, maxlen=1)
        model, cache = by_layer_with(self.model, cache)
        self.split_model = SplitTree.of(model)
        self.dims = cache_batch_dims(cache, self.rows)
        self.places = places_of(cache)
        numbers = np.arange(self.rows, dtype=np.int32)
        turns = _first_turns(
            self.split_model, last, chunks.prompt, numbers, self.request, self.places
        )
        return cache, turns

    def _take_turns(self, cache: PyTree, turns: Turns) -> tuple[PyTree, Turns]:
        """Keeps the results that have ended, and starts others in their rows."""
        while True:
            ended, counts = whole(turns.ended), whole(turns.counts)  # waits for the devices
            new, scores = whole(turns.new), whole(turns.scores)
            free = [row for row in range(self.rows) if ended[row] and self.results[row] is not None]
            for row in free:
                result = self.results[row]
                self.new[result, : counts[row]] = new[row, : counts[row]]
                self.scores[result, : counts[row]] = scores[row, : counts[row]]
                self.lengths[result] = counts[row]
                self.results[row] = None
            if not free or not self.waiting:
                return cache, turns
            for row in free[: len(self.waiting)]:
                cache, turns = self._admit(cache, turns, row, self.waiting.popleft())

    def _admit(self, cache: PyTree, turns: Turns, row: int, result: int) -> tuple[PyTree, Turns]:
        """Reads the prompt of a result into a row."""
        number = result // self.request.copies
        prompt = self.tokens[number][self.real[number]][None]
        self.results[row] = result
        self.columns[row] = sum(chunks_for(self.model, prompt.shape[1]))
        # The prompt ends in the slot before the next one, as those of all running rows do.
        start = self.filled - self.columns[row]
        chunks = PromptChunks(self.model, prompt, None, self.reading, start=start)
        ((_, last, own),) = deque(chunks, maxlen=1)
        place = np.asarray([row, result], np.int32)
        return _replace_row(
            cache,
            turns,
            self.split_model,
            own,
            last,
            chunks.prompt,
            place,
            self.request,
            self.dims,
            self.places,
        )

    def _move(self, cache: PyTree, turns: Turns) -> PyTree:
        """Moves all rows to the first slots, as far as the longest one."""
        used = self.columns + whole(turns.counts)  # slots of each row, prompt and answer
        running = [used[row] for row in range(self.rows) if self.results[row] is not None]
        filled = max(self.least_filled, *running)
        cache = _move_slots(cache, np.asarray(self.filled - filled, np.int32), self.places)
        self.filled = int(filled)
        return cache


@ft.partial(jax.jit, static_argnums=5)
def _first_turns(
    model: SplitTree,
    last: LastHidden,
    prompt: Prompt,
    numbers: Rows,
    request: Request,
    places: Places,
) -> Turns:
    turns = _choose_first(model.join(), last, prompt, numbers, request)
    return place_all(turns, replicated(places))


@ft.partial(jax.jit, static_argnums=(8, 9), donate_argnums=(0, 1))
def _replace_row(
    cache: PyTree,
    turns: Turns,
    model: SplitTree,
    own: PyTree,
    last: LastHidden,
    prompt: Prompt,
    place: Int[Array, "2"],
    request: Request,
    dims: Dims,
    places: Places,
) -> tuple[PyTree, Turns]:
    """Puts the cache of one prompt and its first token into a row."""
    row, number = place
    everywhere = replicated(places)
    first = _choose_first(model.join(), last, prompt, number[None], request)
    turns = jax.tree.map(lambda x, y: x.at[row].set(y[0]), turns, first)  # all that a row has
    if jax.tree.structure(own) != jax.tree.structure(cache):
        own = split_layers(own)  # the rows' cache has arrays for each layer
    leaves, structure = jax.tree.flatten(cache)
    for i, (x, own_row, d) in enumerate(zip(leaves, jax.tree.leaves(own), dims, strict=True)):
        if d is not None and everywhere is None:
            leaves[i] = jax.lax.dynamic_update_slice_in_dim(x, own_row, row, d)
        elif d is not None:
            # A slice of a dimension that is sharded would be gathered.
            shape = [1] * x.ndim
            shape[d] = -1
            leaves[i] = jnp.where((jnp.arange(x.shape[d]) == row).reshape(shape), own_row, x)
    return keep_places(structure.unflatten(leaves), places), place_all(turns, everywhere)


@ft.partial(jax.jit, static_argnums=5, donate_argnums=(0, 1))
def _advance_rows(
    cache: PyTree,
    turns: Turns,
    model: SplitTree,
    most: Int[Array, "2"],
    request: Request,
    places: Places,
) -> tuple[PyTree, Turns, Int[Array, ""]]:
    """Generates tokens until a row ends, if a prompt waits for it, or until all have ended; at most
    as many as there are slots. Returns also the number of steps."""
    decoder = model.join()
    slots, waiting = most
    before = turns.ended  # rows without a result

    def keep_going(carry):
        _, turns, steps = carry
        stop = jnp.where(waiting > 0, jnp.any(turns.ended & ~before), jnp.all(turns.ended))
        return (steps < slots) & ~stop

    def step(carry):
        cache, turns, steps = carry
        logits, cache = append_tokens(decoder, turns.tokens, cache)
        return cache, choose_next(logits, turns, request), steps + 1

    steps = jnp.zeros((), jnp.int32)
    cache, turns, steps = jax.lax.while_loop(keep_going, step, (cache, turns, steps))
    return keep_places(cache, places), place_all(turns, replicated(places)), steps


@ft.partial(jax.jit, static_argnums=2, donate_argnums=0)
def _move_slots(cache: PyTree, by: Int[Array, ""], places: Places) -> PyTree:
    return keep_places(move_slots(cache, by), places)


def _choose_first(
    model: PyTree, last: LastHidden, prompt: Prompt, numbers: Rows, request: Request
) -> Turns:
    """The rows with their first tokens."""
    turns = blank_turns(prompt, numbers, request)
    return choose_next(last_logits(model, last), turns, request)


def blank_turns(prompt: Prompt, numbers: Rows, request: Request) -> Turns:
    """The rows before their first tokens. `prompt` has -1 at padding, which is on the left."""
    rows = prompt.shape[0]
    least = least_new(prompt, request)
    if least is not None:
        least = jnp.broadcast_to(least, (rows,))
    zeros, shape = jnp.zeros(rows, jnp.int32), (rows, request.room)
    new, scores = jnp.full(shape, request.pad, jnp.int32), jnp.zeros(shape, jnp.float32)
    ended = jnp.zeros(rows, bool)
    return Turns(numbers, zeros, zeros, ended, new, scores, new_history(prompt, request), least)


def choose_next(logits: Logits, turns: Turns, request: Request) -> Turns:
    """The rows with one more token each, unless they have ended."""
    rows, counts = jnp.arange(logits.shape[0]), turns.counts

    def choose(logits, history, count, least, number):
        history, least = jax.tree.map(lambda x: x[None], (history, least))  # either may be None
        tokens = choose_tokens(logits[None], history, count, least, request, rows=number[None])
        return tokens[0]

    # Row by row, since rows are at different steps.
    tokens = jax.vmap(choose)(logits, turns.history, counts, turns.least, turns.numbers)
    tokens = jnp.where(turns.ended, request.pad, tokens)
    # Ended rows write behind the last column, which is dropped.
    column = jnp.where(turns.ended, request.room, counts)
    new = turns.new.at[rows, column].set(tokens, mode="drop")
    scores = turns.scores
    if request.scored:
        scores = scores.at[rows, column].set(score_tokens(logits, tokens), mode="drop")
    history = turns.history
    if history is not None:
        column = jnp.where(turns.ended, history.shape[1], history.shape[1] - request.room + counts)
        history = history.at[rows, column].set(tokens, mode="drop")
    counts = counts + (~turns.ended).astype(jnp.int32)
    ended = turns.ended | is_any(tokens, (*request.eos, *NO_TOKENS)) | (counts >= request.limit)
    return Turns(turns.numbers, tokens, counts, ended, new, scores, history, turns.least)
