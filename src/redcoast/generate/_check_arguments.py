"""The checks of the arguments of `generate`."""

import functools as ft
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import PyTree

from ..core._decoding import as_integer
from ..core._train_state import refuse_state
from ..models._cache import has_slots_to_move


def check_count(max_new_tokens: Any) -> None:
    if (count := as_integer("max_new_tokens", max_new_tokens)) < 1:
        raise ValueError(f"`max_new_tokens` is {count}. It must be at least 1.")


def check_stream(beams: int, *, traced: bool) -> None:
    if beams > 1:
        raise ValueError(
            f"`stream` is not supported for beam search (`beams={beams}`), nor is `stop`: it "
            "determines its tokens only at the end. Pass `beams=1`, or neither of them."
        )
    if traced:
        raise ValueError(
            "`stream` and `stop` are not supported inside `jax.jit`, `plan.constrain` or a "
            "`predict_fn`: all steps are one program. Call `generate` outside, or pass neither of "
            "them."
        )


def check_scored(beams: int, log_probabilities: Any) -> None:
    check_flag("log_probabilities", log_probabilities)
    if log_probabilities and beams > 1:
        raise ValueError(
            f"`log_probabilities` is not supported for beam search (`beams={beams}`). Pass "
            "`beams=1`, or compute them with `redcoast.losses.token_log_probabilities`."
        )


def check_rows(
    model: PyTree, tokens: Any, mask: Any, rows: Any, beams: int, *, traced: bool
) -> None:
    """Raises if results cannot be generated in fewer rows."""
    if (count := as_integer("rows", rows)) < 1:
        raise ValueError(f"`rows` is {count}. It must be at least 1.")
    if beams > 1:
        raise ValueError(f"`rows` is not supported for beam search (`beams={beams}`).")
    if traced:
        raise ValueError(
            "`rows` is not supported inside `jax.jit`, `plan.constrain` or a `predict_fn`: the "
            "host starts each row. Call `generate` outside, or pass no `rows`."
        )
    check_no_encoder(model, "rows")
    if not (is_known(tokens) and (mask is None or is_known(mask))):
        raise ValueError(
            "`rows` needs prompts that each process has in full. Pass NumPy arrays as `tokens` and "
            "`mask`."
        )
    short, long = (jax.eval_shape(ft.partial(model.init_cache, 1, size)) for size in (8, 16))
    if not has_slots_to_move(long) and jax.tree.map(jnp.shape, short) != jax.tree.map(
        jnp.shape, long
    ):
        raise ValueError(
            f"`rows` needs a cache of `redcoast.models`, but a {type(model).__name__} has a "
            f"{type(long).__name__}, whose slots cannot be moved. Pass no `rows`."
        )


def check_flag(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"`{name}` is {value!r}. It must be True or False.")


def check_no_encoder(model: PyTree, option: str) -> None:
    if hasattr(model, "encode"):
        raise ValueError(
            f"`{option}` is for decoders, but a {type(model).__name__} has an encoder. Pass no "
            f"`{option}`."
        )


def check_exact_options(beams: int, rows: Any, stream: Any, stop: Any) -> None:
    """Raises if another option determines the shapes or the order of the arithmetic."""
    others = {"rows": rows is not None, "stream": stream is not None, "stop": stop is not None}
    others[f"beams={beams}"] = beams > 1
    for name, is_passed in others.items():
        if is_passed:
            raise ValueError(
                f"`exact` is not supported with `{name}`. It decodes in blocks of a fixed number "
                "of rows, each until its rows have ended, in one program. Pass one of the two."
            )


def check_stream_in_turn(stream: Any, stop: Any) -> None:
    if stream is not None or stop is not None:
        raise ValueError(
            "`rows` is not supported with `stream` or `stop`, because results begin at different "
            "times. Pass `rows`, or one of them."
        )


