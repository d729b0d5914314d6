"""Losses of a policy that is a language model, as functions of the log-probabilities of sampled
tokens, and advantages of groups of answers.

All logarithms are natural, and all sums are computed in float32 or wider.
"""

from collections.abc import Sequence
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Integer, PyTree, Real, Shaped

from ..core._errors import check_integer
from ._check_values import Number, at_least_float32, check_arrays, check_coefficient, known_number
from ._cross_entropy import mean_of_tokens

Mask = Bool[Array, "batch seq"] | Integer[Array, "batch seq"] | Float[Array, "batch seq"]
Advantages = Real[Array, " batch"] | Real[Array, "batch seq"]
Rewards = Shaped[Array | np.ndarray, "groups samples"]
LARGEST_LOG_RATIO = 30.0  # 1e13
Clip = Number | Sequence[Number]


def grpo(
    log_probs: Float[Array, "batch seq"],
    old_log_probs: Float[Array, "batch seq"],
    advantages: Advantages,
    *,
    mask: Mask,
    clip: Clip = 0.2,
    reference_log_probs: Float[Array, "batch seq"] | None = None,
    kl_weight: Number = 0.04,
    unbiased_kl: bool = False,
) -> Float[Array, ""]:
    """Computes the loss of group relative policy optimisation, equation 3 of Shao et al. (2024,
    <https://arxiv.org/abs/2402.03300>): the clipped objective of PPO, averaged over the tokens of
    each answer, and then over answers.

    The loss of a token is `-min(ratio * advantage, clip(ratio) * advantage)`, and the ratio is
    `exp(log_probs - old_log_probs)`.

    **Arguments:**

    - `log_probs`: the log-probabilities of the sampled tokens under the model.
    - `old_log_probs`: the same under the model that sampled them. Gradients do not flow into them.
    - `advantages`: the advantage of each answer, such as
        [`redcoast.losses.grpo_advantages`][], or of each token.
    - `mask`: 1 at tokens that the model wrote, and 0 at prompts, padding, and what an environment
        wrote, such as the result of a tool.
    - `clip`: the ratio of the probabilities is clipped to `1 - clip` and `1 + clip`; or a pair, by
        how much below and above 1.
    - `reference_log_probs`: the log-probabilities under a reference model. If given, the estimate
        `"k3"` of [`redcoast.losses.kl_estimate`][] is added to the loss of each token.
    - `kl_weight`: the weight of this estimate, beta in the paper.
    - `unbiased_kl`: whether to multiply the estimate by the ratio of the probabilities, so that its
        gradient is that of the divergence (DeepSeek-V3.2, 2025,
        <https://arxiv.org/abs/2512.02556>), the default of TRL. The paper does not.

    **Returns:**

    A scalar. An answer without tokens counts as 0. To average the losses of several batches, weight
    each by its number of answers, the default of `loss_fn`.

    **Raises:**

    `ValueError` if the shapes do not match or an option is out of range; `TypeError` if an argument
    has another type.

    !!! Example

        ```python
        from redcoast.losses import grpo, grpo_advantages

        rewards = jnp.array([[1.0, 0.0, 0.0, 1.0]])  # one prompt, four answers
        advantages = grpo_advantages(rewards).reshape(-1)
        log_probs = jnp.log(jnp.full((4, 6), 0.5))
        loss = grpo(log_probs, log_probs, advantages, mask=jnp.ones((4, 6)))
        ```
    """
    probs = log_probs, old_log_probs, reference_log_probs
    losses = _token_losses(*probs, advantages, mask, clip, kl_weight, unbiased_kl=unbiased_kl)
    counts = jnp.sum(mask.astype(bool), axis=1).astype(losses.dtype)
    # The mean of each answer first: a long answer counts as much as a short one.
    return jnp.mean(jnp.sum(losses, axis=1) / jnp.maximum(counts, 1))


