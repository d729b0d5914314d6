"""Losses of sampled tokens against the equations of their papers, token by token in floats."""

import functools as ft
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from random_models import to_device
from scipy.special import log_softmax
from scipy.stats import entropy

import redcoast as rc
from redcoast import losses

RNG = np.random.default_rng(0)
BATCH, SEQ = 5, 7
NEW, OLD, REFERENCE = RNG.uniform(-3, -0.1, (3, BATCH, SEQ)).astype(np.float32)
ADVANTAGES = RNG.normal(size=BATCH).astype(np.float32)
MASK = np.arange(SEQ)[None] < np.array([[7], [3], [0], [5], [1]])
MASK[3, 1:3] = False  # what a tool wrote, between two turns
LENGTHS = MASK.sum(axis=1)


def of_token(at, clip, kl_weight, unbiased):
    row, _ = at
    advantage = float(ADVANTAGES[row])
    ratio = math.exp(float(NEW[at]) - float(OLD[at]))
    limited = min(max(ratio, 1 - clip[0]), 1 + clip[1])
    reference = math.exp(float(REFERENCE[at]) - float(NEW[at]))
    divergence = (reference - 1 - math.log(reference)) * (ratio if unbiased else 1)
    return -min(ratio * advantage, limited * advantage) + kl_weight * divergence


def token_losses(clip, kl_weight, unbiased=False):
    actual = np.zeros((BATCH, SEQ))
    for at in np.ndindex(BATCH, SEQ):
        actual[at] = of_token(at, clip, kl_weight, unbiased) if MASK[at] else 0
    return actual


AVERAGES = {
    "grpo": lambda x: np.mean(x.sum(axis=1) / np.maximum(LENGTHS, 1)),
    "dr_grpo": lambda x: np.mean(x.sum(axis=1)) / 9,
    "dapo": lambda x: x.sum() / LENGTHS.sum(),
}


@pytest.mark.few("0.0-False-grpo", "0.3-True-dr_grpo", "0.3-False-dapo")
@pytest.mark.parametrize("name", AVERAGES)
@pytest.mark.parametrize(("kl_weight", "unbiased"), [(0.0, False), (0.3, False), (0.3, True)])
def test_a_loss_is_that_of_the_equation(name, kl_weight, unbiased):
    """Values that a mask leaves out may be infinite or NaN, also for gradients."""
    clip = (0.2, 0.4)
    options = {"clip": clip, "kl_weight": kl_weight, "unbiased_kl": unbiased} | (
        {"max_tokens": 9} if name == "dr_grpo" else {}
    )
    padded = [np.where(MASK, x, fill) for x, fill in ((NEW, -np.inf), (OLD, np.nan))]
    reference = np.where(MASK, REFERENCE, np.inf) if kl_weight else None

    def loss(new, old, reference):
        return getattr(losses, name)(
            new,
            old,
            jnp.asarray(ADVANTAGES),
            mask=jnp.asarray(MASK),
            reference_log_probs=reference,
            **options,
        )

    arrays = [None if x is None else to_device(x) for x in (*padded, reference)]
    actual, gradient = jax.jit(jax.value_and_grad(loss))(*arrays)
    np.testing.assert_allclose(
        actual, AVERAGES[name](token_losses(clip, kl_weight, unbiased)), rtol=1e-5
    )
    assert np.isfinite(gradient).all()
    assert not np.asarray(gradient)[~MASK].any()


def test_on_policy_the_gradient_is_that_of_the_policy_gradient():
    """Where the ratio is 1, nothing is clipped, and the gradient is minus the advantage."""
    new, mask = to_device(NEW), jnp.asarray(MASK)
    arguments = {"mask": mask, "max_tokens": 1}
    of = lambda new: losses.dr_grpo(new, to_device(NEW), jnp.asarray(ADVANTAGES), **arguments)
    expected = -ADVANTAGES[:, None] * MASK / BATCH
    np.testing.assert_allclose(jax.jit(jax.grad(of))(new), expected, rtol=1e-6)


@pytest.mark.thorough
def test_tokens_may_have_advantages_of_their_own():
    each = jnp.broadcast_to(jnp.asarray(ADVANTAGES)[:, None], (BATCH, SEQ))
    loss = ft.partial(losses.grpo, to_device(NEW), to_device(OLD), mask=jnp.asarray(MASK))
    np.testing.assert_array_equal(loss(each), loss(jnp.asarray(ADVANTAGES)))


def test_an_empty_mask_gives_zero():
    nothing = jnp.zeros((BATCH, SEQ), bool)
    arrays = to_device(NEW), to_device(OLD), jnp.asarray(ADVANTAGES)
    assert losses.dapo(*arrays, mask=nothing) == 0
    assert losses.grpo(*arrays, mask=nothing) == 0


