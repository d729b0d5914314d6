"""Mixtures of experts: each token goes through a few networks of many."""

import functools as ft
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ._attention import wide

# How many times its even share of a row's tokens an expert takes in one go.
_ROOM = 2


def mix_experts(
    expert_fn: Callable[[Array], Array],
    x: Float[Array, "batch seq width"],
    scores: Float[Array, "batch seq experts"],
    real: Bool[Array, "#batch seq"],
    *,
    chosen: int,
) -> tuple[
    Float[Array, "batch seq width"], tuple[Float[Array, " experts"], Float[Array, " experts"]]
]:
    """Sends each token through the experts with the greatest scores, and adds what comes out,
    weighted by a softmax of these scores (Jiang et al., 2024, section 2.1).

    **Arguments:**

    - `expert_fn`: takes and returns `"batch experts tokens width"`: each expert its own tokens.
    - `x`: the tokens.
    - `scores`: of each expert for each token.
    - `real`: which tokens are no padding; padding goes through no expert.
    - `chosen`: how many experts each token goes through.

    **Returns:**

    The tokens; and for each expert, how many tokens it was chosen for, and the sum of its
    probabilities, as `router_loss` takes them.
    """
    probabilities = jax.nn.softmax(scores.astype(wide(scores.dtype)))
    weights, which = jax.lax.top_k(probabilities, chosen)
    weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    # Padding, which is all alike, would fill its experts.
    hits = jnp.where(real[..., None, None], jax.nn.one_hot(which, scores.shape[-1]), 0)
    hits = hits.astype(weights.dtype)
    probability = jnp.sum(jnp.where(real[..., None], probabilities, 0), axis=(0, 1))
    use = (jnp.sum(hits, axis=(0, 1, 2)), probability)
    return _dispatch(expert_fn, x, jnp.einsum("bsc,bsce->bes", weights, hits), chosen), use


def router_loss(
    count: Float[Array, " experts"], probability: Float[Array, " experts"], chosen: int
) -> Float[Array, ""]:
    """A loss that is least, `chosen`, where all experts are used evenly (Fedus et al., 2021,
    equations 4 to 6, <https://arxiv.org/abs/2101.03961>)."""
    tokens = jnp.maximum(jnp.sum(count) / chosen, 1)
    return count.size * jnp.sum(count / tokens * (probability / tokens))


def _dispatch(expert_fn, x, weights, chosen):
    # All experts for all tokens, most with weight 0, is the result exactly, but `experts / chosen`
    # times the work. So each expert goes through a row's tokens in parts, its own tokens first; no
    # part is run that has none of any expert's own, and no token is ever dropped. Measured against
    # that at 8 experts of which 2 are chosen, used evenly: half the time and 0.6 times the memory
    # in training, and on a mesh as few messages, since the products' experts and hidden size can
    # both be split. `jax.lax.ragged_dot` over sorted tokens took twice the time: it cannot split
    # the experts, needs the rows of all devices in one order, and on CPU and GPU computes every
    # expert for all tokens.
    length, experts = x.shape[1], weights.shape[1]
    room = min(length, math.ceil(_ROOM * length * chosen / experts))
    parts = -(-length // room)
    order = _own_first(weights, parts * room).reshape(*weights.shape[:2], parts, room)
    most = jnp.max(jnp.sum(weights != 0, axis=-1))

    def run(y: Array, at: Int[Array, "batch experts room"]) -> Array:
        taken = jax.vmap(lambda x, at: jnp.take(x, at, axis=0, mode="fill", fill_value=0))(x, at)
        weight = jnp.take_along_axis(weights, at, axis=-1, mode="fill", fill_value=0)
        out = expert_fn(taken) * weight[..., None].astype(x.dtype)
        return jax.vmap(lambda y, at, out: y.at[at].add(out, mode="drop"))(y, at, out)

    # Of parts that are seldom run nothing is kept for the backward pass: neither by the scan nor,
    # when a part is computed again, across the choice whether to run it.
    remat = ft.partial(jax.checkpoint, prevent_cse=False)

    def run_if_any(y, inputs):
        index, at = inputs
        return jax.lax.cond(index * room < most, remat(run), lambda y, _: y, y, at), None

    inputs = (jnp.arange(parts), jnp.moveaxis(order, 2, 0))
    return jax.lax.scan(remat(run_if_any), jnp.zeros_like(x), inputs)[0]


def _own_first(
    weights: Float[Array, "batch experts seq"], length: int
) -> Int[Array, "batch experts length"]:
    """For each expert the places of all tokens, those first that go through it; then, up to
    `length`, a place that there is not."""
    order = jnp.argsort(weights == 0, axis=-1)
    behind = length - order.shape[-1]
    return jnp.pad(order, ((0, 0), (0, 0), (0, behind)), constant_values=order.shape[-1])