def dr_grpo(
    log_probs: Float[Array, "batch seq"],
    old_log_probs: Float[Array, "batch seq"],
    advantages: Advantages,
    *,
    mask: Mask,
    max_tokens: int,
    clip: Clip = 0.2,
    reference_log_probs: Float[Array, "batch seq"] | None = None,
    kl_weight: Number = 0.04,
    unbiased_kl: bool = False,
) -> Float[Array, ""]:
    """Computes the loss of Dr. GRPO, section 3.2 of Liu et al. (2025,
    <https://arxiv.org/abs/2503.20783>): the sum over the tokens of each answer is divided by a
    constant, so that long wrong answers are not preferred to short ones.

    **Arguments:**

    - `max_tokens`: the maximum number of tokens in an answer. With 1, the sums are not divided.
    - the others: see [`redcoast.losses.grpo`][]. The paper has the advantages of
        `grpo_advantages(rewards, scale=False)`.

    **Returns:**

    A scalar, the mean over answers.

    **Raises:**

    `ValueError` if the shapes do not match or an option is out of range; `TypeError` if an argument
    has another type.

    !!! Example

        ```python
        from redcoast.losses import dr_grpo, grpo_advantages

        rewards = jnp.array([[1.0, 0.0, 0.0, 1.0]])
        advantages = grpo_advantages(rewards, scale=False).reshape(-1)
        log_probs = jnp.log(jnp.full((4, 6), 0.5))
        loss = dr_grpo(log_probs, log_probs, advantages, mask=jnp.ones((4, 6)), max_tokens=6)
        ```
    """
    check_integer("max_tokens", max_tokens)
    probs = log_probs, old_log_probs, reference_log_probs
    losses = _token_losses(*probs, advantages, mask, clip, kl_weight, unbiased_kl=unbiased_kl)
    # Divided by a constant: the mean of an answer would make long wrong answers cheap.
    return jnp.mean(jnp.sum(losses, axis=1)) / max_tokens


def dapo(
    log_probs: Float[Array, "batch seq"],
    old_log_probs: Float[Array, "batch seq"],
    advantages: Advantages,
    *,
    mask: Mask,
    clip: Clip = (0.2, 0.28),
    reference_log_probs: Float[Array, "batch seq"] | None = None,
    kl_weight: Number = 0.04,
    unbiased_kl: bool = False,
) -> Float[Array, ""]:
    """Computes the loss of DAPO, equation 8 of Yu et al. (2025,
    <https://arxiv.org/abs/2503.14476>): the mean over all tokens of the batch, and a clip that is
    wider above 1 than below.

    **Arguments:**

    - see [`redcoast.losses.grpo`][]. The paper has no reference model.

    **Returns:**

    A scalar; 0 if the mask is all 0. To average the losses of several batches, weight each by
    `jnp.sum(mask)`; a `loss_fn` returns this weight as `{"weight": ...}`.

    **Raises:**

    `ValueError` if the shapes do not match or an option is out of range; `TypeError` if an argument
    has another type.

    !!! Example

        ```python
        from redcoast.losses import dapo, grpo_advantages

        rewards = jnp.array([[1.0, 0.0, 0.0, 1.0]])
        advantages = grpo_advantages(rewards).reshape(-1)
        log_probs = jnp.log(jnp.full((4, 6), 0.5))
        loss = dapo(log_probs, log_probs, advantages, mask=jnp.ones((4, 6)))
        ```
    """
    probs = log_probs, old_log_probs, reference_log_probs
    losses = _token_losses(*probs, advantages, mask, clip, kl_weight, unbiased_kl=unbiased_kl)
    # Over all tokens at once, so that a long answer counts more than a short one.
    return jnp.sum(losses) / jnp.maximum(jnp.sum(mask.astype(bool)).astype(losses.dtype), 1)