def test_advantages_compare_the_answers_of_a_group():
    rewards = RNG.normal(size=(3, 4)).astype(np.float32)
    rewards[1] = 0.5  # all equal
    scaled, centred = (losses.grpo_advantages(rewards, scale=x) for x in (True, False))
    others = losses.rloo_advantages(rewards)
    for at in np.ndindex(rewards.shape):
        group = [float(x) for x in rewards[at[0]]]
        mean = sum(group) / 4
        spread = math.sqrt(sum((x - mean) ** 2 for x in group) / 3)
        own = group.pop(at[1])
        np.testing.assert_allclose(scaled[at], (own - mean) / (spread + 1e-4), rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(centred[at], own - mean, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(others[at], own - sum(group) / 3, rtol=1e-5, atol=1e-6)


def test_estimates_have_the_divergence_as_their_mean():
    """Over all tokens, weighted by their probability; k2 has a bias, of third order."""
    logits = RNG.normal(size=(2, 50))
    logits[1] = logits[0] + 0.1 * logits[1]
    new, reference = log_softmax(logits, axis=1)
    expected = entropy(np.exp(new), np.exp(reference))
    arrays = [to_device(x.astype(np.float32)) for x in (new, reference)]
    means = {}
    for kind in ("k1", "k2", "k3"):
        estimates = np.asarray(losses.kl_estimate(*arrays, kind=kind), np.float64)
        means[kind] = np.sum(np.exp(new) * estimates)
        assert kind == "k1" or (estimates >= 0).all()
    np.testing.assert_allclose([means["k1"], means["k3"]], expected, rtol=1e-4)
    np.testing.assert_allclose(means["k2"], expected, rtol=0.1)


def test_reverse_kl_is_the_divergence_of_the_student_from_the_teacher():
    student, teacher = RNG.normal(size=(2, 4, 3, 11)).astype(np.float32) * 3
    student[0, 0, :4] = -np.inf  # tokens that a student with constraints cannot write
    with np.errstate(invalid="ignore", divide="ignore"):
        logs = log_softmax(teacher.astype(np.float64), axis=-1)
        own = np.exp(log_softmax(student.astype(np.float64), axis=-1))
        expected = np.asarray(entropy(own, np.exp(logs), axis=-1))
    mask = RNG.random((4, 3)) < 0.6
    arrays = to_device(student), to_device(teacher)
    np.testing.assert_allclose(losses.reverse_kl(*arrays), expected.mean(), rtol=1e-5)
    of = jax.jit(jax.value_and_grad(ft.partial(losses.reverse_kl, mask=jnp.asarray(mask)), (0, 1)))
    actual, (gradient, constant) = of(*arrays)
    np.testing.assert_allclose(actual, expected[mask].mean(), rtol=1e-5)
    assert np.isfinite(gradient).all()
    assert not np.any(constant)


def test_losses_are_the_same_on_a_mesh():
    """Rows of a group may be on several devices."""
    mesh = rc.make_mesh()
    rows = lambda x: np.concatenate([x, x, x, x, x, x, x, x])
    arrays = {"log_probs": rows(NEW), "old_log_probs": rows(OLD), "advantages": rows(ADVANTAGES)}
    arrays["mask"] = rows(MASK)
    placed = jax.device_put(arrays, rc.batch_shardings(arrays, mesh))
    actual = jax.jit(lambda x: losses.dapo(**x))(placed)
    np.testing.assert_allclose(actual, AVERAGES["dapo"](token_losses((0.2, 0.28), 0)), rtol=1e-5)


@pytest.mark.thorough
def test_a_ratio_that_overflows_has_a_gradient_of_zero_where_it_is_clipped():
    """A token that the old policy, as another engine computes it, could hardly write."""
    old = jnp.full((1, 2), -200.0)
    for advantage in (1.0, 0.0):
        loss = ft.partial(losses.grpo, mask=jnp.ones((1, 2)))
        value, gradient = jax.value_and_grad(loss)(
            jnp.full((1, 2), -1.0), old, jnp.array([advantage])
        )
        assert value == jnp.float32(-1.2 * advantage)
        np.testing.assert_array_equal(gradient, 0)


@pytest.mark.thorough
@pytest.mark.parametrize("unbiased", [False, True])
def test_gradients_are_finite_however_unlikely_tokens_have_become(unbiased):
    """The norm of a gradient that is finite, but too large to be squared, is infinite too."""
    far, near = jnp.full((1, 2), -200.0), jnp.full((1, 2), -1.0)
    options = {"mask": jnp.ones((1, 2)), "kl_weight": 0.1, "unbiased_kl": unbiased}
    # A reference that is e^199 times as likely, and an unclipped ratio of e^199.
    for new, old, reference, sign in [(far, far, near, -1), (near, far, near, 1)]:
        loss = lambda new, old=old, reference=reference: losses.grpo(
            new, old, jnp.array([-1.0]), reference_log_probs=reference, **options
        )
        value, gradient = jax.value_and_grad(loss)(new)
        assert jnp.isfinite(value)
        assert jnp.isfinite(jnp.linalg.norm(gradient))
        np.testing.assert_array_equal(jnp.sign(gradient), sign)


@pytest.mark.thorough
def test_the_gradient_of_the_unbiased_divergence_is_exact():
    """It is the ratio times the difference of the log-probabilities, however large that is."""
    reference = jnp.array([[-0.001, -1.0, -3.0]])
    for gap in (0.5, 2.0, 20.0, 100.0):
        new = reference - gap
        loss = lambda new, reference=reference: losses.grpo(
            new,
            jax.lax.stop_gradient(new) - 0.1,
            jnp.zeros(1),
            mask=jnp.ones((1, 3)),
            reference_log_probs=reference,
            kl_weight=1.0,
            unbiased_kl=True,
        )
        expected = np.exp(0.1) * (np.float64(new) - np.float64(reference)) / 3
        np.testing.assert_allclose(jax.grad(loss)(new), expected, rtol=1e-4)
