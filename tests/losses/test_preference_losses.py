"""Losses of preferences against the equations of their papers, pair by pair in Python's floats."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from random_models import to_device

from redcoast import losses

RNG = np.random.default_rng(0)
PAIRS = 6
SUMS = RNG.uniform(-60, -2, (4, PAIRS)).astype(np.float32)
MEANS = RNG.uniform(-4, -0.05, (4, PAIRS)).astype(np.float32)


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def margin(pair):
    chosen, rejected, reference_chosen, reference_rejected = pair
    return math.log(
        (math.exp(chosen) / math.exp(reference_chosen))
        / (math.exp(rejected) / math.exp(reference_rejected))
    )


def log_odds(mean):
    probability = math.exp(mean)
    return math.log(probability / (1 - probability))


def smoothed(pair, beta, smoothing):
    right = -math.log(sigmoid(beta * margin(pair)))
    wrong = -math.log(sigmoid(-beta * margin(pair)))
    return (1 - smoothing) * right + smoothing * wrong


# By name: the log-probabilities, the options, and the loss of one pair.
CASES = {
    "dpo": (SUMS, {"beta": 0.3}, lambda pair: -math.log(sigmoid(0.3 * margin(pair)))),
    "dpo smoothed": (SUMS, {"label_smoothing": 0.2}, lambda pair: smoothed(pair, 0.1, 0.2)),
    "ipo": (MEANS, {"beta": 0.2}, lambda pair: (margin(pair) - 1 / 0.4) ** 2),
    "orpo": (
        MEANS[:2],
        {"weight": 0.3},
        lambda pair: -pair[0] - 0.3 * math.log(sigmoid(log_odds(pair[0]) - log_odds(pair[1]))),
    ),
    "simpo": (
        MEANS[:2],
        {"beta": 1.5, "gamma": 0.7},
        lambda pair: -math.log(sigmoid(1.5 * (pair[0] - pair[1]) - 0.7)),
    ),
    "bradley_terry": (MEANS[:2], {}, lambda pair: -math.log(sigmoid(pair[0] - pair[1]))),
}


@pytest.mark.parametrize("name", CASES)
def test_a_loss_is_the_mean_of_the_equation(name):
    arrays, options, of_pair = CASES[name]
    loss = getattr(losses, name.split()[0])
    expected = np.mean([of_pair([float(x) for x in pair]) for pair in arrays.T])
    actual = jax.jit(lambda *rows: loss(*rows, **options))(*map(to_device, arrays))
    np.testing.assert_allclose(actual, expected, rtol=2e-5)


@pytest.mark.parametrize("weights", [(1.0, 1.0), (1.5, 0.5)])
@pytest.mark.parametrize("shift", [3.0, -3.0])
def test_kto_is_the_mean_of_the_equation(weights, shift):
    """With a divergence, and with a negative estimate of it, which counts as 0."""
    answers, reference, unrelated, reference_unrelated = SUMS / 10
    unrelated = reference_unrelated + shift + 0.1 * unrelated
    desirable = np.array([True, False, True, True, False, False])
    divergence = max(0.0, np.mean(unrelated.astype(float) - reference_unrelated))
    assert (divergence > 0) == (shift > 0)
    terms = []
    for answer, other, good in zip(answers.tolist(), reference.tolist(), desirable, strict=True):
        gain = 0.4 * (answer - other - divergence)
        value = weights[0] * sigmoid(gain) if good else weights[1] * sigmoid(-gain)
        terms.append((weights[0] if good else weights[1]) - value)
    options = dict(zip(("desirable_weight", "undesirable_weight"), weights, strict=True))
    arrays = (answers, reference, desirable, unrelated, reference_unrelated)
    actual = jax.jit(
        lambda a, b, c, d, e: losses.kto(
            a, b, c, unrelated=d, reference_unrelated=e, beta=0.4, **options
        )
    )(*map(to_device, arrays))
    np.testing.assert_allclose(actual, np.mean(terms), rtol=2e-5)


def test_references_and_the_divergence_are_constants():
    """A gradient into a reference would train a copy that shares its weights with the model."""
    rows = [to_device(x) for x in SUMS]
    of_pairs = jax.jit(jax.grad(losses.dpo, argnums=(0, 1, 2, 3)))(*rows)
    assert [bool(jnp.any(x != 0)) for x in of_pairs] == [True, True, False, False]

    def of_answers(answers, reference, unrelated, reference_unrelated):
        others = {"unrelated": unrelated, "reference_unrelated": reference_unrelated}
        return losses.kto(answers, reference, jnp.arange(PAIRS) < 3, **others)

    gradients = jax.jit(jax.grad(of_answers, argnums=(0, 1, 2, 3)))(*rows)
    assert [bool(jnp.any(x != 0)) for x in gradients] == [True, False, False, False]


def test_odds_of_very_likely_and_unlikely_answers_are_finite():
    """log(1 - p) is computed without cancellation, and so are its gradients."""
    likely, unlikely = np.array([-1e-6, -80.0, -0.5]), np.array([-60.0, -1e-5, -0.7])
    odds = lambda x: x - math.log(-math.expm1(x))
    expected = np.mean(
        [
            -a + 0.1 * math.log1p(math.exp(odds(b) - odds(a)))
            for a, b in zip(likely, unlikely, strict=True)
        ]
    )
    arrays = [to_device(x.astype(np.float32)) for x in (likely, unlikely)]
    loss, gradients = jax.jit(jax.value_and_grad(losses.orpo, argnums=(0, 1)))(*arrays)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    assert all(np.isfinite(x).all() for x in gradients)


def test_half_precision_is_computed_in_float32():
    rows = [to_device(x).astype(jnp.bfloat16) for x in SUMS]
    loss = losses.dpo(*rows)
    assert loss.dtype == jnp.float32
    np.testing.assert_array_equal(loss, losses.dpo(*(x.astype(jnp.float32) for x in rows)))
