"""What `generate` refuses, in sentences."""

import math
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer


def check_numbers(
    *,
    max_new_tokens: Any,
    key: Any,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    beams: int,
    length_penalty: float,
) -> None:
    """Raises if a number is out of its range, or if two do not go together."""
    for name, value in (("max_new_tokens", max_new_tokens), ("top_k", top_k), ("beams", beams)):
        if value is not None and _as_integer(name, value) < 1:
            raise ValueError(f"`{name}` is {value}. It must be at least 1.")
    if not (math.isfinite(temperature) and temperature >= 0):
        raise ValueError(
            f"`temperature` is {temperature}. It must be positive, or 0 for the likeliest tokens."
        )
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"`top_p` is {top_p}. It is a probability above 0 and at most 1.")
    if temperature > 0 and key is None:
        raise ValueError(
            f"With `temperature={temperature}` tokens are drawn, which needs a `key`, such as "
            "`jax.random.key(0)`. Without, pass `temperature=0`."
        )
    if not math.isfinite(length_penalty):
        raise ValueError(f"`length_penalty` is {length_penalty}. It must be a finite number.")
    _check_beams(temperature, top_k, top_p, beams, length_penalty)


def _as_integer(name: str, value: Any) -> int:
    try:
        return operator.index(value)
    except TypeError as error:
        raise TypeError(
            f"`{name}` is {value!r}. It must be an integer, known when the program is traced."
        ) from error


def _check_beams(
    temperature: float, top_k: int | None, top_p: float | None, beams: int, length_penalty: float
) -> None:
    if beams == 1 and length_penalty != 1:
        raise ValueError(
            f"`length_penalty={length_penalty}` compares the hypotheses of a beam search, and "
            "`beams` is 1. Pass more beams, or no `length_penalty`."
        )
    if beams > 1 and temperature > 0:
        raise ValueError(
            f"Beam search draws nothing, but `beams` is {beams} and `temperature` {temperature}. "
            "Pass `temperature=0`, or `beams=1`."
        )
    if beams > 1 and (top_k is not None or top_p is not None):
        raise ValueError(
            f"Beam search draws nothing, and `beams` is {beams}: `top_k` and `top_p` would do "
            "nothing. Leave them out, or pass `beams=1` and a `temperature`."
        )


def check_stream(beams: int, *, traced: bool) -> None:
    if beams > 1:
        raise ValueError(
            f"`stream` gets tokens as they are chosen, and beam search with `beams={beams}` knows "
            "its tokens only at the end. Pass `beams=1`, or no `stream`."
        )
    if traced:
        raise ValueError(
            "`stream` is called step by step, and inside of `jax.jit`, `plan.constrain` or a "
            "`predict_fn` there are no steps. Call `generate` outside, or pass no `stream`."
        )


def check_model(model: Any) -> None:
    needed = ("init_cache", "decode", "unembed", "config")
    if missing := [name for name in needed if not hasattr(model, name)]:
        raise TypeError(
            f"A {type(model).__name__} cannot generate: it has no {' and no '.join(missing)}. "
            "The decoders and encoder-decoders of `redcoast.models` have them."
        )
    if hasattr(model, "encode") and getattr(model.config, "decoder_start", None) is None:
        raise ValueError(
            f"The configuration of this {type(model).__name__} has no `decoder_start`, the token "
            "that its decoder begins with. Set it in the configuration."
        )


def check_prompt(model: Any, tokens: Any, mask: Any) -> None:
    """Raises if a prompt is no matrix of tokens, or if there is nothing in a row.

    What arrays hold is looked at only where it is known, so not while a program is traced.
    """
    if not hasattr(tokens, "shape"):
        raise TypeError(
            f"`tokens` is of type {type(tokens).__name__}. It must be an array of NumPy or JAX."
        )
    if 0 in tokens.shape:
        raise ValueError(f"`tokens` has the shape {tokens.shape}: there is nothing to go on from.")
    if tokens.ndim > 2 and hasattr(model, "encode"):
        if mask is not None:
            raise ValueError("`mask` says which tokens are real; images, say, have none.")
        return
    if tokens.ndim != 2 or not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise ValueError(
            f"`tokens` is an array of {tokens.dtype} of shape {tokens.shape}. It must be one of "
            "integers, with the shape (batch, seq)."
        )
    if mask is not None:
        _check_mask(tokens, mask)
    _check_vocabulary(model, tokens, mask)


