"""Results that take turns in few rows are those of all at once, in fewer steps than in batches."""

from typing import Any

import jax
import numpy as np
import pytest
from generate_helpers import Tiny, tiny
from random_models import random_model

import redcoast as rc
from redcoast.models import Llama, LlamaConfig, Mamba2, Mamba2Config, Qwen3_5, Qwen3_5Config

CONFIG = LlamaConfig(vocab=64, width=32, layers=2, heads=4, kv_heads=2, hidden=64)
MODEL = random_model(Llama, CONFIG)
RNG = np.random.default_rng(0)
LENGTHS = [3, 20, 1, 7, 12, 5, 2]
TOKENS = RNG.integers(0, 64, (7, 20))
MASK = (np.arange(20)[None] < np.array(LENGTHS)[:, None]).astype(int)
DRAWN: Any = {"temperature": 1.0, "key": jax.random.key(1)}


def both(model, rows=3, **options):
    options = {"mask": MASK, "max_new_tokens": 12, "log_probabilities": True} | options
    return (rc.generate(model, TOKENS, rows=n, **options) for n in (rows, None))


def check_equal(found, expected):
    np.testing.assert_array_equal(found.tokens, expected.tokens)
    np.testing.assert_array_equal(found.mask, expected.mask)
    np.testing.assert_allclose(found.log_probabilities, expected.log_probabilities, atol=1e-5)


@pytest.mark.integration
@pytest.mark.parametrize(
    "how",
    [
        {},
        {"num_return_sequences": 2, "repetition_penalty": 1.3, "min_length": 8, "top_k": 30},
    ],
    ids=["plain", "options"],
)
def test_results_are_those_of_all_rows_at_once(how):
    found, expected = both(MODEL, eos=tuple(range(8)), **DRAWN, **how)
    lengths = np.asarray(found.mask).sum(axis=1)
    assert lengths.min() < 4 < 11 < lengths.max()
    check_equal(found, expected)


@pytest.mark.integration
@pytest.mark.parametrize("kind", ["mamba2", "qwen3_5", "mesh"])
def test_of_other_caches_and_on_a_mesh(kind):
    if kind == "mamba2":
        model = random_model(
            Mamba2, Mamba2Config(vocab=64, width=32, layers=2, heads=4, head_size=16, state=8)
        )
    elif kind == "qwen3_5":
        sizes: Any = {"key_heads": 2, "value_heads": 2, "key_size": 8, "value_size": 8}
        config = Qwen3_5Config(64, 32, 4, 4, 2, 64, **sizes)
        model = random_model(Qwen3_5, config)
    else:
        mesh = rc.make_mesh(model=2)
        plan = rc.infer_shardings(MODEL, mesh, fn=lambda m, x: m(x), args=(TOKENS,))
        model = jax.device_put(MODEL, plan)
    check_equal(*both(model, rows=2, eos=tuple(range(8)), **DRAWN))


def steps_in_turn(lengths, rows):
    """The steps after the first tokens, if each result begins in the first row that is free."""
    ends = [0] * rows
    for length in lengths:
        row = int(np.argmin(ends))
        ends[row] += length - 1
    return max(ends)


@pytest.mark.thorough
def test_rows_that_run_out_of_slots_are_moved_and_steps_are_saved():
    steps = []

    class Counted(Llama):
        def unembed(self, hidden):
            jax.debug.callback(lambda: steps.append(1))
            return super().unembed(hidden)

    model = random_model(Counted, CONFIG)
    options: Any = {"max_new_tokens": 60, "eos": (1, 2, 3, 4), "log_probabilities": True}
    tokens = np.random.default_rng(1).integers(0, 64, (64, 4))
    lengths = np.asarray(rc.generate(model, tokens, **options).mask).sum(axis=1)
    # Four long answers and twelve short ones, one long answer in each batch of four.
    order = np.argsort(-lengths)
    order = np.concatenate([order[:4, None], order[-12:].reshape(4, 3)], axis=1).reshape(-1)
    tokens, lengths = tokens[order], lengths[order]
    expected = rc.generate(model, tokens, **options)
    steps.clear()
    found = rc.generate(model, tokens, rows=4, **options)
    jax.effects_barrier()
    check_equal(found, expected)
    in_turn = len(steps) - 13  # without the first tokens, of the first four and of the others
    assert in_turn == steps_in_turn(lengths, 4)
    waiting = sum(lengths[i : i + 4].max() - 1 for i in range(0, 16, 4))
    assert waiting / in_turn >= 1.5
    assert in_turn > 128 - 16 - 60  # the steps until the slots are filled for the first time


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"rows": 0}, "`rows` is 0"),
        ({"rows": 2, "beams": 2}, "`rows` is not supported for beam search"),
        ({"rows": 2, "stream": id}, "`rows` is not supported with `stream`"),
    ],
)
def test_rows_that_cannot_be_are_refused(options, says):
    with pytest.raises(ValueError, match=says):
        rc.generate(MODEL, TOKENS, max_new_tokens=2, **options)


def test_rows_need_a_cache_that_can_be_moved_and_no_trace():
    with pytest.raises(ValueError, match="`rows` needs a cache of `redcoast.models`.*TinyCache"):
        rc.generate(tiny(0, Tiny), TOKENS % 11, max_new_tokens=2, rows=2)
    with pytest.raises(ValueError, match="`rows` is not supported inside `jax.jit`"):
        jax.jit(lambda x: rc.generate(MODEL, x, max_new_tokens=2, rows=2))(TOKENS)
