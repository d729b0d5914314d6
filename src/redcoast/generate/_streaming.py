"""Decoding step by step, with a callback for the tokens of each step."""

import functools as ft
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding
from jaxtyping import Int

from ..core._iterate import with_last
from ..core._pytree import Static, join, split
from ..distributed._arrays import whole
from ..models._by_layer import by_layer
from ._check_arguments import check_stream
from ._compiled import Result, check_generated, prepare_prompt
from ._generated import Generated
from ._request import Request
from ._sampling import Last, advance, begin

Stream = Callable[[Int[np.ndarray, " batch"]], Any]
Stop = Callable[[Int[np.ndarray, " new"]], Any]


def decode_streaming(
    model: Any, tokens: Any, mask: Any, request: Request, stream: Stream | None, stop: Stop | None
) -> Result:
    """Generates tokens, and calls `stream` with the tokens of each step while the next step is
    running. Rows for which `stop` returns true end too."""
    count, rows = int(request.limit), tokens.shape[0] * request.copies
    new = np.full((rows, count), request.pad, np.int32)
    scores, real = np.zeros((rows, count), np.float32), np.zeros((rows, count), bool)
    stopped = np.zeros(rows, bool)
    for i, (last, _) in enumerate(with_last(_steps(model, tokens, mask, request, count))):
        found, ended = whole(last.tokens), whole(last.ended)
        check_generated(found[:, None], first=i)
        new[:, i] = np.where(stopped, request.pad, found)
        if last.scores is not None:
            real[:, i] = ~stopped & (whole(last.lengths) > i)
            scores[:, i] = np.where(stopped, 0, whole(last.scores))
        if stream is not None:
            stream(new[:, i].copy())
        if stop is not None:
            running = np.flatnonzero(~stopped & ~ended)
            stopped[[row for row in running if stop(new[row, : i + 1].copy())]] = True
        if (ended | stopped).all():
            break
    result = Generated(new, scores, real) if request.scored else new
    return jax.device_put(result)


def _steps(model: Any, tokens: Any, mask: Any, request: Request, count: int) -> Iterator[Last]:
    arrays, static = split(model)
    prompt = prepare_prompt(model, arrays, tokens, mask)
    cache, last = _begin(arrays, static, *prompt, request)
    # The call may be inside a traced function even if no argument is traced.
    check_stream(1, traced=isinstance(last.tokens, Tracer))
    places = places_of((cache, last))
    arrays, static = split(by_layer(model))
    yield last
    for _ in range(count - 1):
        cache, last = _advance(cache, arrays, static, last, request, places)
        yield last


@ft.partial(jax.jit, static_argnums=1)
def _begin(arrays: list[Any], static: Static, tokens: Any, mask: Any, request: Request) -> Any:
    return begin(join(arrays, static), tokens, mask, request)


@ft.partial(jax.jit, static_argnums=(2, 5), donate_argnums=0)
def _advance(
    cache: Any,
    arrays: list[Any],
    static: Static,
    last: Last,
    request: Request,
    places: tuple[NamedSharding | None, ...],
) -> Any:
    leaves, structure = jax.tree.flatten(advance(join(arrays, static), cache, last, request))
    # Keeps the shardings of the first step: if they changed, each step would be recompiled.
    stay = jax.lax.with_sharding_constraint
    kept = [x if p is None else stay(x, p) for x, p in zip(leaves, places, strict=True)]
    return structure.unflatten(kept)


def places_of(tree: Any) -> tuple[NamedSharding | None, ...]:
    shardings = (leaf.sharding for leaf in jax.tree.leaves(tree))
    return tuple(s if isinstance(s, NamedSharding) else None for s in shardings)