def check_model(model: PyTree) -> None:
    refuse_state(model, "generate")
    needed = ("init_cache", "decode", "unembed", "config")
    if missing := [name for name in needed if not hasattr(model, name)]:
        raise TypeError(
            f"A {type(model).__name__} cannot generate: it has no {' and no '.join(missing)}. "
            "Pass a decoder or an encoder-decoder of `redcoast.models`, or implement them."
        )
    if hasattr(model, "encode") and getattr(model.config, "decoder_start", None) is None:
        raise ValueError(
            f"The configuration of this {type(model).__name__} has no `decoder_start`, the token "
            "that its decoder starts with. Set it in the configuration."
        )


def as_prompts(tokens: Any) -> Any:
    """Converts prompts that are lists of integers to an array; other prompts are not changed.

    **Raises:**

    `ValueError` if the lists have different lengths.
    """
    rows = tokens if isinstance(tokens, list | tuple) else ()
    is_token = lambda x: isinstance(x, int | np.integer) and not isinstance(x, bool)
    if rows and all(map(is_token, rows)):
        raise ValueError(
            f"`tokens` is a list of {len(rows)} integers, but must have the shape (batch, seq). "
            "For one prompt, pass `[tokens]`."
        )
    of_tokens = lambda row: isinstance(row, list | tuple) and all(map(is_token, row))
    if not rows or not all(map(of_tokens, rows)):
        return tokens
    lengths = sorted({len(row) for row in rows})
    if len(lengths) > 1:
        raise ValueError(
            f"The lists in `tokens` have from {lengths[0]} to {lengths[-1]} tokens. Pad them to "
            "one length, on either side, and pass a `mask` with 0 at the padding."
        )
    return np.array(rows, np.int32).reshape(len(rows), lengths[0])


def check_prompt(model: PyTree, tokens: Any, mask: Any) -> None:
    """Raises if the prompts are not a matrix of token ids, or if a row has no real token.

    The values of arrays are only checked if they are known, which they are not while tracing.
    """
    _check_array("tokens", tokens)
    if 0 in tokens.shape:
        raise ValueError(
            f"`tokens` has shape {tokens.shape}, so it is empty. Pass at least one row with at "
            "least one token."
        )
    if tokens.ndim > 2 and hasattr(model, "encode"):
        if mask is not None:
            raise ValueError(
                f"`mask` marks real tokens, but `tokens` has shape {tokens.shape} and is not a "
                "matrix of tokens. Pass no `mask` with images or sounds."
            )
        return
    if tokens.ndim != 2 or not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise ValueError(
            f"`tokens` has dtype {tokens.dtype} and shape {tokens.shape}. It must hold integers "
            "and have the shape (batch, seq)."
        )
    if mask is not None:
        _check_mask(tokens, mask)
        _check_not_empty(mask)
    _check_vocabulary(model, tokens, mask)


def check_rows_to_score(model: PyTree, tokens: Any, mask: Any) -> None:
    """Raises if these are no rows of tokens whose log-probabilities a decoder can compute."""
    refuse_state(model, "log_probabilities")
    if hasattr(model, "encode") or not (hasattr(model, "hidden") and hasattr(model, "unembed")):
        raise TypeError(
            f"`log_probabilities` needs a decoder with `hidden` and `unembed`, but `model` is a "
            f"{type(model).__name__}. For other models, pass hidden states to "
            "`redcoast.losses.token_log_probabilities`."
        )
    _check_array("tokens", tokens)
    if tokens.ndim != 2 or not jnp.issubdtype(tokens.dtype, jnp.integer) or 0 in tokens.shape:
        raise ValueError(
            f"`tokens` has dtype {tokens.dtype} and shape {tokens.shape}. It must hold integers "
            "and have the shape (batch, seq), with at least one row and one column."
        )
    if mask is not None:
        _check_mask(tokens, mask)
    _check_vocabulary(model, tokens, mask)


def _check_array(name: str, x: Any) -> None:
    if not isinstance(x, np.ndarray | jax.Array):
        kind = f"{type(x).__module__}.{type(x).__qualname__}".removeprefix("builtins.")
        way = f" Convert it with `np.asarray({name})`." if hasattr(x, "__array__") else ""
        if any(isinstance(part, str) for part in jax.tree.leaves(x)):
            way = " Encode text with the tokenizer of the model."
        raise TypeError(f"`{name}` is of type {kind}. It must be a NumPy or JAX array.{way}")


