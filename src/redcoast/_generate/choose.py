"""Which token comes next, by logits: the likeliest, or one drawn from those left by filters."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

from .request import Request

# Stands where logits are NaN, so that it cannot be taken for a token.
INVALID = -1


def choose(
    logits: Float[Array, "batch vocab"], step: Int[Array, ""], request: Request
) -> Int[Array, " batch"]:
    """The next token of each row; `INVALID` where a logit is NaN."""
    logits = logits.astype(jnp.float32)
    if request.temperature is None:
        tokens = jnp.argmax(logits, axis=-1)
    else:
        assert request.key is not None
        tokens = draw(filter_logits(logits, request), request.key, step)
    # NaN counts as the greatest, and no filter removes it: it would be chosen.
    chosen = jnp.take_along_axis(logits, tokens[:, None], axis=1)[:, 0]
    return jnp.where(jnp.isnan(chosen), INVALID, tokens.astype(jnp.int32))


def draw(
    scores: Float[Array, "batch vocab"], key: PRNGKeyArray, step: Int[Array, ""]
) -> Int[Array, " batch"]:
    """One token for each row, from the softmax of its scores.

    Each row has its own key, so that its draws depend on the key, the step and its number alone.
    """
    rows = jnp.arange(scores.shape[0])
    keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(jax.random.fold_in(key, step), rows)
    return jax.vmap(jax.random.categorical)(keys, scores)


def filter_logits(
    logits: Float[Array, "batch vocab"], request: Request
) -> Float[Array, "batch vocab"]:
    """Logits over the temperature, with -inf at what `top_k`, and then `top_p`, leaves out."""
    scores = logits / request.temperature
    if request.top_k is not None and request.top_k < scores.shape[-1]:
        scores = keep_top_k(scores, request.top_k)
    return scores if request.tail is None else keep_top_p(scores, request.tail)


def keep_top_k(scores: Float[Array, "batch vocab"], k: int) -> Float[Array, "batch vocab"]:
    """Leaves out what scores less than the `k`-th; so ties with it all stay."""
    least = jax.lax.top_k(scores, k)[0][:, -1:]
    return jnp.where(scores < least, -jnp.inf, scores)


def keep_top_p(
    scores: Float[Array, "batch vocab"], tail: Float[Array, ""]
) -> Float[Array, "batch vocab"]:
    """Leaves out the least likely tokens, of together at most the probability `tail`
    (nucleus sampling, Holtzman et al., 2019, <https://arxiv.org/abs/1904.09751>).

    Of tokens that are equally likely, those of smaller numbers are left out first. One stays.
    """
    ascending = jnp.sort(scores, axis=-1)
    out = jnp.cumsum(jax.nn.softmax(ascending), axis=-1) <= tail
    count = jnp.sum(out[:, :-1], axis=-1, keepdims=True)
    least = jnp.take_along_axis(ascending, count, axis=-1)
    ties = scores == least
    out_of_ties = count - jnp.sum(scores < least, axis=-1, keepdims=True)
    out = (scores < least) | (ties & (jnp.cumsum(ties, axis=-1) <= out_of_ties))
    return jnp.where(out, -jnp.inf, scores)
