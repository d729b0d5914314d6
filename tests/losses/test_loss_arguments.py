"""What losses take and refuse: labels and rewards of other dtypes, lists, no rows, wrong logits."""

import functools as ft
import inspect
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from redcoast import losses

LOGITS = jax.random.normal(jax.random.key(0), (3, 5, 7))
HIDDEN = jax.random.normal(jax.random.key(1), (3, 5, 4))
HEAD = jax.random.normal(jax.random.key(2), (4, 7))
TARGETS = jax.random.randint(jax.random.key(3), (3, 5), 0, 7)
PROBS = -jax.random.uniform(jax.random.key(4), (4, 6))
SUMS = -jax.random.uniform(jax.random.key(5), (4, 4), minval=1, maxval=9)
REAL = jnp.ones((4, 6), bool)
NAMES = ("chosen", "rejected", "reference_chosen", "reference_rejected")


@pytest.mark.parametrize("vocab", [pytest.param(1, marks=pytest.mark.thorough), 1009])
@pytest.mark.parametrize(
    "chunk", [3, *(pytest.param(n, marks=pytest.mark.thorough) for n in (1, 11, 1000))]
)
def test_chunks_of_odd_sizes_have_the_loss_and_gradients_of_optax_in_float64(vocab, chunk):
    with jax.enable_x64(True):
        hidden = jax.random.normal(jax.random.key(0), (3, 11, 6), jnp.float64)
        head = jax.random.normal(jax.random.key(1), (6, vocab), jnp.float64)
        targets = jax.random.randint(jax.random.key(2), (3, 11), 0, vocab)
        mask = jax.random.uniform(jax.random.key(3), (3, 11)) > 0.4

        def loss(hidden, head):
            unembed = lambda hidden: hidden @ head
            return losses.chunked_cross_entropy(hidden, unembed, targets, mask=mask, chunk=chunk)

        def reference(hidden, head):
            each = optax.softmax_cross_entropy_with_integer_labels(hidden @ head, targets)
            return jnp.sum(jnp.where(mask, each, 0)) / jnp.sum(mask).astype(jnp.float64)

        results = (jax.value_and_grad(fn, (0, 1))(hidden, head) for fn in (loss, reference))
        same = ft.partial(np.testing.assert_allclose, rtol=1e-11, atol=1e-13)
        jax.tree.map(same, *results)


@pytest.mark.parametrize("dtype", [bool, np.int8, np.int32, np.float32])
def test_rewards_and_labels_may_be_of_any_dtype(dtype):
    rewards = np.array([[1, 0, 0, 1]])
    expected = losses.grpo_advantages(rewards.astype(np.float32))
    advantages = losses.grpo_advantages(rewards.astype(dtype))
    assert advantages.dtype == jnp.float32
    np.testing.assert_array_equal(advantages, expected)
    baseline = losses.rloo_advantages(rewards.astype(dtype))
    np.testing.assert_array_equal(baseline, losses.rloo_advantages(rewards.astype(np.float32)))
    mask = REAL.astype(dtype)
    assert losses.dapo(PROBS, PROBS, jnp.array([1, 0, -1, 1]), mask=mask).dtype == jnp.float32
    labels = jnp.array([True, False, True, False])
    rest: Any = {"unrelated": SUMS[2], "reference_unrelated": SUMS[3]}
    expected = losses.kto(SUMS[0], SUMS[1], labels, **rest)
    encodings = [labels.astype(dtype)]
    if dtype is not bool:
        encodings.append(jnp.where(labels, 1, -1).astype(dtype))  # -1 is no desirable answer
    for encoded in encodings:
        np.testing.assert_array_equal(losses.kto(SUMS[0], SUMS[1], encoded, **rest), expected)