def _check_mask(tokens: Any, mask: Any) -> None:
    _check_array("mask", mask)
    if mask.shape != tokens.shape:
        raise ValueError(
            f"`mask` has shape {mask.shape}, but `tokens` has shape {tokens.shape}. They must be "
            "equal."
        )
    if not (mask.dtype == bool or jnp.issubdtype(mask.dtype, jnp.integer)):
        raise ValueError(f"`mask` has dtype {mask.dtype}. It must hold booleans or integers.")


def _check_not_empty(mask: Any) -> None:
    if is_known(mask):
        empty = np.flatnonzero(~np.asarray(mask).astype(bool).any(axis=1))
        if empty.size:
            raise ValueError(
                f"`mask` has no real token in {_rows(empty)}. A prompt needs at least one, such as "
                "the beginning-of-sequence token."
            )


def _check_vocabulary(model: PyTree, tokens: Any, mask: Any) -> None:
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
            f"but the token ids of the vocabulary are 0 to {vocab - 1}."
        )


def _rows(rows: np.ndarray) -> str:
    shown = ", ".join(map(str, rows[:5])) + (", ..." if rows.size > 5 else "")
    return f"row {shown}" if rows.size == 1 else f"rows {shown}"


def check_positions(
    model: PyTree, tokens: Any, mask: Any, prefix: Sequence[int], max_new_tokens: int
) -> None:
    """Raises if the model has too few positions for the prompt (or `prefix`, the tokens after the
    first one of an encoder-decoder) and the new tokens."""
    positions = getattr(model.config, "positions", None)
    if positions is None:
        return
    length, what = _longest(model, tokens, mask, prefix)
    if length > positions:
        raise ValueError(
            f"{what} is longer than the model's {positions} positions. Pass a shorter prompt."
        )
    # The last new token is never fed back, so it needs no position.
    needed = length + max_new_tokens - 1
    if needed > positions:
        shorter = "Pass a shorter prompt, or " if length > 1 else "Pass "
        raise ValueError(
            f"{what} and all but the last of `max_new_tokens={max_new_tokens}` need {needed} "
            f"positions, but the model has {positions}. {shorter}"
            f"`max_new_tokens={positions - length + 1}`."
        )


def _longest(model: PyTree, tokens: Any, mask: Any, prefix: Sequence[int]) -> tuple[int, str]:
    if hasattr(model, "encode"):
        behind = f" and `prefix`, of {len(prefix)} tokens," if prefix else ""
        return 1 + len(prefix), f"The token that the decoder starts with{behind}"
    if mask is None:
        return tokens.shape[1], f"The prompt of {tokens.shape[1]} tokens"
    # Positions are counted over real tokens. While tracing, at least one is assumed.
    length = int(np.asarray(mask).astype(bool).sum(axis=1).max()) if is_known(mask) else 1
    return length, f"The longest prompt, of {length} tokens,"


def check_token_options(request: Any, vocab: int) -> None:
    """Raises if an option names a token outside the vocabulary."""
    begin = () if request.forced_bos is None else (request.forced_bos,)
    words = tuple(token for word in request.bad_words for token in word)
    named = {"eos": request.eos, "forced_eos": request.forced_eos, "forced_bos": begin}
    named |= {"suppress": request.suppress, "bad_words": words, "prefix": request.prefix}
    named |= {"begin_suppress": request.begin_suppress}
    for name, tokens in named.items():
        if outside := [token for token in tokens if not 0 <= token < vocab]:
            more = " Pass `eos=()` to generate `max_new_tokens` tokens for every row."
            raise ValueError(
                f"`{name}` has {outside[0]}, but the token ids of the vocabulary are 0 to "
                f"{vocab - 1}.{more if name == 'eos' else ''}"
            )


def is_known(x: Any) -> bool:
    """Whether this process can read the values of an array now."""
    if isinstance(x, Tracer):
        return False
    return not isinstance(x, jax.Array) or x.is_fully_addressable
