"""Log-probabilities of sampled tokens against the training forward pass."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from generate_helpers import prompts, slow_logits, tiny
from random_models import random_model

import redcoast as rc
from redcoast.losses import token_log_probabilities
from redcoast.models import Llama, LlamaConfig

MODEL = tiny(3)
ROWS, (TOKENS, MASK), _ = prompts([3, 7, 1, 5])
DRAWN: Any = {"temperature": 1.5, "top_k": 6, "key": jax.random.key(2)}


def slow(new, mask):
    """Log-probabilities in float64, without a cache."""
    found = np.zeros(new.shape)
    for i, row in enumerate(ROWS):
        for j in range(int(mask[i].sum())):
            logits = slow_logits(MODEL, [*row, *new[i, :j]])
            found[i, j] = logits[new[i, j]] - np.log(np.exp(logits).sum())
    return found


@pytest.mark.parametrize("how", [{}, DRAWN], ids=["greedy", "drawn"])
@pytest.mark.few("greedy")
def test_they_are_of_the_models_logits_and_0_after_the_end(how):
    options: Any = {"mask": MASK, "max_new_tokens": 9, **how}
    plain = np.asarray(rc.generate(MODEL, TOKENS, **options))
    options["eos"] = int(plain[0, 3])
    found = rc.generate(MODEL, TOKENS, log_probabilities=True, **options)
    np.testing.assert_array_equal(found.tokens, rc.generate(MODEL, TOKENS, **options))
    ends = np.asarray(found.tokens) == options["eos"]
    before = np.cumsum(ends, axis=1) - ends
    np.testing.assert_array_equal(found.mask, before == 0)
    assert 1 <= np.asarray(found.mask).sum(axis=1).min() < 9
    np.testing.assert_allclose(found.log_probabilities, slow(plain, found.mask), atol=1e-4)
    streamed = rc.generate(MODEL, TOKENS, log_probabilities=True, stream=id, **options)
    traced = jax.jit(lambda x: rc.generate(MODEL, x, log_probabilities=True, **options))(TOKENS)
    for other in (streamed, traced):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), other, found)


def test_a_row_that_stop_ends_has_no_more_tokens():
    options: Any = {"mask": MASK, "max_new_tokens": 6, "log_probabilities": True}
    found = rc.generate(MODEL, TOKENS, stop=lambda row: len(row) == 2, **options)
    np.testing.assert_array_equal(found.mask, np.arange(6)[None] < np.full((4, 1), 2))
    assert not np.asarray(found.log_probabilities)[:, 2:].any()


def test_they_equal_the_training_forward_pass():
    config = LlamaConfig(vocab=64, width=32, layers=2, heads=4, kv_heads=2, hidden=64)
    model = random_model(Llama, config)
    tokens = np.random.default_rng(0).integers(0, 64, (3, 5))
    options: Any = {"temperature": 1.0, "key": jax.random.key(1), "num_return_sequences": 2}
    found = rc.generate(model, tokens, max_new_tokens=7, log_probabilities=True, **options)
    both = jnp.concatenate([np.repeat(tokens, 2, axis=0), found.tokens], axis=1)
    hidden = model.hidden(both)[:, 4:-1]
    for chunk in (3, 128):
        again = token_log_probabilities(hidden, model.unembed, found.tokens, chunk=chunk)
        np.testing.assert_allclose(found.log_probabilities, again, atol=1e-5)


def test_they_are_refused_for_beam_search():
    with pytest.raises(ValueError, match=r"not supported for beam search \(`beams=2`\)"):
        rc.generate(MODEL, TOKENS, max_new_tokens=2, beams=2, log_probabilities=True)
