"""Losses of preferences, as functions of the log-probabilities of whole answers.

All logarithms are natural, and all results are means in float32 or wider.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Integer, PyTree

from ._check_values import Number, at_least_float32, check_arrays, check_coefficient, known_number


def dpo(
    chosen: Float[Array, " pairs"],
    rejected: Float[Array, " pairs"],
    reference_chosen: Float[Array, " pairs"],
    reference_rejected: Float[Array, " pairs"],
    *,
    beta: Number = 0.1,
    label_smoothing: Number = 0.0,
) -> Float[Array, ""]:
    """Computes the loss of direct preference optimisation, equation 7 of Rafailov et al. (2023,
    <https://arxiv.org/abs/2305.18290>).

    The loss of a pair is `-log_sigmoid(beta * margin)`, with `margin = (chosen - reference_chosen)
    - (rejected - reference_rejected)`.

    **Arguments:**

    - `chosen`, `rejected`: the log-probability of the better and of the worse answer of each pair
        under the model: the sum over the tokens of the answer, in nats.
    - `reference_chosen`, `reference_rejected`: the same under the reference model. They are
        constants: gradients do not flow into them.
    - `beta`: how strongly the model is kept near the reference.
    - `label_smoothing`: the probability that a label is wrong, from 0 up to 0.5 (conservative DPO,
        Mitchell, 2023, <https://ericmitchell.ai/cdpo.pdf>).

    **Returns:**

    A scalar, the mean over pairs.

    **Raises:**

    `ValueError` if the shapes differ or an option is out of range; `TypeError` if an argument has
    another type.

    !!! Example

        ```python
        from redcoast.losses import dpo

        loss = dpo(
            chosen=jnp.array([-12.0, -9.0]),
            rejected=jnp.array([-11.0, -14.0]),
            reference_chosen=jnp.array([-12.5, -9.5]),
            reference_rejected=jnp.array([-10.5, -13.0]),
        )
        ```
    """
    check_coefficient("beta", beta, above=0)
    smoothing = known_number("label_smoothing", label_smoothing)
    if smoothing is not None and not 0 <= smoothing < 0.5:
        raise ValueError(
            f"`label_smoothing` is {smoothing}, but must be at least 0 and less than 0.5."
        )
    margins = beta * _margins(chosen, rejected, reference_chosen, reference_rejected)  # (pairs,)
    # The losses if the label is right and if it is wrong, without cancellation.
    right, wrong = -jax.nn.log_sigmoid(margins), -jax.nn.log_sigmoid(-margins)
    return jnp.mean((1 - label_smoothing) * right + label_smoothing * wrong)


def ipo(
    chosen: Float[Array, " pairs"],
    rejected: Float[Array, " pairs"],
    reference_chosen: Float[Array, " pairs"],
    reference_rejected: Float[Array, " pairs"],
    *,
    beta: Number = 0.1,
) -> Float[Array, ""]:
    """Computes the loss of identity preference optimisation, equation 17 of Azar et al. (2023,
    <https://arxiv.org/abs/2310.12036>).

    The loss of a pair is `(margin - 1 / (2 * beta))**2`, with the margin of
    [`redcoast.losses.dpo`][].

    **Arguments:**

    - `chosen`, `rejected`, `reference_chosen`, `reference_rejected`: see
        [`redcoast.losses.dpo`][], but the mean over the tokens of each answer. The authors of the
        paper recommend the mean, and TRL has it too. With sums, long answers dominate the loss.
    - `beta`: the regularisation, tau in the paper. The margin between the answers is pulled to
        `1 / (2 * beta)`.

    **Returns:**

    A scalar, the mean over pairs.

    **Raises:**

    `ValueError` if the shapes differ or `beta` is not positive; `TypeError` if an argument has
    another type.

    !!! Example

        ```python
        from redcoast.losses import ipo

        loss = ipo(
            chosen=jnp.array([-1.2, -0.9]),
            rejected=jnp.array([-1.1, -1.4]),
            reference_chosen=jnp.array([-1.3, -1.0]),
            reference_rejected=jnp.array([-1.0, -1.3]),
        )
        ```
    """
    check_coefficient("beta", beta, above=0)
    margins = _margins(chosen, rejected, reference_chosen, reference_rejected)
    # A square has its minimum at a finite margin, while the loss of DPO falls with any larger one.
    return jnp.mean((margins - 1 / (2 * beta)) ** 2)


def kto(
    answers: Float[Array, " answers"],
    reference_answers: Float[Array, " answers"],
    desirable: Bool[Array, " answers"] | Integer[Array, " answers"] | Float[Array, " answers"],
    *,
    unrelated: Float[Array, " others"],
    reference_unrelated: Float[Array, " others"],
    beta: Number = 0.1,
    desirable_weight: Number = 1.0,
    undesirable_weight: Number = 1.0,
) -> Float[Array, ""]:
    """Computes the loss of Kahneman-Tversky optimisation, section 4 of Ethayarajh et al. (2024,
    <https://arxiv.org/abs/2402.01306>), for answers that are not in pairs.

    The loss of an answer is `weight * (1 - sigmoid(beta * (answer - reference_answer - z0)))`, with
    the sign of the argument reversed for an undesirable one.

    **Arguments:**

    - `answers`, `reference_answers`: the log-probability of each answer under the model and the
        reference: the sum over its tokens, in nats.
    - `desirable`: whether each answer is a good one: booleans, or numbers above 0 for good answers.
    - `unrelated`, `reference_unrelated`: the log-probabilities of answers to other prompts, usually
        the answers of the batch, shifted by one row. From them, the divergence from the reference
        (z0) is estimated, which is a constant in the loss, and at least 0.
    - `beta`: how strongly the model is kept near the reference.
    - `desirable_weight`, `undesirable_weight`: the weights of good and bad answers. The paper
        recommends weights that make up for unequal numbers.

    **Returns:**

    A scalar, the mean over answers.

    **Raises:**

    `ValueError` if the shapes differ or an option is out of range; `TypeError` if an argument has
    another type.

    !!! Example

        ```python
        from redcoast.losses import kto

        loss = kto(
            answers=jnp.array([-12.0, -9.0, -20.0]),
            reference_answers=jnp.array([-12.5, -9.5, -18.0]),
            desirable=jnp.array([True, True, False]),
            unrelated=jnp.array([-40.0, -35.0]),
            reference_unrelated=jnp.array([-39.0, -36.0]),
        )
        ```
    """
    check_coefficient("beta", beta, above=0)
    check_coefficient("desirable_weight", desirable_weight, least=0)
    check_coefficient("undesirable_weight", undesirable_weight, least=0)
    _check_shapes(answers=answers, reference_answers=reference_answers, desirable=desirable)
    _check_shapes(unrelated=unrelated, reference_unrelated=reference_unrelated)
    # Labels of bad answers may be -1, which would be true.
    is_good = at_least_float32(desirable) > 0
    ratios = at_least_float32(answers) - jax.lax.stop_gradient(at_least_float32(reference_answers))
    divergence = jnp.mean(at_least_float32(unrelated) - at_least_float32(reference_unrelated))
    # A divergence is not negative, and an estimate of it may be. The paper does not differentiate
    # it.
    divergence = jax.lax.stop_gradient(jnp.maximum(divergence, 0))
    gains = beta * (ratios - divergence)
    values = jax.nn.sigmoid(jnp.where(is_good, gains, -gains))  # (answers,), from 0 to 1
    weights = jnp.where(is_good, desirable_weight, undesirable_weight).astype(values.dtype)
    return jnp.mean(weights * (1 - values))


def orpo(
    chosen: Float[Array, " pairs"], rejected: Float[Array, " pairs"], *, weight: Number = 0.1
) -> Float[Array, ""]:
    """Computes the loss of odds ratio preference optimisation, equations 6 and 7 of Hong et al.
    (2024, <https://arxiv.org/abs/2403.07691>). It needs no reference model.

    The loss of a pair is `-chosen - weight * log_sigmoid(log_odds(chosen) - log_odds(rejected))`,
    with `log_odds(x) = x - log(1 - exp(x))`.

    **Arguments:**

    - `chosen`, `rejected`: the log-probability of the better and of the worse answer of each pair
        under the model: the mean over the tokens of the answer, in nats. A probability of 1 or
        more, as by rounding, counts as the largest one below 1.
    - `weight`: the weight of the odds ratio, lambda in the paper (`beta` in TRL). The loss of
        fine-tuning on the better answers has weight 1.

    **Returns:**

    A scalar, the mean over pairs.

    **Raises:**

    `ValueError` if the shapes differ or `weight` is negative; `TypeError` if an argument has
    another type.

    !!! Example

        ```python
        from redcoast.losses import orpo

        loss = orpo(jnp.array([-1.2, -0.9]), jnp.array([-1.1, -1.4]))
        ```
    """
    check_coefficient("weight", weight, least=0)
    _check_shapes(chosen=chosen, rejected=rejected)
    chosen, rejected = at_least_float32(chosen), at_least_float32(rejected)
    log_odds = (chosen - _log_complement(chosen)) - (rejected - _log_complement(rejected))
    return jnp.mean(-chosen - weight * jax.nn.log_sigmoid(log_odds))


def simpo(
    chosen: Float[Array, " pairs"],
    rejected: Float[Array, " pairs"],
    *,
    beta: Number = 2.0,
    gamma: Number = 1.0,
) -> Float[Array, ""]:
    """Computes the loss of simple preference optimisation, equation 6 of Meng et al. (2024,
    <https://arxiv.org/abs/2405.14734>). It needs no reference model.

    The loss of a pair is `-log_sigmoid(beta * (chosen - rejected) - gamma)`.

    **Arguments:**

    - `chosen`, `rejected`: the log-probability of the better and of the worse answer of each pair
        under the model: the mean over the tokens of the answer, in nats.
    - `beta`: the factor of the log-probabilities.
    - `gamma`: the margin by which the better answer should win, at least 0.

    **Returns:**

    A scalar, the mean over pairs.

    **Raises:**

    `ValueError` if the shapes differ or an option is out of range; `TypeError` if an argument has
    another type.

    !!! Example

        ```python
        from redcoast.losses import simpo

        loss = simpo(jnp.array([-1.2, -0.9]), jnp.array([-1.1, -1.4]))
        ```
    """
    check_coefficient("beta", beta, above=0)
    check_coefficient("gamma", gamma, least=0)
    _check_shapes(chosen=chosen, rejected=rejected)
    return -jnp.mean(
        jax.nn.log_sigmoid(beta * (at_least_float32(chosen) - at_least_float32(rejected)) - gamma)
    )


def bradley_terry(
    chosen: Float[Array, " pairs"], rejected: Float[Array, " pairs"]
) -> Float[Array, ""]:
    """Computes the loss of a reward model, equation 1 of Ouyang et al. (2022,
    <https://arxiv.org/abs/2203.02155>): the better answer should have the higher reward.

    **Arguments:**

    - `chosen`, `rejected`: the rewards of the better and of the worse answer of each pair.

    **Returns:**

    A scalar, the mean over pairs.

    **Raises:**

    `ValueError` if the shapes differ; `TypeError` if an argument has another type.

    !!! Example

        ```python
        from redcoast.losses import bradley_terry

        loss = bradley_terry(jnp.array([1.3, 0.2]), jnp.array([0.4, 0.5]))
        ```
    """
    _check_shapes(chosen=chosen, rejected=rejected)
    # Only differences count: the rewards of all answers may move together.
    return -jnp.mean(jax.nn.log_sigmoid(at_least_float32(chosen) - at_least_float32(rejected)))


def _margins(
    chosen: PyTree, rejected: PyTree, reference_chosen: PyTree, reference_rejected: PyTree
) -> Float[Array, " pairs"]:
    """By how much the model prefers the better answer more than the reference does."""
    _check_shapes(
        chosen=chosen,
        rejected=rejected,
        reference_chosen=reference_chosen,
        reference_rejected=reference_rejected,
    )
    # The reference is a constant, also if it is the same model.
    reference = jax.lax.stop_gradient(
        at_least_float32(reference_chosen) - at_least_float32(reference_rejected)
    )
    return at_least_float32(chosen) - at_least_float32(rejected) - reference


def _log_complement(log_probs: Float[Array, " pairs"]) -> Float[Array, " pairs"]:
    """Returns log(1 - exp(x)) for negative x, without cancellation at either end (Mächler, 2012,
    <https://cran.r-project.org/web/packages/Rmpfr/vignettes/log1mexp-note.pdf>)."""
    # A probability that is rounded to 1 is taken as one below it, and has the gradient there, since
    # the logarithm of 0 has none.
    largest = -jnp.finfo(log_probs.dtype).eps
    # Zero is added elsewhere, also to the logarithm of 0.
    excess = jnp.where(log_probs > largest, log_probs - largest, 0)
    log_probs -= jax.lax.stop_gradient(excess)
    near = log_probs > -np.log(2)  # probabilities above one half
    # Each branch gets an argument that it is finite for, so that gradients are finite too.
    small = jnp.log(-jnp.expm1(jnp.where(near, log_probs, -1)))
    large = jnp.log1p(-jnp.exp(jnp.where(near, -1, log_probs)))
    return jnp.where(near, small, large)


def _check_shapes(**arrays: PyTree) -> None:
    check_arrays(**arrays)
    shapes = {name: x.shape for name, x in arrays.items()}
    first = next(iter(shapes.values()))
    differ = any(shape != first for shape in shapes.values())
    if len(first) != 1 or first == (0,) or differ:
        listed = ", ".join(f"`{name}` {shape}" for name, shape in shapes.items())
        raise ValueError(
            "There must be one number for each answer, in arrays of one dimension and of the same "
            f"size; but the shapes are: {listed}."
        )