def grpo_advantages(
    rewards: Rewards, *, scale: bool = True, epsilon: Number = 1e-4
) -> Float[Array, "groups samples"]:
    """Computes by how much each answer is better than the mean of its group (section 4.1.2 of Shao
    et al., 2024, <https://arxiv.org/abs/2402.03300>).

    **Arguments:**

    - `rewards`: the rewards of several answers to each prompt.
    - `scale`: whether to divide by the standard deviation of the group (with `samples - 1` in its
        denominator, as in TRL); false for Dr. GRPO.
    - `epsilon`: added to the standard deviation.

    **Returns:**

    The advantages. They are 0 in a group whose answers have equal rewards.

    **Raises:**

    `ValueError` if there are fewer than two answers to each prompt, or if `epsilon` is not
    positive; `TypeError` if an argument has another type.

    !!! Example

        ```python
        from redcoast.losses import grpo_advantages

        advantages = grpo_advantages(jnp.array([[1.0, 0.0, 0.0, 1.0]]))
        ```
    """
    rewards = _check_rewards(rewards)
    check_coefficient("epsilon", epsilon, above=0)
    centred = rewards - jnp.mean(rewards, axis=1, keepdims=True)  # (groups, samples)
    if not scale:
        return centred
    # Groups of all easy or all hard prompts have small deviations, and get large weights.
    return centred / (jnp.std(rewards, axis=1, keepdims=True, ddof=1) + epsilon)


def rloo_advantages(rewards: Rewards) -> Float[Array, "groups samples"]:
    """Computes by how much each answer is better than the mean of the others of its group, the
    baseline of REINFORCE leave-one-out (RLOO, Ahmadian et al., 2024,
    <https://arxiv.org/abs/2402.14740>).

    **Arguments:**

    - `rewards`: the rewards of several answers to each prompt.

    **Returns:**

    The advantages. The gradient of `dr_grpo(..., max_tokens=1)` with them is that of RLOO.

    **Raises:**

    `ValueError` if there are fewer than two answers to each prompt; `TypeError` if an argument has
    another type.

    !!! Example

        ```python
        from redcoast.losses import rloo_advantages

        advantages = rloo_advantages(jnp.array([[1.0, 0.0, 0.0, 1.0]]))
        ```
    """
    rewards = _check_rewards(rewards)
    others = jnp.sum(rewards, axis=1, keepdims=True) - rewards  # the sum of the other answers
    return rewards - others / (rewards.shape[1] - 1)


def kl_estimate(
    log_probs: Float[Array, "*batch"],
    reference_log_probs: Float[Array, "*batch"],
    *,
    kind: Literal["k1", "k2", "k3"] = "k3",
) -> Float[Array, "*batch"]:
    """Estimates the divergence KL(model, reference) from tokens that the model sampled (Schulman,
    2020, <http://joschu.net/blog/kl-approx.html>).

    With r the probability of a token under the reference divided by that under the model:

    - `"k1"`: -log r. Without bias, but negative for about half of the tokens.
    - `"k2"`: (log r)^2 / 2. Never negative, with little variance and a small bias.
    - `"k3"`: r - 1 - log r. Never negative, and without bias. From r = e^30 on it is a tangent, so
        that its gradient is finite.

    **Arguments:**

    - `log_probs`, `reference_log_probs`: the log-probabilities of the sampled tokens, in nats.
    - `kind`: the estimator.

    **Returns:**

    The estimate of each token, in float32 or wider.

    **Raises:**

    `ValueError` if the shapes differ or there is no such estimator; `TypeError` if an argument has
    another type.

    !!! Example

        ```python
        from redcoast.losses import kl_estimate

        estimates = kl_estimate(jnp.log(jnp.array([0.5, 0.2])), jnp.log(jnp.array([0.4, 0.3])))
        ```
    """
    check_arrays(log_probs=log_probs, reference_log_probs=reference_log_probs)
    if log_probs.shape != reference_log_probs.shape:
        raise ValueError(
            f"`log_probs` has shape {log_probs.shape}, but `reference_log_probs` has shape "
            f"{reference_log_probs.shape}. They must have the same shape."
        )
    log_ratios = at_least_float32(reference_log_probs) - at_least_float32(log_probs)  # log r
    if kind == "k1":
        return -log_ratios
    if kind == "k2":
        return log_ratios**2 / 2
    if kind == "k3":
        at_most, beyond = _split_log_ratios(log_ratios)
        # `exp(x) - 1` would lose the digits of small differences.
        return jnp.expm1(at_most) + jnp.exp(at_most) * beyond - log_ratios
    raise ValueError(f"`kind` is {kind!r}, but must be 'k1', 'k2' or 'k3'.")


