"""Decoding step by step, with a callback for the tokens of each step."""

import functools as ft
from collections.abc import Callable, Iterator

import jax
import numpy as np
from jaxtyping import Int, PyTree

from ..core._iterate import with_last
from ..core._pytree import SplitTree
from ..distributed._arrays import whole
from ..models._inputs import AnyArray, Mask
from ._compiled import Result, begin_after, begin_in_place, check_generated
from ._generated import Generated
from ._prefill import (
    Places,
    by_layer_with,
    keep_places,
    places_of,
    read_compiled,
    types_and_places,
)
from ._request import Request
from ._sampling import Last, advance

# The programs of steps that were called: for what model, where, and for which cache and options.
_COMPILED: set[tuple[object, ...]] = set()

Stream = Callable[[Int[np.ndarray, " batch"]], object]
Stop = Callable[[Int[np.ndarray, " new"]], object]


def decode_streaming(
    model: PyTree,
    tokens: AnyArray,
    mask: Mask | None,
    request: Request,
    stream: Stream | None,
    stop: Stop | None,
) -> Result:
    """Generates tokens, and calls `stream` with the tokens of each step while the next step is
    running. Rows for which `stop` returns true end too."""
    count, rows = int(request.limit), tokens.shape[0] * request.copies
    new = np.full((rows, count), request.pad, np.int32)
    scores, real = np.zeros((rows, count), np.float32), np.zeros((rows, count), bool)
    stopped = np.zeros(rows, bool)
    for i, last in enumerate(_steps(model, tokens, mask, request, count)):
        step_tokens, ended = whole(last.tokens), whole(last.ended)
        check_generated(step_tokens[:, None], first=i)
        new[:, i] = np.where(stopped, request.pad, step_tokens)
        if last.scores is not None:
            real[:, i] = ~stopped & (whole(last.lengths) > i)  # whether the row was running
            scores[:, i] = np.where(stopped, 0, whole(last.scores))
        if stream is not None:
            stream(new[:, i].copy())
        if stop is not None:
            for row in np.flatnonzero(~stopped & ~ended):
                if stop(new[row, : i + 1].copy()):
                    stopped[row] = True
        if (ended | stopped).all():
            break
    if not request.scored:
        return jax.device_put(new)
    return Generated(*map(jax.device_put, (new, scores, real)))


def _steps(
    model: PyTree, tokens: AnyArray, mask: Mask | None, request: Request, count: int
) -> Iterator[Last]:
    read, compile_all = read_compiled(model, tokens, mask, request)
    stacked = SplitTree.of(model)
    known = jax.tree.leaves(types_and_places((read.cache, request)))
    program = stacked.static, places_of(stacked), tuple(map(str, known))
    start = begin_after
    if request.copies == 1:  # no row of the cache is repeated
        start = begin_in_place
    cache, last = start(read.cache, stacked, read.hidden, read.prompt, request)
    is_new = program not in _COMPILED
    if is_new:  # the first token does not wait for the program of the others
        yield last
    model, cache = by_layer_with(model, cache)
    split_model, places = SplitTree.of(model), places_of((cache, last))

    def advance_all(cache: PyTree, last: Last) -> Iterator[Last]:
        yield last
        for _ in range(count - 1):
            cache, last = _advance(cache, split_model, last, request, places)
            yield last

    steps = advance_all(cache, last)
    if is_new:
        next(steps)  # was yielded
        compile_all()
        _COMPILED.add(program)
    # The next step is started before a token is handed out.
    for step, _ in with_last(steps):
        yield step


@ft.partial(jax.jit, static_argnums=4, donate_argnums=0)
def _advance(
    cache: PyTree, model: SplitTree, last: Last, request: Request, places: Places
) -> tuple[PyTree, Last]:
    # Keeps the shardings of the first step: if they changed, each step would be recompiled.
    return keep_places(advance(model.join(), cache, last, request), places)
