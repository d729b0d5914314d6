"""Forward passes over a prompt, and over one new token of each row."""

from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Integer, PyTree, Shaped

from ..models._inputs import AnyArray, Mask
from ._check_arguments import check_token_options
from ._model_calls import last_logits, read_tokens
from ._request import Logits, Request, Rows


def bucket(length: int) -> int:
    """Rounds a length up to one of 16, 32, 48, ..., 128, 160, 192, ..., 256, 320, ....

    From 64, there are four lengths in each doubling. This limits the number of compilations, and
    the additional work to a quarter.
    """
    step = max(16, (1 << (length - 1).bit_length()) // 8)
    return -(-length // step) * step


def pad_columns(x: AnyArray, length: int, *, left: bool) -> Any:
    """Pads a NumPy or JAX matrix to `length` columns with zeros."""
    free = length - x.shape[1]
    widths = ((0, 0), (0, free))
    if left:
        widths = ((0, 0), (free, 0))
    if isinstance(x, np.ndarray):
        return np.pad(x, widths)
    return jnp.pad(x, widths)


def align_left(
    tokens: Integer[AnyArray, "batch seq"], mask: Mask | None
) -> tuple[Int[Array, "batch seq"], Int[Array, " batch"]]:
    """Moves the real tokens of each row to its first columns. Returns also their number."""
    tokens = jnp.asarray(tokens, jnp.int32)
    if mask is None:
        return tokens, jnp.full(tokens.shape[0], tokens.shape[1], jnp.int32)
    real = jnp.asarray(mask, bool)
    columns = jnp.argsort(~real, axis=1, stable=True)  # real tokens first, in their order
    lengths = jnp.sum(real, axis=1, dtype=jnp.int32)
    left = jnp.arange(tokens.shape[1])[None] < lengths[:, None]
    return blank(jnp.take_along_axis(tokens, columns, axis=1), left), lengths


def at_own_columns(
    scores: Float[Array, "batch columns"], mask: Mask
) -> Float[Array, "batch later"]:
    """Moves scores of tokens from where `align_left` leads to the columns of the tokens but the
    first. The score of the k-th real token, from 0, is in column k - 1 of `scores`. Padding and the
    first real token get 0."""
    real = jnp.asarray(mask, bool)
    column = jnp.cumsum(real, axis=1) - 2  # negative until the second real token
    scores = jnp.take_along_axis(scores, jnp.maximum(column, 0), axis=1)
    return jnp.where(real & (column >= 0), scores, 0)[:, 1:]


def blank(tokens: Integer[AnyArray, "batch seq"], mask: Mask) -> Integer[Array, "batch seq"]:
    """Sets padding to 0, because ids outside the vocabulary would result in NaN."""
    return jnp.where(mask.astype(bool), tokens, jnp.zeros((), tokens.dtype))


class ReadPrompt(eqx.Module):
    """What a model has after its prompt."""

    hidden: Float[Array, "batch 1 width"]  # the hidden state of the last token
    cache: PyTree  # the cache, with room for all new tokens
    prompt: Int[AnyArray, "batch prompt"]  # the tokens of the decoder so far, with -1 at padding


def read_prompt(
    model: PyTree, tokens: Shaped[AnyArray, "batch ..."], mask: Mask | None, request: Request
) -> ReadPrompt:
    """Processes a prompt in one forward pass."""
    if is_encoder_decoder(model):
        if mask is not None:  # inputs without a mask, such as images or sounds, are not changed
            tokens = blank(tokens, mask)
        memory = model.encode(tokens, mask=mask)  # (batch, memory, width)
        # All rows begin with the same tokens, whatever their inputs are.
        first = jnp.array([[model.config.decoder_start, *request.prefix]], jnp.int32)
        length = first.shape[1] + request.room
        cache = model.init_cache(tokens.shape[0], length, memory=memory, memory_mask=mask)
        prompt = jnp.broadcast_to(first, (tokens.shape[0], first.shape[1]))
        hidden, cache = read_tokens(model, prompt, cache)
        return ReadPrompt(hidden[:, -1:], cache, prompt)
    prompt, real = jnp.asarray(tokens, jnp.int32), None
    count = jnp.full(prompt.shape[0], prompt.shape[1], jnp.int32)
    if mask is not None:
        # Padding first, and then the tokens in their order: new tokens are appended to the last.
        real = jnp.asarray(mask, bool)
        columns = jnp.argsort(real, axis=1, stable=True)
        real = jnp.take_along_axis(real, columns, axis=1)
        prompt = blank(jnp.take_along_axis(prompt, columns, axis=1), real)
        count = jnp.sum(real, axis=1, dtype=jnp.int32)
    cache = new_cache(model, count, prompt.shape[1] + request.room, request)
    hidden, cache = read_tokens(model, prompt, cache, real)
    if real is not None:
        prompt = jnp.where(real, prompt, -1)
    return ReadPrompt(hidden[:, -1:], cache, prompt)


def new_cache(model: PyTree, count: Int[Array, " batch"], length: int, request: Request) -> PyTree:
    """Returns an empty cache of `length` slots for prompts of `count` tokens."""
    cache = model.init_cache(count.shape[0], length)
    if hasattr(model, "expect"):
        # The last token is never fed back.
        cache = model.expect(cache, count + request.limit - 1)
    return cache


def first_logits(model: PyTree, read: ReadPrompt, request: Request) -> Logits:
    logits = last_logits(model, read.hidden)
    check_token_options(request, logits.shape[-1])
    return logits


def append_tokens(model: PyTree, tokens: Rows, cache: PyTree) -> tuple[Logits, PyTree]:
    """Appends one token to each row. Returns the logits of the next token, and the cache."""
    hidden, cache = read_tokens(model, tokens[:, None], cache)
    return last_logits(model, hidden), cache


def is_encoder_decoder(model: PyTree) -> bool:
    return hasattr(model, "encode")
