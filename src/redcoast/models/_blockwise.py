"""Attention in blocks with a running softmax, for sequences whose scores do not fit in memory.

The scores of one block of queries and one block of keys are computed at a time. The maximum and the
sum of the exponentials of each query's scores are updated from block to block (Rabe and Staats,
2021, <https://arxiv.org/abs/2112.05682>). The output and the logarithm of the sum are saved for the
backward pass, which recomputes the scores. Pairs of blocks in which no query sees a key, because
the attention is causal or has a window, are skipped.

`jax.jvp` of this function raises JAX's error for functions with a custom reverse rule: a rule for
both modes would keep the scores.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int, PyTree

from ..core._target import target
from ._inputs import AnyArray, Attended, Key, Keys, Queries, Values
from ._relative import RelativeBias
from ._view import View, see

# The name, for policies of `jax.checkpoint`, of the arrays saved for the backward pass.
KEPT = "attention"
# The largest number of queries and keys in a block. Scores of a block should fit in a cache.
_BLOCK, _BLOCK_OF_CPU = 512, 256


@dataclass(frozen=True)
class _Options:
    rows: int  # queries in a block
    columns: int  # keys in a block
    pairs: tuple[tuple[int, int], ...]  # the blocks of queries and keys that are computed
    scale: float
    softcap: float | None
    rate: float


class _Dense(eqx.Module):
    """A bias as an array."""

    array: Float[Array, "#batch heads queries keys"]

    def at(self, rows: Int[Array, " rows"], columns: Int[Array, " columns"]) -> Array:
        part = jnp.take(self.array, rows, axis=2, mode="clip")
        return jnp.take(part, columns, axis=3, mode="clip")


class _ScoreInputs(eqx.Module):
    """The inputs of the scores other than queries and keys, padded to whole blocks."""

    view: View
    columns: Int[Array, " keys"]
    keys: Array | None  # PRNG keys for dropout, one for each query
    bias: RelativeBias | _Dense | None


# Queries, keys, values and other inputs; the output and the logarithm of the sums.
_Residuals = tuple[Array, Array, Array, _ScoreInputs, _ScoreInputs, Array, Array]


def attend_in_blocks(
    q: Queries,
    k: Keys,
    v: Values,
    view: View,
    *,
    bias: RelativeBias | Float[Array, "#batch heads queries keys"] | None = None,
    scale: float,
    softcap: float | None = None,
    rate: float = 0.0,
    key: Key = None,
    sinks: Float[Array, " heads"] | None = None,
    block: int | None = None,
) -> Attended:
    """Scaled dot-product attention with the memory of one block of scores.

    The arguments are as for `attend`. Dropout uses other random numbers, which depend on the slot
    of a query and not on the blocks.
    """
    options = {"bias": bias, "scale": scale, "softcap": softcap, "rate": rate, "key": key}
    out, log_sum = attend_with_sums(q, k, v, view, **options, block=block)
    if sinks is not None:
        # The share of all keys but the sink in the sum of the exponentials.
        # (batch, heads, queries)
        share = jax.nn.sigmoid(log_sum - sinks.astype(log_sum.dtype)[None, :, None])
        out = (out * jnp.swapaxes(share, 1, 2)[..., None]).astype(q.dtype)
    return out


def attend_with_sums(
    q: Queries,
    k: Keys,
    v: Values,
    view: View,
    *,
    bias: RelativeBias | Float[Array, "#batch heads queries keys"] | None = None,
    scale: float,
    softcap: float | None = None,
    rate: float = 0.0,
    key: Key = None,
    block: int | None = None,
) -> tuple[Attended, Float[Array, "batch heads queries"]]:
    """Returns the results of `attend_in_blocks` without sinks, and the logarithm of the sum of the
    exponentials of each query's scores."""
    queries, keys = q.shape[1], k.shape[1]
    if block is None:
        block = _BLOCK
        if target().platform == "cpu":
            block = _BLOCK_OF_CPU
    # Blocks of one size with little padding, which a scan needs.
    rows, columns = (_block_size(size, block) for size in (queries, keys))
    pairs = _visible_blocks(view, queries, keys, rows, columns)
    options = _Options(rows, columns, pairs, scale, softcap, rate)
    slots = view.slots
    if slots is None:
        slots = jnp.arange(queries)
    slots = pad_to_blocks(slots, rows, 0)
    keys_of_queries = None
    # Without dropout the random numbers would be computed and not used.
    if key is not None and rate:
        keys_of_queries = jax.vmap(jax.random.fold_in, (None, 0))(key, slots)
    score_bias: RelativeBias | _Dense | None
    if isinstance(bias, jax.Array):
        score_bias = _Dense(bias)
    else:
        score_bias = bias
    # The view of whole blocks, in which padded keys are not seen.
    real, segments = view.real, view.segments
    # In causal attention, no query sees the padding, which is behind all keys.
    if real is None and keys % columns and not (view.causal and view.slots is None):
        real = jnp.ones((1, keys), bool)
    if real is not None:
        real = pad_to_blocks(real, columns, 1)
    if segments is not None:
        segments = pad_to_blocks(segments[0], rows, 1), pad_to_blocks(segments[1], columns, 1)
    inputs = _ScoreInputs(
        View(real, slots, segments, view.causal, view.window),
        jnp.arange(-(-keys // columns) * columns),
        keys_of_queries,
        score_bias,
    )
    # (batch, queries, kv_heads, groups, head_dim)
    grouped = q.reshape(*q.shape[:2], k.shape[2], -1, q.shape[3])
    # Only a bias has a gradient. Masks, slots and PRNG keys do not.
    own, fixed = eqx.partition(inputs, eqx.is_inexact_array)
    arrays = (
        pad_to_blocks(grouped, rows, 1),
        pad_to_blocks(k, columns, 1),
        pad_to_blocks(v, columns, 1),
    )
    results: PyTree = _attention(options, *arrays, own, fixed)
    out, log_sum = results
    out = out[:, :queries].reshape(*q.shape[:3], v.shape[-1])  # without padding
    return out, log_sum.reshape(q.shape[0], q.shape[2], -1)[..., :queries]


def _block_size(size: int, block: int) -> int:
    """The size of equal blocks with at most `block` elements, or one more."""
    return -(-size // -(-size // block))


def pad_to_blocks(x: AnyArray, block: int, axis: int = 1, value: int = 0) -> Array:
    """Pads the end of an axis to a multiple of the size of a block."""
    missing = -x.shape[axis] % block
    if not missing:
        return jnp.asarray(x)
    pads = [(0, 0)] * x.ndim
    pads[axis] = (0, missing)
    return jnp.pad(x, pads, constant_values=value)


def _visible_blocks(
    view: View, queries: int, keys: int, rows: int, columns: int
) -> tuple[tuple[int, int], ...]:
    """The pairs of blocks in which a query may see a key."""
    i, j = np.indices((-(-queries // rows), -(-keys // columns)))
    visible = np.ones(i.shape, bool)  # (blocks of queries, blocks of keys)
    if view.slots is not None:
        # The slots are known only when the program runs.
        return tuple(np.ndindex(i.shape))
    if view.causal:
        visible &= j * columns < (i + 1) * rows
    if view.window is not None:
        visible &= (j + 1) * columns > i * rows - view.window + 1  # before the window
        visible &= j * columns < (i + 1) * rows + view.window - 1  # behind the window
    return tuple(zip(i[visible].tolist(), j[visible].tolist(), strict=True))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(
    options: _Options, q: Array, k: Array, v: Array, own: _ScoreInputs, fixed: _ScoreInputs
) -> tuple[
    Float[Array, "batch queries kv_heads groups value_dim"],
    Float[Array, "batch kv_heads groups queries"],
]:
    """The output, and the logarithm of the sum of the exponentials of each query's scores."""
    return _forward(options, q, k, v, own, fixed)[0]


def _forward(
    options: _Options, q: Array, k: Array, v: Array, own: _ScoreInputs, fixed: _ScoreInputs
) -> tuple[tuple[Array, Array], _Residuals]:
    k, fixed = _tied(k, fixed)
    dtype = np.promote_types(q.dtype, np.float32)
    shape = (q.shape[0], *q.shape[2:4], q.shape[1])  # (batch, kv_heads, groups, queries)
    empty = jnp.finfo(dtype).min  # not -inf, of which a difference would be NaN
    init = (
        jnp.full(shape, empty, dtype),
        jnp.zeros(shape, dtype),
        jnp.zeros((*shape, v.shape[3]), dtype),
    )

    def body(carry: tuple[Array, ...], at: Array) -> tuple[tuple[Array, ...], None]:
        i, j = at[0], at[1]
        # What the blocks of keys before this one have added for these queries.
        largest, total, out = (_take(x, i, options.rows, 3) for x in carry)
        scores, visible, factors, _ = _block(options, q, k, own, fixed, i, j)
        scores = jnp.where(visible, scores, empty)
        new = jnp.maximum(largest, jnp.max(scores, axis=-1))  # (batch, kv_heads, groups, rows)
        weights = jnp.where(visible, jnp.exp(scores - new[..., None]), 0)
        shrink = jnp.exp(largest - new)  # of what was summed with a smaller maximum
        total = total * shrink + jnp.sum(weights, axis=-1)
        # Dropout is of the weights after the softmax, so the total is without it.
        part = _product("bngst,btnd->bngsd", weights * factors, _take(v, j, options.columns, 1))
        out = out * shrink[..., None] + part
        return tuple(map(partial(_put, i=i, axis=3), carry, (new, total, out))), None

    # Over the pairs of blocks, of which some are never computed.
    (largest, total, out), _ = jax.lax.scan(body, init, jnp.asarray(options.pairs, jnp.int32))
    total = jnp.where(total == 0, 1, total)  # a query that sees no key gets zeros
    out = jnp.moveaxis(out / total[..., None], 3, 1).astype(q.dtype)
    out, log_sum = (checkpoint_name(x, KEPT) for x in (out, largest + jnp.log(total)))
    return (out, log_sum), (q, k, v, own, fixed, out, log_sum)


def _backward(
    options: _Options, residuals: _Residuals, grads: tuple[Array, Array]
) -> tuple[Array, Array, Array, _ScoreInputs, None]:
    out_grad, sum_grad = grads
    q, k, v, own, fixed, out, log_sum = residuals
    k, fixed = _tied(k, fixed)
    dtype = log_sum.dtype
    # The derivative of the softmax subtracts the mean of the weights' gradients, which is the
    # product of the output and its gradient (Dao et al., 2022, appendix B).
    slope = jnp.einsum("bsngd,bsngd->bngs", out.astype(dtype), out_grad.astype(dtype))
    slope = slope - sum_grad  # (batch, kv_heads, groups, queries)
    zeros = lambda x: jnp.zeros(x.shape, dtype)
    # Blocks of keys are processed one by one, so that only one has sums in a wide dtype.
    pairs = np.asarray(sorted(options.pairs, key=lambda pair: pair[::-1]), np.int32)
    first = np.diff(pairs[:, 1], prepend=-1) != 0  # whether a block of keys begins

    def body(carry: PyTree, at: PyTree) -> tuple[PyTree, None]:
        (i, j), is_first = at
        q_grad, k_grad, v_grad, own_grad, *sums = carry
        of_rows = lambda x, axis=1: _take(x, i, options.rows, axis)
        of_columns = lambda x: _take(x, j, options.columns, 1)
        scores, visible, factors, pull = _block(options, q, k, own, fixed, i, j)
        # The weights of the forward pass, which were not saved.
        weights = jnp.where(visible, jnp.exp(scores - of_rows(log_sum, 3)[..., None]), 0)
        grad = of_rows(out_grad)
        v_part = _product("bngst,bsngd->btnd", weights * factors, grad)
        change = _product("bsngd,btnd->bngst", grad, of_columns(v)) * factors
        change = weights * (change - of_rows(slope, 3)[..., None])  # gradient of the scores
        change, own_part = pull(change)  # of products of queries and keys, and of the bias
        q_part = _product("bngst,btnd->bsngd", change, of_columns(k))
        k_part = _product("bngst,bsngd->btnd", change, of_rows(q))
        parts = zip(sums, (k_part, v_part), strict=True)
        k_sum, v_sum = (jnp.where(is_first, 0, total) + part for total, part in parts)
        return (
            _put(q_grad, of_rows(q_grad) + q_part, i, 1),
            _put(k_grad, k_sum.astype(k.dtype), j, 1),
            _put(v_grad, v_sum.astype(v.dtype), j, 1),
            jax.tree.map(lambda x, part: x + part.astype(dtype), own_grad, own_part),
            k_sum,
            v_sum,
        ), None

    sums = (zeros(k[:, : options.columns]), zeros(v[:, : options.columns]))
    init = (zeros(q), jnp.zeros_like(k), jnp.zeros_like(v), jax.tree.map(zeros, own), *sums)
    (q_grad, k_grad, v_grad, own_grad, *_), _ = jax.lax.scan(
        body, init, (tuple(jnp.asarray(pairs.T)), jnp.asarray(first))
    )
    # Sums over the blocks were in a wide dtype.
    own_grad = jax.tree.map(lambda grad, x: grad.astype(x.dtype), own_grad, own)
    return q_grad.astype(q.dtype), k_grad, v_grad, own_grad, None


_attention.defvjp(_forward, _backward)


def _tied(k: Array, fixed: _ScoreInputs) -> tuple[Array, _ScoreInputs]:
    """Makes masks depend on the keys. Otherwise JAX computes the masks of all blocks before a scan
    over layers, and keeps them."""
    k, (view, columns) = jax.lax.optimization_barrier((k, (fixed.view, fixed.columns)))
    return k, _ScoreInputs(view, columns, fixed.keys, fixed.bias)


def _block(
    options: _Options,
    q: Array,
    k: Array,
    own: _ScoreInputs,
    fixed: _ScoreInputs,
    i: Int[Array, ""],
    j: Int[Array, ""],
) -> tuple[Array, Array, Array | float, Callable[[Array], tuple[Array, _ScoreInputs]]]:
    """Returns the scores of a block, which of them are visible, the factors of dropout, and a
    function from the gradient of the scores to the gradient of the products of queries and keys,
    and of the bias."""
    of_rows = lambda x, axis=1: _take(x, i, options.rows, axis)
    of_columns = lambda x, axis=1: _take(x, j, options.columns, axis)
    view = fixed.view
    slots, columns = of_rows(view.slots, 0), of_columns(fixed.columns, 0)
    real, segments = view.real, view.segments
    if real is not None:
        real = of_columns(real)
    if segments is not None:
        segments = of_rows(segments[0]), of_columns(segments[1])
    visible = see(view, slots, columns, real, segments)
    index = i * options.rows + jnp.arange(options.rows)  # of queries; slots may differ from it

    def finish(scores: Array, own: _ScoreInputs) -> Array:
        scores = scores * options.scale
        bias = eqx.combine(own, fixed).bias
        if bias is not None:
            part = bias.at(index, columns).astype(scores.dtype)
            scores += part.reshape(part.shape[0], *scores.shape[1:3], *part.shape[2:])
        if options.softcap is not None:
            scores = options.softcap * jnp.tanh(scores / options.softcap)
        return scores

    products = _product("bsngd,btnd->bngst", of_rows(q), of_columns(k))
    # JAX has the derivative of the scale, the bias and the cap; the rest is above.
    scores, pull = jax.vjp(finish, products, own)
    factors: Array | float = 1.0
    if fixed.keys is not None:
        batch, heads, groups, _, width = scores.shape
        # Each query and block of keys has numbers of its own, which both passes can draw.
        draw = lambda key: jax.random.bernoulli(
            jax.random.fold_in(key, j), 1 - options.rate, (batch, heads, groups, width)
        )
        is_kept = jnp.moveaxis(jax.vmap(draw)(of_rows(fixed.keys, 0)), 0, 3)
        factors = is_kept.astype(scores.dtype) / (1 - options.rate)  # 0, or 1 / (1 - rate)
    return scores, visible[:, None, None], factors, pull


def _product(equation: str, x: Array, y: Array) -> Array:
    """Multiplies in the narrower dtype, and adds in at least float32."""
    # Weights in float32 by values in bfloat16 would be a product in float32, which is slow.
    narrow = min(x.dtype, y.dtype, key=lambda dtype: dtype.itemsize)
    wide = np.promote_types(narrow, np.float32)
    return jnp.einsum(equation, x.astype(narrow), y.astype(narrow), preferred_element_type=wide)


def _take(x: Array, i: Int[Array, ""], size: int, axis: int) -> Array:
    return jax.lax.dynamic_slice_in_dim(x, i * size, size, axis)


def _put(x: Array, part: Array, i: Int[Array, ""], axis: int) -> Array:
    start = i * part.shape[axis]
    return jax.lax.dynamic_update_slice_in_dim(x, part, start, axis)
