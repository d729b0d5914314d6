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
from redcoast.models import Gemma, GemmaConfig, Llama, LlamaConfig, Mamba2, Mamba2Config

MODEL = tiny(3)
ROWS, (TOKENS, MASK), _ = prompts([3, 7, 1, 5])
DRAWN: Any = {"temperature": 1.5, "top_k": 6, "key": jax.random.key(2)}


def slow(new, mask):
    """Log-probabilities in float64, without a cache."""
    actual = np.zeros(new.shape)
    for i, row in enumerate(ROWS):
        for j in range(int(mask[i].sum())):
            logits = slow_logits(MODEL, [*row, *new[i, :j]])
            actual[i, j] = logits[new[i, j]] - np.log(np.exp(logits).sum())
    return actual


@pytest.mark.thorough
@pytest.mark.parametrize("how", [{}, DRAWN], ids=["greedy", "drawn"])
def test_they_are_of_the_models_logits_and_0_after_the_end(how):
    options: Any = {"mask": MASK, "max_new_tokens": 9, **how}
    plain = np.asarray(rc.generate(MODEL, TOKENS, **options))
    options["eos"] = int(plain[0, 3])
    actual = rc.generate(MODEL, TOKENS, log_probabilities=True, **options)
    np.testing.assert_array_equal(actual.tokens, rc.generate(MODEL, TOKENS, **options))
    ends = np.asarray(actual.tokens) == options["eos"]
    before = np.cumsum(ends, axis=1) - ends
    np.testing.assert_array_equal(actual.mask, before == 0)
    assert 1 <= np.asarray(actual.mask).sum(axis=1).min() < 9
    np.testing.assert_allclose(actual.log_probabilities, slow(plain, actual.mask), atol=1e-4)
    streamed = rc.generate(MODEL, TOKENS, log_probabilities=True, stream=id, **options)
    traced = jax.jit(lambda x: rc.generate(MODEL, x, log_probabilities=True, **options))(TOKENS)
    for other in (streamed, traced):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), other, actual)


def test_a_row_that_stop_ends_has_no_more_tokens():
    options: Any = {"mask": MASK, "max_new_tokens": 6, "log_probabilities": True}
    actual = rc.generate(MODEL, TOKENS, stop=lambda row: len(row) == 2, **options)
    np.testing.assert_array_equal(actual.mask, np.arange(6)[None] < np.full((4, 1), 2))
    assert not np.asarray(actual.log_probabilities)[:, 2:].any()


@pytest.mark.thorough
def test_they_equal_the_training_forward_pass():
    config = LlamaConfig(vocab=64, width=32, layers=2, heads=4, kv_heads=2, hidden=64)
    model = random_model(Llama, config)
    tokens = np.random.default_rng(0).integers(0, 64, (3, 5))
    options: Any = {"temperature": 1.0, "key": jax.random.key(1), "num_return_sequences": 2}
    actual = rc.generate(model, tokens, max_new_tokens=7, log_probabilities=True, **options)
    both = jnp.concatenate([np.repeat(tokens, 2, axis=0), actual.tokens], axis=1)
    hidden = model.hidden(both)[:, 4:-1]
    for chunk in (3, 128):
        again = token_log_probabilities(hidden, model.unembed, actual.tokens, chunk=chunk)
        np.testing.assert_allclose(actual.log_probabilities, again, atol=1e-5)


def test_they_are_refused_for_beam_search():
    with pytest.raises(ValueError, match=r"not supported for beam search \(`beams=2`\)"):
        rc.generate(MODEL, TOKENS, max_new_tokens=2, beams=2, log_probabilities=True)


HEADS: Any = {"vocab": 64, "width": 32, "layers": 2, "heads": 4, "kv_heads": 2, "hidden": 64}
FAMILIES = {
    "llama": (Llama, LlamaConfig(**HEADS)),
    "window": (Gemma, GemmaConfig(**HEADS, head_dim=8, local=(True, False), window=3)),
    "recurrent": (
        Mamba2,
        Mamba2Config(vocab=64, width=32, layers=2, heads=4, head_size=16, state=8),
    ),
}


REAL = np.random.default_rng(0).permuted(np.arange(14) < np.full((4, 1), 9), axis=1)
TURNS = np.random.default_rng(1).integers(0, 64, REAL.shape)


@jax.jit
def score(model, tokens, mask=None):
    return rc.log_probabilities(model, tokens, mask=mask)


def expected_score(model):
    """Of the rows without their padding, which is between tokens."""
    expected = np.zeros((4, 13), np.float32)
    later = REAL & (np.cumsum(REAL, axis=1) > 1)
    expected[later[:, 1:]] = np.asarray(score(model, TURNS[REAL].reshape(4, 9))).reshape(-1)
    return expected


@pytest.mark.thorough
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.few("llama")
def test_padding_between_turns_changes_no_score(family):
    """The token before one may be columns away; windows and convolutions reach back by columns."""
    model = random_model(*FAMILIES[family])
    np.testing.assert_allclose(score(model, TURNS, REAL), expected_score(model), atol=1e-4)


@pytest.mark.thorough
@pytest.mark.parametrize("family", FAMILIES)
def test_padding_between_turns_changes_no_gradient_and_no_sample(family):
    model = random_model(*FAMILIES[family])

    @jax.jit
    def score_exactly(model):
        of = lambda model: rc.log_probabilities(model, TURNS, mask=REAL, exact=True)
        return of(model), jax.grad(lambda model: jnp.sum(of(model)[:, ::2]))(model).embed

    slope = jax.jit(jax.grad(lambda model: jnp.sum(score(model, TURNS, REAL)[:, ::2])))
    exact, gradient = score_exactly(model)
    np.testing.assert_allclose(exact, expected_score(model), atol=1e-4)
    np.testing.assert_allclose(gradient, slope(model).embed, atol=1e-4)
    new = rc.generate(model, TURNS, 3, mask=REAL)
    np.testing.assert_array_equal(new, rc.generate(model, TURNS[REAL].reshape(4, 9), 3))