def test_odds_of_a_probability_that_is_rounded_to_1_have_their_limit():
    rejected = jnp.array([-1.0])
    gradient = jax.grad(lambda chosen: losses.orpo(chosen, rejected, weight=0.5))
    odds = math.exp(-1) / (1 - math.exp(-1))
    for chosen in (0.0, 1e-7):  # rounding may exceed 1
        x = jnp.array([chosen], jnp.float32)
        np.testing.assert_allclose(losses.orpo(x, rejected, weight=0.5), 0, atol=1e-6)
        # The derivative of log(1 + odds (1 - p) / p) with respect to log p is -odds at p = 1.
        np.testing.assert_allclose(gradient(x), [-1 - 0.5 * odds], rtol=1e-5)
    of_rejected = jax.grad(lambda rejected: losses.orpo(rejected - 1, rejected))
    assert jnp.isfinite(of_rejected(jnp.zeros(1))).all()
    # The odds of an impossible answer are zero, and so is the loss of the ratio.
    np.testing.assert_allclose(losses.orpo(jnp.array([-1.0]), jnp.array([-jnp.inf])), 1)


def test_losses_of_no_tokens_are_0_with_a_mask_and_refused_without():
    unembed = lambda hidden: hidden @ HEAD
    for rows, columns in ((0, 5), (3, 0)):
        logits, targets = LOGITS[:rows, :columns], TARGETS[:rows, :columns]
        hidden, mask = HIDDEN[:rows, :columns], jnp.ones((rows, columns))
        assert losses.cross_entropy(logits, targets, mask=mask) == 0
        chunked = losses.chunked_cross_entropy(hidden, unembed, targets, mask=mask, chunk=2)
        assert chunked == 0
        scores = losses.token_log_probabilities(hidden, unembed, targets, chunk=2)
        assert scores.shape == (rows, columns)
        with pytest.raises(ValueError, match="There are no tokens to average"):
            losses.cross_entropy(logits, targets)
    with pytest.raises(ValueError, match="with at least one row"):
        losses.grpo(PROBS[:0], PROBS[:0], SUMS[0, :0], mask=REAL[:0])
    with pytest.raises(ValueError, match="one row and one column for each pair"):
        losses.pairwise_sigmoid(LOGITS[0, :0, :0])


LISTS: Any = {"logits": LOGITS.tolist(), "targets": TARGETS.tolist(), "mask": [1]}


@pytest.mark.parametrize(
    ("fn", "arguments", "says"),
    [
        (losses.cross_entropy, {"logits": LISTS["logits"]}, "`logits` is of type list"),
        (losses.cross_entropy, {"targets": LISTS["targets"]}, "`targets` is of type list"),
        (losses.cross_entropy, {"mask": [1]}, "`mask` is of type list"),
        (losses.cross_entropy, {"logits": TARGETS}, "`logits` must be floating-point numbers"),
        (losses.dpo, {"chosen": [1.0]}, "`chosen` is of type list"),
        (losses.dpo, {"beta": float("inf")}, "`beta` is inf. It must be a finite number"),
        (losses.dpo, {"beta": jnp.array(0.0)}, "`beta` is 0.0. It must be more than 0"),
        (losses.dpo, {"beta": jnp.ones(4)}, r"`beta` is of type jax.Array. .* of shape \(\) with"),
        (losses.dpo, {"beta": jnp.array(True)}, "`beta` is of type jax.Array. It must be a number"),
        (
            losses.dpo,
            {"label_smoothing": jnp.array(0.5)},
            "is 0.5, but must be at least 0 and",
        ),
        (
            losses.grpo_advantages,
            {"rewards": SUMS, "epsilon": 0},
            "`epsilon` is 0. It must be more than 0",
        ),
        (losses.grpo_advantages, {"rewards": [[1, 0]]}, "`rewards` is of type list"),
        (losses.grpo, {"mask": [1]}, "`mask` is of type list"),
        (losses.grpo, {"clip": (jnp.array(1.5), 0.2)}, "`clip` is .*, and at most 1 below"),
        (losses.grpo, {"clip": (0.1, 0.2, 0.3)}, "`clip` has 3 numbers, but must be one number or"),
        (losses.dr_grpo, {"max_tokens": 2.5}, "`max_tokens` is 2.5. It must be an integer"),
        (losses.reverse_kl, {"teacher_logits": [1.0]}, "`teacher_logits` is of type list"),
    ],
)
def test_wrong_arguments_are_named(fn, arguments, says):
    right: Any = {
        losses.cross_entropy: {"logits": LOGITS, "targets": TARGETS},
        losses.dpo: dict(zip(NAMES, SUMS, strict=True)),
        losses.grpo_advantages: {},
        losses.reverse_kl: {"logits": LOGITS},
    }
    tokens = {"log_probs": PROBS, "old_log_probs": PROBS, "advantages": SUMS[0], "mask": REAL}
    unchecked: Any = inspect.unwrap(fn)  # without the tests' own checks of types
    with pytest.raises((TypeError, ValueError), match=says):
        unchecked(**{**right.get(fn, tokens), **arguments})


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"hidden": HIDDEN[0], "targets": TARGETS[0]}, r"shape \(5, 4\), but must be \(batch, seq"),
        (
            {"unembed": lambda hidden: hidden[:, 0] @ HEAD},
            r"`unembed` returned an array of shape \(3, 7\) .* shape \(3, 5, 'width'\)",
        ),
    ],
)
def test_wrong_hidden_states_and_chunks_are_named(arguments, says):
    right: Any = {"hidden": HIDDEN, "unembed": lambda hidden: hidden @ HEAD, "targets": TARGETS}
    unchecked: Any = inspect.unwrap(losses.chunked_cross_entropy)
    with pytest.raises((TypeError, ValueError), match=says):
        unchecked(**{**right, **arguments})


