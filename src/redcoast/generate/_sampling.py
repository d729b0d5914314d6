"""Greedy decoding and sampling, with one hypothesis for each row."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from ._logits import INVALID, choose
from ._prompt import Mask, follow, prefill
from ._request import Request


class Last(eqx.Module):
    """The newest token of each row, whether the row has ended, and the number of steps so far."""

    tokens: Int[Array, " batch"]
    ended: Bool[Array, " batch"]
    count: Int[Array, ""]


def sample(
    model: Any,
    tokens: Shaped[Array, "batch ..."],
    mask: Mask | None,
    request: Request,
    stepping: Any,
) -> Int[Array, "batch room"]:
    """Generates tokens until all rows have ended. `stepping` is the model behind the prompt."""
    cache, last = begin(model, tokens, mask, request)
    new = jnp.full((last.tokens.shape[0], request.room), request.pad, jnp.int32)

    def write(new, last):
        return jax.lax.dynamic_update_slice_in_dim(new, last.tokens[:, None], last.count - 1, 1)

    def keep_going(carry):
        return (carry[1].count < request.limit) & ~jnp.all(carry[1].ended)

    def step(carry):
        cache, last, new = carry
        cache, last = advance(stepping, cache, last, request)
        return cache, last, write(new, last)

    return jax.lax.while_loop(keep_going, step, (cache, last, write(new, last)))[2]


def begin(
    model: Any, tokens: Shaped[Array, "batch ..."], mask: Mask | None, request: Request
) -> tuple[Any, Last]:
    """Processes the prompt. Returns the cache and the first new token."""
    logits, cache = prefill(model, tokens, mask, request)
    ended, count = jnp.zeros(logits.shape[0], bool), jnp.zeros((), jnp.int32)
    return cache, _next(logits, ended, count, request)


def advance(model: Any, cache: Any, last: Last, request: Request) -> tuple[Any, Last]:
    """Generates one more token for each row."""
    logits, cache = follow(model, last.tokens, cache)
    return cache, _next(logits, last.ended, last.count, request)


def _next(
    logits: Float[Array, "batch vocab"],
    ended: Bool[Array, " batch"],
    count: Int[Array, ""],
    request: Request,
) -> Last:
    tokens = choose(logits, count, request)
    tokens = jnp.where(ended, request.pad, tokens)
    return Last(tokens, ended | is_any(tokens, (*request.eos, INVALID)), count + 1)


def is_any(tokens: Int[Array, "..."], some: tuple[int, ...]) -> Bool[Array, "..."]:
    """Whether each token is one of `some`."""
    found = jnp.zeros(tokens.shape, bool)
    for one in some:
        found |= tokens == one
    return found
