"""The first pass, over the whole prompt, and the later ones, over one token each."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from .check import check_eos
from .prompt import Mask, align_right, blank
from .request import Request


def prefill(
    model: Any, tokens: Shaped[Array, "batch ..."], mask: Mask | None, request: Request
) -> tuple[Float[Array, "batch vocab"], Any]:
    """The logits of the first new token, and the cache, with room for those to come."""
    start = _start_decoder if is_encoder_decoder(model) else _start
    tokens, mask, cache = start(model, tokens, mask, request.room)
    hidden, cache = model.decode(tokens, cache, mask=mask)
    logits = model.unembed(hidden[:, -1:])[:, 0]
    check_eos(request.eos, logits.shape[-1])
    return logits, cache


def follow(
    model: Any, tokens: Int[Array, " rows"], cache: Any
) -> tuple[Float[Array, "rows vocab"], Any]:
    """The logits of what follows one more token in each row."""
    hidden, cache = model.decode(tokens[:, None], cache)
    return model.unembed(hidden)[:, 0], cache


def is_encoder_decoder(model: Any) -> bool:
    return hasattr(model, "encode")


def _start(model, tokens, mask, room):
    tokens, mask = align_right(tokens, mask)
    return tokens, mask, model.init_cache(tokens.shape[0], tokens.shape[1] + room)


def _start_decoder(model, tokens, mask, room):
    # Images, say, go to the encoder as they are.
    tokens = tokens if mask is None else blank(tokens, mask)
    memory = model.encode(tokens, mask=mask)
    rows = tokens.shape[0]
    cache = model.init_cache(rows, 1 + room, memory=memory, memory_mask=mask)
    return jnp.full((rows, 1), model.config.decoder_start, jnp.int32), None, cache
