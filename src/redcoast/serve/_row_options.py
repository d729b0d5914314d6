"""Decoding options for each row of a batch, as arguments of one program.

Every option that a client can choose is an array with a value for each row, so that no value
requires a new compilation.
"""

from dataclasses import replace

import equinox as eqx
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt

from ..core._decoding import Decoding, as_tuple

ALL_TOKENS = 2**30  # more than any vocabulary has
MOST_BIASES = 300  # tokens of a `logit_bias`, as in OpenAI's API
MOST_ENDS = 64  # tokens that end a row
MOST_TOP = 20  # most likely tokens of a step, as in OpenAI's API


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


def greedy_rows(count: int) -> RowOptions:
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
    ends = decoding.eos
    if ends is None:
        ends = getattr(config, "eos", ())
    return as_tuple(ends)