def _split_log_ratios(log_ratios: Array) -> tuple[Array, Array]:
    """Log-ratios up to a limit, and what exceeds it.

    The exponential of larger ones, or the square of its gradient in a norm, would be infinite.
    """
    at_most = jnp.minimum(log_ratios, LARGEST_LOG_RATIO)
    return at_most, log_ratios - at_most


def reverse_kl(
    logits: Float[Array, "*batch vocab"],
    teacher_logits: Float[Array, "*batch vocab"],
    *,
    mask: Bool[Array, "*batch"] | Integer[Array, "*batch"] | Float[Array, "*batch"] | None = None,
) -> Float[Array, ""]:
    """Computes the mean divergence KL(student, teacher) of the next token, for on-policy
    distillation: on answers that the student sampled, the teacher grades each token (Agarwal et
    al., 2023, <https://arxiv.org/abs/2306.13649>).

    The sum over the vocabulary is exact, unlike [`redcoast.losses.kl_estimate`][], which needs the
    log-probabilities of the sampled tokens only.

    **Arguments:**

    - `logits`, `teacher_logits`: the logits of the student and of the teacher for each token.
        Gradients do not flow into those of the teacher.
    - `mask`: 1 at tokens that count and 0 at tokens to ignore; or weights of the mean.

    **Returns:**

    A scalar, in nats and in float32 or wider. If the mask is all 0, it is 0.

    **Raises:**

    `ValueError` if the shapes do not match; `TypeError` if an argument has another type.

    !!! Example

        ```python
        from redcoast.losses import reverse_kl

        student, teacher = jax.random.normal(jax.random.key(0), (2, 4, 6, 32))
        loss = reverse_kl(student, teacher, mask=jnp.ones((4, 6)))
        ```
    """
    check_arrays(logits=logits, teacher_logits=teacher_logits)
    if mask is not None:
        check_arrays(mask=mask)
    if logits.shape != teacher_logits.shape or (
        mask is not None and mask.shape != logits.shape[:-1]
    ):
        of_mask = ""
        if mask is not None:
            of_mask = f" and `mask` has shape {mask.shape}"
        raise ValueError(
            f"`logits` has shape {logits.shape}, so `teacher_logits` must have the same shape, and "
            f"`mask` the shape {logits.shape[:-1]}; but `teacher_logits` has shape "
            f"{teacher_logits.shape}{of_mask}."
        )
    student = jax.nn.log_softmax(at_least_float32(logits))  # (*batch, vocab)
    teacher = jax.lax.stop_gradient(jax.nn.log_softmax(at_least_float32(teacher_logits)))
    # A token that the student cannot write adds nothing, whatever the teacher says of it.
    possible = student > -jnp.inf
    gaps = jnp.where(possible, student, 0) - jnp.where(possible, teacher, 0)
    divergences = jnp.sum(jnp.exp(student) * gaps, axis=-1)  # (*batch,)
    return mean_of_tokens(divergences, mask)