COEFFICIENTS: dict[Any, dict[str, Any]] = {
    losses.dpo: {"beta": 0.3, "label_smoothing": 0.25},
    losses.ipo: {"beta": 0.3},
    losses.orpo: {"weight": 0.3},
    losses.simpo: {"beta": 0.3, "gamma": 0.5},
    losses.kto: {"beta": 0.3, "desirable_weight": 2.0, "undesirable_weight": 0.5},
    losses.grpo: {"clip": 0.25, "kl_weight": 0.5},
    losses.dapo: {"clip": (0.25, 0.5), "kl_weight": 0.5},
    losses.dr_grpo: {"kl_weight": 0.5},
    losses.grpo_advantages: {"epsilon": 0.25},
}


@pytest.mark.parametrize("fn", COEFFICIENTS)
def test_coefficients_may_be_arrays_that_a_schedule_computes(fn):
    rest: dict[Any, dict[str, Any]] = {
        losses.dpo: dict(zip(NAMES, SUMS, strict=True)),
        losses.ipo: dict(zip(NAMES, SUMS, strict=True)),
        losses.orpo: dict(zip(NAMES[:2], SUMS, strict=False)),
        losses.simpo: dict(zip(NAMES[:2], SUMS, strict=False)),
        losses.kto: {
            **dict(zip(("answers", "reference_answers"), SUMS, strict=False)),
            "desirable": SUMS[0] > -5,
            "unrelated": SUMS[2],
            "reference_unrelated": SUMS[3],
        },
        losses.grpo_advantages: {"rewards": SUMS},
    }
    tokens: dict[str, Any] = {"log_probs": PROBS, "old_log_probs": PROBS[::-1], "mask": REAL}
    tokens |= {"advantages": SUMS[0] + 5, "reference_log_probs": PROBS / 2}
    if fn is losses.dr_grpo:
        tokens["max_tokens"] = 6
    call = ft.partial(fn, **rest.get(fn, tokens))
    options = COEFFICIENTS[fn]
    expected = call(**options)
    arrays = jax.tree.map(jnp.asarray, options)
    np.testing.assert_allclose(call(**arrays), expected, rtol=1e-6)
    traced = jax.jit(lambda options: call(**options))
    np.testing.assert_allclose(traced(arrays), expected, rtol=1e-6)
