"""The checks of the arguments of `generate`."""

import functools as ft
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import Field, fields
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

from ..core._dtypes import check_unmasked
from ..core._errors import check_flag, check_integer
from ..core._program_lines import describe_array
from ..core._train_state import refuse_state
from ..distributed._agreement import Listing, agree
from ..models._cache import has_slots_to_move
from ..models._check_config import check_decoder_start
from ..models._check_tokens import is_known
from ..models._inputs import AnyArray
from ._request import Request


def check_stream(beams: int, *, traced: bool) -> None:
    if beams > 1:
        raise ValueError(
            f"`stream` and `stop` are not supported for beam search (`beams={beams}`), which "
            "determines its tokens only at the end. Pass `beams=1`, or neither of them."
        )
    if traced:
        raise ValueError(
            "`stream` and `stop` are not supported inside `jax.jit`, `plan.constrain` or a "
            "`predict_fn`: all steps are one program. Call `generate` outside, or pass neither of "
            "them."
        )


def check_scored(beams: int, log_probabilities: object) -> None:
    check_flag("log_probabilities", log_probabilities)
    if log_probabilities and beams > 1:
        raise ValueError(
            f"`log_probabilities` is not supported for beam search (`beams={beams}`). Pass "
            "`beams=1`, or compute them with `redcoast.losses.token_log_probabilities`."
        )


def check_rows(
    model: PyTree, tokens: object, mask: object, rows: object, beams: int, *, traced: bool
) -> None:
    """Raises if results cannot be generated in fewer rows."""
    check_integer("rows", rows)
    if beams > 1:
        raise ValueError(f"`rows` is not supported for beam search (`beams={beams}`).")
    if traced:
        raise ValueError(
            "`rows` is not supported inside `jax.jit`, `plan.constrain` or a `predict_fn`: the "
            "host starts each row. Call `generate` outside, or pass no `rows`."
        )
    check_no_encoder(model, "rows")
    if not are_known(tokens, mask):
        raise ValueError(
            "`rows` needs prompts that each process has in full. Pass NumPy arrays as `tokens` and "
            "`mask`."
        )
    short = jax.eval_shape(ft.partial(model.init_cache, 1, 8))
    long = jax.eval_shape(ft.partial(model.init_cache, 1, 16))
    has_slots = jax.tree.map(jnp.shape, short) != jax.tree.map(jnp.shape, long)
    if has_slots and not has_slots_to_move(long):
        raise ValueError(
            f"`rows` needs a cache of `redcoast.models`, but a {type(model).__name__} has a "
            f"{type(long).__name__}, whose slots cannot be moved. Pass no `rows`."
        )


def check_no_encoder(model: PyTree, option: str) -> None:
    if hasattr(model, "encode"):
        raise ValueError(
            f"`{option}` is for decoders, but a {type(model).__name__} has an encoder. Pass no "
            f"`{option}`."
        )


def check_exact_options(beams: int, rows: object, stream: object, stop: object) -> None:
    """Raises if another option determines the shapes or the order of the arithmetic."""
    others = {"rows": rows is not None, "stream": stream is not None, "stop": stop is not None}
    others[f"beams={beams}"] = beams > 1
    for name, is_passed in others.items():
        if is_passed:
            raise ValueError(
                f"`exact` is not supported with `{name}`. It decodes in blocks of a fixed number "
                "of rows, each until its rows have ended, in one program. Pass one of the two."
            )


def check_stream_in_turn(stream: object, stop: object) -> None:
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
    if not hasattr(model, "encode"):
        return
    if getattr(model.config, "decoder_start", None) is None:
        raise ValueError(
            f"The configuration of this {type(model).__name__} has no `decoder_start`, the token "
            "that its decoder starts with. Set it in the configuration."
        )
    # Whisper's default is a token of the published vocabulary, which a smaller one lacks.
    if hasattr(model.config, "vocab"):
        check_decoder_start(model.config)


