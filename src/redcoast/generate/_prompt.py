"""The first pass, over the whole prompt, and the later ones, over one token each."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Integer, Shaped

from ._checks import check_eos
from ._request import Request

Mask = Bool[Array, "batch seq"] | Integer[Array, "batch seq"]


def bucket(length: int) -> int:
    """The least of 16, 32, 48, ..., 128, 160, 192, ..., 256, 320, ... that holds `length`.

    From 64 on there are four lengths for each doubling: a program is compiled for few of them,
    and does at most a quarter more than is needed.
    """
    step = max(16, (1 << (length - 1).bit_length()) // 8)
    return -(-length // step) * step


def pad_columns(x: Any, length: int, *, left: bool) -> Any:
    """A matrix, of NumPy or JAX, with columns of zeros up to `length`."""
    free = length - x.shape[1]
    xp = np if isinstance(x, np.ndarray) else jnp
    return xp.pad(x, ((0, 0), (free, 0) if left else (0, free)))


def align_right(
    tokens: Integer[Array, "batch seq"], mask: Mask | None
) -> tuple[Int[Array, "batch seq"], Bool[Array, "batch seq"] | None]:
    """Prompts that all end in the last column, and what of them is real.

    The new tokens follow the last column, so padding on the right is rolled to the left.
    """
    tokens = tokens.astype(jnp.int32)
    if mask is None:
        return tokens, None
    real = mask.astype(bool)
    after = jnp.argmax(real[:, ::-1], axis=1)
    columns = (jnp.arange(tokens.shape[1])[None] - after[:, None]) % tokens.shape[1]
    real = jnp.take_along_axis(real, columns, axis=1)
    return blank(jnp.take_along_axis(tokens, columns, axis=1), real), real


def blank(tokens: Integer[Array, "batch seq"], mask: Mask) -> Integer[Array, "batch seq"]:
    """Zeros for padding, which may be no token of the vocabulary and would give NaN."""
    return jnp.where(mask.astype(bool), tokens, jnp.zeros((), tokens.dtype))


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