def _token_losses(
    log_probs: Array,
    old_log_probs: Array,
    reference_log_probs: Array | None,
    advantages: Array,
    mask: PyTree,
    clip: Clip,
    kl_weight: Number,
    *,
    unbiased_kl: bool,
) -> Float[Array, "batch seq"]:
    """The clipped objective of each token, with the estimate of its divergence; 0 where masked."""
    others = {"old_log_probs": old_log_probs, "mask": mask}
    if reference_log_probs is not None:
        others["reference_log_probs"] = reference_log_probs
    check_arrays(log_probs=log_probs, advantages=advantages, **others)
    shape = log_probs.shape
    if len(shape) != 2 or shape[0] == 0:
        raise ValueError(
            f"`log_probs` must have the shape (batch, seq), with at least one row, but has {shape}."
        )
    for name, x in others.items():
        if x.shape != shape:
            raise ValueError(f"`{name}` has shape {x.shape}, but `log_probs` has shape {shape}.")
    if advantages.shape not in (shape, shape[:1]):
        raise ValueError(
            f"`advantages` has shape {advantages.shape}, but must have one number for each answer, "
            f"{shape[:1]}, or for each token, {shape}."
        )
    below, above = _clip_bounds(clip)
    check_coefficient("kl_weight", kl_weight, least=0)
    counts = mask.astype(bool)  # (batch, seq)
    # Masked before the exponential: what is masked may be infinite or NaN.
    new = jnp.where(counts, at_least_float32(log_probs), 0)
    old = jnp.where(counts, at_least_float32(old_log_probs), 0)
    log_ratios = new - jax.lax.stop_gradient(old)  # (batch, seq)
    at_most, beyond = _split_log_ratios(log_ratios)
    ratios = jnp.exp(at_most) * (1 + beyond)  # a tangent beyond the limit
    gains = jax.lax.stop_gradient(at_least_float32(advantages))
    if gains.ndim == 1:  # of each sequence
        gains = gains[:, None]
    gains = jnp.broadcast_to(gains, ratios.shape)  # (batch, seq)
    # Clipped where the policy got better only: otherwise the gradient would be lost.
    is_clipped = jnp.where(gains >= 0, ratios > 1.0 + above, ratios < 1.0 - below)
    limits = jnp.where(gains >= 0, 1.0 + above, 1.0 - below).astype(ratios.dtype)
    losses = -jnp.where(is_clipped, limits, ratios) * gains
    if reference_log_probs is not None:
        reference = jnp.where(counts, at_least_float32(reference_log_probs), 0)
        reference = jax.lax.stop_gradient(reference)
        # Of sampled tokens, so that no logits of the whole vocabulary are needed.
        estimates = kl_estimate(new, reference)
        if unbiased_kl:
            # Tokens were sampled by the old policy: the ratio makes the estimate one of the new
            # policy. If the reference is more likely, the product loses its gradient to rounding:
            # there, the part that does not depend on the new policy is a constant.
            at_most, beyond = _split_log_ratios(reference - old)
            gaps = reference - new
            of_likely = jnp.exp(at_most) * (1 + beyond) - ratios * (1 + gaps)
            estimates = jnp.where(gaps > 1, of_likely, ratios * estimates)
        losses = losses + kl_weight * estimates
    return jnp.where(counts, losses, 0)


def _clip_bounds(clip: Clip) -> tuple[Number, Number]:
    """By how much a ratio may be below and above 1."""
    # DAPO clips less above, so that unlikely tokens can become likely.
    if isinstance(clip, Sequence):
        bounds = tuple(clip)
    else:
        bounds = (clip, clip)
    if len(bounds) != 2:
        raise ValueError(f"`clip` has {len(bounds)} numbers, but must be one number or a pair.")
    below, above = (known_number("clip", bound) for bound in bounds)
    is_below_right = below is None or 0 < below <= 1
    is_above_right = above is None or above > 0
    if not (is_below_right and is_above_right):
        raise ValueError(
            f"`clip` is {clip}, but must be positive, and at most 1 below: the ratio of two "
            "probabilities is never negative."
        )
    return bounds


def _check_rewards(rewards: PyTree) -> Float[Array, "groups samples"]:
    check_arrays(rewards=rewards)
    if rewards.ndim != 2 or rewards.shape[1] < 2:
        raise ValueError(
            "`rewards` must have the shape (groups, samples) with at least two samples, so that "
            f"the answers to a prompt can be compared; but it has shape {rewards.shape}."
        )
    return at_least_float32(jnp.asarray(rewards))