def _check_mask(tokens: Any, mask: Any) -> None:
    if mask.shape != tokens.shape:
        raise ValueError(
            f"`mask` has the shape {mask.shape} and `tokens` {tokens.shape}. They must be alike."
        )
    if not (mask.dtype == bool or jnp.issubdtype(mask.dtype, jnp.integer)):
        raise ValueError(f"`mask` is of {mask.dtype}. It must be of booleans or integers.")
    if is_known(mask):
        empty = np.flatnonzero(~np.asarray(mask).astype(bool).any(axis=1))
        if empty.size:
            raise ValueError(
                f"`mask` has no real token in {_rows(empty)}. A prompt needs at least one, such "
                "as the token that begins texts."
            )


def _check_vocabulary(model: Any, tokens: Any, mask: Any) -> None:
    vocab = getattr(model.config, "vocab", None)
    if vocab is None or not is_known(tokens) or not (mask is None or is_known(mask)):
        return
    tokens = np.asarray(tokens)
    outside = (tokens < 0) | (tokens >= vocab)
    if mask is not None:
        outside &= np.asarray(mask).astype(bool)
    if outside.any():
        raise ValueError(
            f"`tokens` holds {tokens[outside][0]} in {_rows(np.flatnonzero(outside.any(axis=1)))}, "
            f"and the vocabulary's tokens are 0 to {vocab - 1}."
        )


def _rows(rows: np.ndarray) -> str:
    shown = ", ".join(map(str, rows[:5])) + (", ..." if rows.size > 5 else "")
    return f"row {shown}" if rows.size == 1 else f"rows {shown}"


def check_positions(model: Any, tokens: Any, mask: Any, max_new_tokens: int) -> None:
    """Raises if there are no positions for so many tokens."""
    positions = getattr(model.config, "positions", None)
    if positions is None:
        return
    length, what = _longest(model, tokens, mask)
    if length > positions:
        raise ValueError(
            f"{what} is longer than the model's {positions} positions. Pass a shorter prompt."
        )
    # The last new token needs none: what would follow it is not computed.
    needed = length + max_new_tokens - 1
    if needed > positions:
        shorter = "Pass a shorter prompt, or " if length > 1 else "Pass "
        raise ValueError(
            f"{what} and all but the last of `max_new_tokens={max_new_tokens}` need {needed} "
            f"positions, and the model has {positions}. {shorter}"
            f"`max_new_tokens={positions - length + 1}`."
        )


def _longest(model: Any, tokens: Any, mask: Any) -> tuple[int, str]:
    if hasattr(model, "encode"):
        return 1, "The token that the decoder begins with"
    if mask is None:
        return tokens.shape[1], f"The prompt of {tokens.shape[1]} tokens"
    # Positions are counted over real tokens; while a program is traced, there is at least one.
    length = int(np.asarray(mask).astype(bool).sum(axis=1).max()) if is_known(mask) else 1
    return length, f"The longest prompt, of {length} tokens,"


def check_eos(eos: Sequence[int], vocab: int) -> None:
    if outside := [token for token in eos if not 0 <= token < vocab]:
        raise ValueError(
            f"`eos` has {outside[0]}, and the vocabulary's tokens are 0 to {vocab - 1}. Pass "
            "`eos=()` to never stop."
        )


def is_known(x: Any) -> bool:
    """Whether what an array holds can be read in this process now."""
    if isinstance(x, Tracer):
        return False
    return not isinstance(x, jax.Array) or x.is_fully_addressable
