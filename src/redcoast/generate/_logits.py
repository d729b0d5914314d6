"""Choosing the next token from logits: greedily, or by sampling with top-k and top-p."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ._processors import History, process
from ._request import Count, Logits, Request, Rows, Scalar

# In place of tokens: if logits were NaN, and if all tokens were excluded.
INVALID = -1
ALL_EXCLUDED = -2
NO_TOKENS = (INVALID, ALL_EXCLUDED)

# An option for all rows, or one for each row.
Number = Scalar | Float[Array, "rows 1"]
Whole = int | Count | Int[Array, "rows 1"]


def choose_tokens(
    logits: Logits,
    history: History | None,
    step: Int[Array, ""],
    least: Int[Array, " rows_or_1"] | None,
    request: Request,
    *,
    rows: Rows | None = None,
) -> Rows:
    """Returns the next token of each row, or one of `NO_TOKENS`. `rows` are the numbers of the
    results, by default 0, 1, 2, ...."""
    scores = process(logits.astype(jnp.float32), history, step, least, request)  # (batch, vocab)
    if request.key is not None and request.temperature is not None:
        scores = filter_logits(
            scores, request.temperature, request.top_k, request.tail, request.min_p
        )
        # The argmax of logits plus Gumbel noise is a sample of the softmax (Gumbel, 1954).
        if rows is None:
            rows = jnp.arange(scores.shape[0])
        # The noise depends only on the key, the step and the number of the row.
        keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.fold_in(request.key, step), rows)
        of_row = lambda key: jax.random.gumbel(key, scores.shape[1:], jnp.float32)
        scores = scores + jax.vmap(of_row)(keys)
    return first_greatest(scores)


def first_greatest(scores: Logits) -> Rows:
    """Returns the first index of each row's maximum; `INVALID` for rows with NaN, and
    `ALL_EXCLUDED` for rows of -inf.

    Two plain reductions take a tenth of the time of `jnp.argmax` on CPU.
    """
    vocab = scores.shape[1]
    most = jnp.max(scores, axis=1)  # NaN for a row with NaN
    greatest = scores == most[:, None]
    first = jnp.min(jnp.where(greatest, jnp.arange(vocab, dtype=jnp.int32)[None], vocab), axis=1)
    first = jnp.where(most == -jnp.inf, ALL_EXCLUDED, first)
    return jnp.where(jnp.isnan(most), INVALID, first)


def filter_logits(
    logits: Logits,
    temperature: Number,
    top_k: Whole | None = None,
    tail: Number | None = None,
    min_p: Number | None = None,
) -> Logits:
    """Divides logits by the temperature, and sets those that `top_k`, then `top_p` and then `min_p`
    exclude to -inf."""
    # Differences to the greatest logit: divided by a small temperature, logits might be infinite.
    greatest = jnp.max(logits, axis=1, keepdims=True)  # (batch, 1)
    scores = (logits - jnp.where(jnp.isfinite(greatest), greatest, 0)) / temperature
    if top_k is not None:
        scores = keep_top_k(scores, top_k)
    if tail is not None:
        scores = keep_top_p(scores, tail)
    if min_p is not None:
        probabilities = jax.nn.softmax(scores)
        least = min_p * jnp.max(probabilities, axis=1, keepdims=True)  # (batch, 1)
        scores = jnp.where(probabilities < least, -jnp.inf, scores)
    # The filters would exclude a NaN with a negative sign, such as `inf - inf` on x86.
    return jnp.where(jnp.isnan(logits), logits, scores)


def keep_top_k(scores: Logits, k: Whole) -> Logits:
    """Excludes scores below the `k`-th highest. Ties with it are all kept, and all scores if there
    are no more than `k`.

    `k` may be traced, so that one program serves all values.
    """
    order = ordered_bits(scores)
    # At most `vocab - k` scores are below the k-th highest.
    most = jnp.asarray(scores.shape[1] - jnp.minimum(k, scores.shape[1]), jnp.float32)
    least = smallest_with_more(order, jnp.ones_like(scores), most)
    return jnp.where(order < least, -jnp.inf, scores)


def keep_top_p(scores: Logits, tail: Number) -> Logits:
    """Excludes the least likely tokens with a total probability of at most `tail`
    (nucleus sampling, Holtzman et al., 2019, <https://arxiv.org/abs/1904.09751>).

    Among equally likely tokens, smaller ids are excluded first. At least one token is kept.
    """
    probabilities = jax.nn.softmax(scores)
    order = ordered_bits(scores)
    cut = smallest_with_more(order, probabilities, tail)  # (batch, 1): below it, all are excluded
    below = jnp.sum(jnp.where(order < cut, probabilities, 0.0), axis=1, keepdims=True)  # (batch, 1)
    ties = order == cut
    of_tie = jnp.max(jnp.where(ties, probabilities, 0.0), axis=1, keepdims=True)
    numbers = jnp.cumsum(ties, axis=1, dtype=jnp.float32)  # the ties before and with each
    # The last of the ties is always kept: with it the probability would exceed `tail`.
    out = ties & (numbers < numbers[:, -1:]) & (below + numbers * of_tie <= tail)
    return jnp.where((order < cut) | out, -jnp.inf, scores)


def ordered_bits(x: Logits) -> Int[Array, "rows vocab"]:
    """Maps floats to integers of the same order, by flipping the bits of negative numbers."""
    bits = jax.lax.bitcast_convert_type(jnp.where(x == 0, 0.0, x), jnp.int32)  # -0.0 is 0.0
    return jnp.where(bits < 0, bits ^ jnp.iinfo(jnp.int32).max, bits)


def smallest_with_more(
    order: Int[Array, "rows vocab"], weights: Logits, most: Number
) -> Int[Array, "rows 1"]:
    """Finds the smallest `order` up to which the total weight exceeds `most`.

    By bisection, because sorting a vocabulary takes longer than the rest of a step.
    """

    def halve(_, bounds):
        low, high = bounds
        middle = (low & high) + ((low ^ high) >> 1)  # low + high may overflow
        mass = jnp.sum(jnp.where(order <= middle, weights, 0.0), axis=1, keepdims=True)
        enough = mass > most  # (batch, 1): each row halves its own bounds
        return jnp.where(enough, low, middle + 1), jnp.where(enough, middle, high)

    ends = jnp.min(order, axis=1, keepdims=True), jnp.max(order, axis=1, keepdims=True)
    # 32 halvings, because the bounds are integers of 32 bits.
    return jax.lax.fori_loop(0, 32, halve, ends)[1]
