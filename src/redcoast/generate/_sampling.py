"""Decoding of one hypothesis for each row: greedy, or drawn."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from ._logits import INVALID, choose
from ._prompt import Mask, follow, prefill
from ._request import Request


class Last(eqx.Module):
    """The newest token of each row, whether the row has ended, and how many tokens it has."""

    tokens: Int[Array, " batch"]
    ended: Bool[Array, " batch"]
    count: Int[Array, ""]


def sample(
    model: Any, tokens: Shaped[Array, "batch ..."], mask: Mask | None, request: Request
) -> Int[Array, "batch room"]:
    """The new tokens of all rows, until all have ended."""
    cache, last = begin(model, tokens, mask, request)
    new = jnp.full((last.tokens.shape[0], request.room), request.pad, jnp.int32)

    def write(new, last):
        return jax.lax.dynamic_update_slice_in_dim(new, last.tokens[:, None], last.count - 1, 1)

    def going(carry):
        return (carry[1].count < request.limit) & ~jnp.all(carry[1].ended)

    def step(carry):
        cache, last, new = carry
        cache, last = advance(model, cache, last, request)
        return cache, last, write(new, last)

    return jax.lax.while_loop(going, step, (cache, last, write(new, last)))[2]


def begin(
    model: Any, tokens: Shaped[Array, "batch ..."], mask: Mask | None, request: Request
) -> tuple[Any, Last]:
    """The cache of the prompt, and the first new token."""
    logits, cache = prefill(model, tokens, mask, request)
    ended, count = jnp.zeros(logits.shape[0], bool), jnp.zeros((), jnp.int32)
    return cache, _next(logits, ended, count, request)


def advance(model: Any, cache: Any, last: Last, request: Request) -> tuple[Any, Last]:
    """The cache and the newest token, one token later."""
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
    """Where tokens are among a few."""
    found = jnp.zeros(tokens.shape, bool)
    for one in some:
        found |= tokens == one
    return found
