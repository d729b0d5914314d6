"""Rows that grow past the original context of LongRoPE get the tokens of a forward pass."""

from typing import Any

import jax
import numpy as np
import pytest
from random_models import random_model

import redcoast as rc
from redcoast.models import LongRope, Phi3, Phi3Config

ORIGINAL, NEW = 8, 6
SCALING = LongRope((1.0, 1.1, 1.2, 1.3), (2.0, 4.0, 8.0, 9.0), ORIGINAL, 1.2)
CONFIG = Phi3Config(
    vocab=24, width=32, layers=2, heads=4, kv_heads=2, hidden=32, rope_base=50.0,
    rope_scaling=SCALING,
)  # fmt: skip
MODEL = random_model(Phi3, CONFIG)
# With the new tokens, rows of 2 tokens stay within the original context, and those of 5 do not.
PROMPTS = np.array([[0, 0, 0, 5, 9], [3, 7, 1, 4, 2]])
MASK = np.array([[0, 0, 0, 1, 1], [1, 1, 1, 1, 1]])


def forward(row, new):
    """The likeliest token after each place, by a forward pass of the whole row."""
    tokens = np.array([[*row, *new[:-1]]])
    return np.argmax(MODEL(jax.numpy.asarray(tokens))[0, len(row) - 1 :], axis=-1)


@pytest.mark.parametrize(
    "how",
    [{}, pytest.param({"stream": lambda tokens: None}, marks=pytest.mark.thorough)],
    ids=["whole", "stream"],
)
@pytest.mark.thorough
def test_tokens_are_those_of_a_forward_pass(how):
    options: Any = {"max_new_tokens": NEW, "eos": (), **how}
    actual = np.asarray(rc.generate(MODEL, PROMPTS, mask=MASK, **options))
    for prompt, mask, new in zip(PROMPTS, MASK, actual, strict=True):
        np.testing.assert_array_equal(forward(prompt[mask == 1], new), new)
    # A row does not depend on the length of the others.
    alone = rc.generate(MODEL, PROMPTS[:1, 3:], **options)
    np.testing.assert_array_equal(alone[0], actual[0])


@pytest.mark.thorough
def test_beams_keep_the_lengths_of_their_rows():
    options: Any = {"max_new_tokens": NEW, "eos": (), "beams": 2}
    actual = rc.generate(MODEL, PROMPTS, mask=MASK, **options)
    alone = rc.generate(MODEL, PROMPTS[1:], **options)
    np.testing.assert_array_equal(actual[1], alone[0])
