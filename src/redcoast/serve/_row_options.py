"""Decoding options for each row of a batch, as arguments of one program.

Every option that a client can choose is an array with a value for each row, so that no value
requires a new compilation.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import equinox as eqx
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt

from ..core._decoding import Decoding, as_tuple

MOST_BIASES = 300  # tokens of a `logit_bias`, as in OpenAI's API
MOST_ENDS = 64  # tokens that end a row
MOST_TOP = 20  # most likely tokens of a step, as in OpenAI's API


@dataclass(frozen=True)
class RowRequest:
    """The options of a client for the decoding of a row.

    - `decoding`: its sampling, repetition penalty, minimum lengths and ends. All other options are
        set by the server.
    - `limit`: the maximum number of new tokens.
    - `seed`, `number`: samples depend only on these and on the step.
    - `presence`, `frequency`: penalties of tokens that occur in the row, once and per occurrence.
    - `bias`: values that are added to the logits of tokens.
    - `logprobs`: whether to return log-probabilities of tokens.
    """

    decoding: Decoding
    limit: int = 1
    seed: int = 0
    number: int = 0
    presence: int | float = 0.0
    frequency: int | float = 0.0
    bias: Mapping[int, int | float] = field(default_factory=dict)
    logprobs: bool = False


class RowOptions(eqx.Module):
    """The options of all rows of a batch. `least` is the number of new tokens before which a row
    has none of its `ends`. `ends` and `bias_tokens` are padded with -1. A `temperature` of 0
    decodes greedily; `tail` is `1 - top_p`."""

    seeds: UInt[Array | np.ndarray, " rows"]
    numbers: Int[Array | np.ndarray, " rows"]
    temperature: Float[Array | np.ndarray, "rows 1"]
    top_k: Int[Array | np.ndarray, "rows 1"]
    tail: Float[Array | np.ndarray, "rows 1"]
    min_p: Float[Array | np.ndarray, "rows 1"]
    repetition: Float[Array | np.ndarray, "rows 1"]
    presence: Float[Array | np.ndarray, "rows 1"]
    frequency: Float[Array | np.ndarray, "rows 1"]
    bias_tokens: Int[Array | np.ndarray, "rows biases"]
    bias: Float[Array | np.ndarray, "rows biases"]
    least: Int[Array | np.ndarray, " rows"]
    ends: Int[Array | np.ndarray, "rows ends"]
    logprobs: Bool[Array | np.ndarray, " rows"]


def stack_options(
    rows: Sequence[RowRequest], lengths: Sequence[int], ends: Sequence[tuple[int, ...]], count: int
) -> RowOptions:
    """Creates the options of `count` rows: `rows`, and then padding. `lengths` are the lengths of
    the prompts, and `ends` the tokens that end each row."""
    padding = count - len(rows)
    rows = [*rows, *[RowRequest(Decoding())] * padding]
    lengths, ends = [*lengths, *[1] * padding], [*ends, *[()] * padding]
    ds = [row.decoding for row in rows]
    column = lambda values: np.array([*values], np.float32)[:, None]
    whole = lambda values: np.array([*values], np.int32)
    missing = [max(d.min_new_tokens, d.min_length - n) for d, n in zip(ds, lengths, strict=True)]
    return RowOptions(
        seeds=np.array([row.seed % 2**32 for row in rows], np.uint32),
        numbers=whole(row.number for row in rows),
        temperature=column(d.temperature for d in ds),
        # A number larger than any vocabulary keeps everything.
        top_k=whole(min(d.top_k or 2**30, 2**30) for d in ds)[:, None],
        tail=column(1 - (d.top_p or 1) for d in ds),
        min_p=column(d.min_p or 0 for d in ds),
        repetition=column(d.repetition_penalty for d in ds),
        presence=column(row.presence for row in rows),
        frequency=column(row.frequency for row in rows),
        bias_tokens=_padded([[*row.bias.keys()] for row in rows], MOST_BIASES).astype(np.int32),
        bias=_padded([[*row.bias.values()] for row in rows], MOST_BIASES).astype(np.float32),
        least=whole(missing),
        ends=_padded(ends, MOST_ENDS).astype(np.int32),
        logprobs=np.array([row.logprobs for row in rows]),
    )


def _padded(rows: Sequence[Sequence[int | float]], width: int) -> np.ndarray:
    """Rows of different lengths as one matrix, padded with -1."""
    matrix = np.full((len(rows), width), -1, np.float64)
    for line, row in zip(matrix, rows, strict=True):
        line[: len(row)] = row
    return matrix


def shared_decoding(decoding: Decoding) -> Decoding:
    """The options of a decoding that are part of the program, without the options of a row."""
    plain = decoding.without_sampling()
    return replace(plain, repetition_penalty=1.0, min_length=0, min_new_tokens=0, eos=None)


def ends_of(decoding: Decoding, config: object) -> tuple[int, ...]:
    """The tokens that end a row."""
    return as_tuple(getattr(config, "eos", ()) if decoding.eos is None else decoding.eos)
