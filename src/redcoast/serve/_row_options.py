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

ALL_TOKENS = 2**30  # more than any vocabulary has
MOST_BIASES = 300  # tokens of a `logit_bias`, as in OpenAI's API
MOST_ENDS = 64  # tokens that end a row
MOST_TOP = 20  # most likely tokens of a step, as in OpenAI's API


@dataclass(frozen=True)
class RowRequest:
    """The options of a client for the decoding of a row.

    - `decoding`: its sampling, repetition penalty, minimum lengths and ends. All other options are
        set by the server.
    - `seed`, `number`: samples depend only on these and on the step.
    - `presence`, `frequency`: penalties of tokens that occur in the row, once and per occurrence.
    - `bias`: values that are added to the logits of tokens.
    """

    decoding: Decoding
    limit: int = 1  # the maximum number of new tokens
    seed: int = 0
    number: int = 0
    presence: int | float = 0.0
    frequency: int | float = 0.0
    bias: Mapping[int, int | float] = field(default_factory=dict)
    logprobs: bool = False  # whether to return log-probabilities of tokens


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
    options = _greedy_rows(count)
    for i, (row, length, ends_of_row) in enumerate(zip(rows, lengths, ends, strict=True)):
        decoding = row.decoding
        # Seeds of the API have 64 bits and a sign, and those of the program 32.
        options.seeds[i] = row.seed % 2**32
        options.numbers[i] = row.number
        options.temperature[i] = decoding.temperature
        options.top_k[i] = min(decoding.top_k or ALL_TOKENS, ALL_TOKENS)
        options.tail[i] = 1 - (decoding.top_p or 1)
        options.min_p[i] = decoding.min_p or 0
        options.repetition[i] = decoding.repetition_penalty
        options.presence[i] = row.presence
        options.frequency[i] = row.frequency
        options.bias_tokens[i, : len(row.bias)] = [*row.bias.keys()]
        options.bias[i, : len(row.bias)] = [*row.bias.values()]
        options.least[i] = max(decoding.min_new_tokens, decoding.min_length - length)
        options.ends[i, : len(ends_of_row)] = ends_of_row
        options.logprobs[i] = row.logprobs
    return options


def _greedy_rows(count: int) -> RowOptions:
    """The options of rows of padding, in arrays that other rows are written into."""
    none = Decoding()
    return RowOptions(
        seeds=np.zeros(count, np.uint32),
        numbers=np.zeros(count, np.int32),
        temperature=np.full((count, 1), none.temperature, np.float32),
        top_k=np.full((count, 1), ALL_TOKENS, np.int32),
        tail=np.zeros((count, 1), np.float32),
        min_p=np.zeros((count, 1), np.float32),
        repetition=np.full((count, 1), none.repetition_penalty, np.float32),
        presence=np.zeros((count, 1), np.float32),
        frequency=np.zeros((count, 1), np.float32),
        bias_tokens=np.full((count, MOST_BIASES), -1, np.int32),
        bias=np.full((count, MOST_BIASES), -1, np.float32),
        least=np.zeros(count, np.int32),
        ends=np.full((count, MOST_ENDS), -1, np.int32),
        logprobs=np.zeros(count, bool),
    )


def shared_decoding(decoding: Decoding) -> Decoding:
    """The options of a decoding that are part of the program, without the options of a row."""
    plain = decoding.without_sampling()
    return replace(plain, repetition_penalty=1.0, min_length=0, min_new_tokens=0, eos=None)


def ends_of(decoding: Decoding, config: object) -> tuple[int, ...]:
    """The tokens that end a row."""
    return as_tuple(getattr(config, "eos", ()) if decoding.eos is None else decoding.eos)