def as_matrix(name: str, rows: Any) -> Any:
    """Converts a list of rows of integers or booleans to an array; anything else is not changed.

    Raises `ValueError` if the rows have different lengths.
    """
    if not isinstance(rows, list | tuple):
        return rows
    if not rows:
        return np.zeros((0, 0), np.int32)  # is refused as any empty array
    if _is_row(rows):
        raise ValueError(
            f"`{name}` is a list of {len(rows)} integers, but must have the shape (batch, seq). "
            f"For one prompt, pass `[{name}]`."
        )
    if not all(map(_is_row, rows)):
        return rows
    lengths = sorted(set(map(len, rows)))
    if len(lengths) > 1:
        raise ValueError(
            f"The rows of `{name}` have from {lengths[0]} to {lengths[-1]} tokens. Pad them to one "
            "length, on either side, and pass a `mask` with 0 at the padding."
        )
    return np.array(rows).reshape(len(rows), lengths[0])


def _is_row(row: object) -> bool:
    if isinstance(row, np.ndarray):
        return row.ndim == 1 and row.dtype.kind in "iub"
    if not isinstance(row, list | tuple | range):
        return False
    return all(isinstance(x, int | np.integer | np.bool_) for x in row)


def check_prompt(model: PyTree, tokens: object, mask: object) -> AnyArray:
    """Returns the prompts. Raises if they are not a matrix of token ids, or if a row has no real
    token.

    The values of arrays are only checked if they are known, which they are not while tracing.
    """
    tokens = _as_array("tokens", tokens)
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
        return tokens
    if tokens.ndim != 2 or not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise ValueError(
            f"`tokens` has dtype {tokens.dtype} and shape {tokens.shape}. It must hold integers "
            "and have the shape (batch, seq)."
        )
    if mask is not None:
        mask = _as_mask(tokens, mask)
        if is_known(mask):
            empty = np.flatnonzero(~np.asarray(mask).astype(bool).any(axis=1))
            if empty.size:
                raise ValueError(
                    f"`mask` has no real token in {_rows(empty)}. A prompt needs at least one, "
                    "such as the beginning-of-sequence token."
                )
    _check_vocabulary(model, tokens, mask)
    return tokens


def check_rows_to_score(model: PyTree, tokens: object, mask: object) -> None:
    """Raises if these are no rows of tokens whose log-probabilities a decoder can compute."""
    refuse_state(model, "log_probabilities")
    if hasattr(model, "encode") or not (hasattr(model, "hidden") and hasattr(model, "unembed")):
        raise TypeError(
            f"`log_probabilities` needs a decoder with `hidden` and `unembed`, but `model` is a "
            f"{type(model).__name__}. For other models, pass hidden states to "
            "`redcoast.losses.token_log_probabilities`."
        )
    tokens = _as_array("tokens", tokens)
    if tokens.ndim != 2 or not jnp.issubdtype(tokens.dtype, jnp.integer) or 0 in tokens.shape:
        raise ValueError(
            f"`tokens` has dtype {tokens.dtype} and shape {tokens.shape}. It must hold integers "
            "and have the shape (batch, seq), with at least one row and one column."
        )
    if mask is not None:
        mask = _as_mask(tokens, mask)
    _check_vocabulary(model, tokens, mask)


def _as_array(name: str, x: object) -> AnyArray:
    if not isinstance(x, np.ndarray | jax.Array):
        kind = f"{type(x).__module__}.{type(x).__qualname__}".removeprefix("builtins.")
        way = ""
        if hasattr(x, "__array__"):
            way = f" Convert it with `np.asarray({name})`."
        if any(isinstance(part, str) for part in jax.tree.leaves(x)):
            way = " Encode text with the tokenizer of the model."
        raise TypeError(
            f"`{name}` is of type {kind}. It must be a NumPy or JAX array, or a list of rows of "
            f"integers.{way}"
        )
    check_unmasked(x, f"`{name}`")
    return x


def _as_mask(tokens: AnyArray, mask: object) -> AnyArray:
    mask = _as_array("mask", mask)
    if mask.shape != tokens.shape:
        raise ValueError(
            f"`mask` has shape {mask.shape}, but `tokens` has shape {tokens.shape}. They must be "
            "equal."
        )
    if not (mask.dtype == bool or jnp.issubdtype(mask.dtype, jnp.integer)):
        raise ValueError(f"`mask` has dtype {mask.dtype}. It must hold booleans or integers.")
    return mask


def _check_vocabulary(model: PyTree, tokens: AnyArray, mask: AnyArray | None) -> None:
    vocab = getattr(model.config, "vocab", None)
    if vocab is None or not are_known(tokens, mask):
        return
    ids = np.asarray(tokens)
    outside = (ids < 0) | (ids >= vocab)
    if mask is not None:
        outside &= np.asarray(mask).astype(bool)
    if outside.any():
        raise ValueError(
            f"`tokens` holds {ids[outside][0]} in {_rows(np.flatnonzero(outside.any(axis=1)))}, "
            f"but the token ids of the vocabulary are 0 to {vocab - 1}."
        )


def _rows(rows: np.ndarray) -> str:
    if rows.size == 1:
        return f"row {rows[0]}"
    shown = list(map(str, rows[:5]))
    if rows.size > 5:
        shown.append("...")
    return f"rows {', '.join(shown)}"


def check_positions(
    model: PyTree,
    tokens: AnyArray,
    mask: AnyArray | None,
    prefix: Sequence[int],
    max_new_tokens: int,
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
        remedy = "Pass"
        if length > 1:
            remedy = "Pass a shorter prompt, or"
        raise ValueError(
            f"{what} and all but the last of `max_new_tokens={max_new_tokens}` need {needed} "
            f"positions, but the model has {positions}. {remedy} "
            f"`max_new_tokens={positions - length + 1}`."
        )


def _longest(
    model: PyTree, tokens: AnyArray, mask: AnyArray | None, prefix: Sequence[int]
) -> tuple[int, str]:
    if hasattr(model, "encode"):
        what = "The token that the decoder starts with"
        if prefix:
            what += f" and `prefix`, of {len(prefix)} tokens,"
        return 1 + len(prefix), what
    if mask is None:
        return tokens.shape[1], f"The prompt of {tokens.shape[1]} tokens"
    # Positions are counted over real tokens. While tracing, at least one is assumed.
    length = 1
    if is_known(mask):
        length = int(np.asarray(mask).astype(bool).sum(axis=1).max())
    return length, f"The longest prompt, of {length} tokens,"


def check_token_options(request: Request, vocab: int) -> None:
    """Raises if an option names a token outside the vocabulary."""
    forced_bos = ()
    if request.forced_bos is not None:
        forced_bos = (request.forced_bos,)
    tokens_of_options: dict[str, Iterable[int]] = {
        "eos": request.eos,
        "forced_eos": request.forced_eos,
        "forced_bos": forced_bos,
        "suppress": request.suppress,
        "bad_words": itertools.chain.from_iterable(request.bad_words),
        "prefix": request.prefix,
        "begin_suppress": request.begin_suppress,
    }
    for name, tokens in tokens_of_options.items():
        for token in tokens:
            if 0 <= token < vocab:
                continue
            remedy = ""
            if name == "eos":
                remedy = " Pass `eos=()` to generate `max_new_tokens` tokens for every row."
            raise ValueError(
                f"`{name}` has {token}, but the token ids of the vocabulary are 0 to "
                f"{vocab - 1}.{remedy}"
            )


def are_known(tokens: object, mask: object) -> bool:
    """Whether this process can read prompts now, and their mask if they have one."""
    return is_known(tokens) and (mask is None or is_known(mask))


def check_same_prompts(
    model: PyTree, tokens: Array | np.ndarray, mask: Array | np.ndarray | None, request: Request
) -> None:
    """Raises `ValueError` on all processes if their prompts, masks or options differ.

    A process whose own devices have the entire model decodes independently, and is not compared.
    """
    if jax.process_count() == 1 or all(map(is_known, jax.tree.leaves(model))):
        return
    options = {f"the option `{field.name}`": _describe(request, field) for field in fields(request)}
    agree(options, {"`tokens`": _row_lines("tokens", tokens), "`mask`": _row_lines("mask", mask)})


def _describe(request: Request, field: Field) -> str:
    value = getattr(request, field.name)
    if isinstance(value, jax.Array | np.ndarray | np.generic):
        return describe_array(value)
    if callable(value):
        # The text of a function has its address, which differs.
        return getattr(value, "__qualname__", type(value).__qualname__)
    return repr(value)


def _row_lines(name: str, x: Array | np.ndarray | None) -> Listing:
    """One line for each row that this process has in full."""
    if x is None or not is_known(x):
        return Listing([])
    return Listing([f"{name}[{i}]: {describe_array(row)}" for i, row in enumerate(np.asarray(x))])
