"""Layers of several models. Vectors are broadcast explicitly: rank promotion is an error."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PyTree


def make_arrays(key: jax.Array, shapes: PyTree, std: float = 0.05) -> PyTree:
    """Returns random arrays of the given shapes; ones if the name ends in "scale"."""
    paths, treedef = jax.tree.flatten_with_path(shapes, is_leaf=lambda x: isinstance(x, tuple))
    keys = jax.random.split(key, len(paths))
    leaves = []
    for (path, shape), array_key in zip(paths, keys, strict=True):
        if is_scale(path):
            leaves.append(jnp.ones(shape))
        else:
            leaves.append(std * jax.random.normal(array_key, shape))
    return jax.tree.unflatten(treedef, leaves)


def is_scale(path: tuple[Any, ...]) -> bool:
    return jax.tree_util.keystr(path[-1:], simple=True).endswith("scale")


def stack_shapes(count: int, shapes: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """The shapes of layers stacked for a scan."""
    return {name: (count, *shape) for name, shape in shapes.items()}


def like(vector: jax.Array, x: jax.Array) -> jax.Array:
    """Broadcasts along the last dimensions of `x`."""
    return jnp.broadcast_to(vector, x.shape)


def linear(x: jax.Array, weight: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    y = x @ weight
    if bias is None:
        return y
    return y + like(bias, y)


def layer_norm(x: jax.Array, scale: jax.Array, shift: jax.Array) -> jax.Array:
    mean = jnp.mean(x, axis=-1, keepdims=True)
    variance = jnp.mean((x - mean) ** 2, axis=-1, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(variance + 1e-5) * like(scale, x) + like(shift, x)


def rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    square = jnp.mean(x**2, axis=-1, keepdims=True)
    return x * jax.lax.rsqrt(square + 1e-6) * like(scale, x)


def split_heads(x: jax.Array, heads: int) -> jax.Array:
    """Reshapes `batch seq (heads head_dim)` to `batch seq heads head_dim`."""
    return x.reshape(*x.shape[:-1], heads, x.shape[-1] // heads)


def merge_heads(x: jax.Array) -> jax.Array:
    return x.reshape(*x.shape[:-2], x.shape[-2] * x.shape[-1])


def causal_mask(seq: int) -> jax.Array:
    """The causal mask of shape `1 1 seq seq`: true for positions that a query attends to."""
    return jnp.tril(jnp.ones((seq, seq), bool))[None, None]


def dot_product_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    mask: jax.Array | None = None,
    bias: jax.Array | None = None,
    scaled: bool = True,
) -> jax.Array:
    """Attention on arrays `batch seq heads head_dim`; the result has merged heads."""
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k)
    if scaled:
        scores = scores / math.sqrt(q.shape[-1])
    if bias is not None:
        scores = scores + jnp.broadcast_to(bias, scores.shape)
    if mask is not None:
        scores = jnp.where(mask, scores, -1e9)
    weights = jax.nn.softmax(scores, axis=-1)
    return merge_heads(jnp.einsum("bhqk,bkhd->bqhd", weights, v))


def rotate(x: jax.Array) -> jax.Array:
    """Rotary position embedding of `batch seq heads head_dim` (arXiv:2104.09864)."""
    seq, half = x.shape[1], x.shape[-1] // 2
    frequencies = 10_000.0 ** (-jnp.arange(half, dtype=x.dtype) / half)
    angles = jnp.arange(seq, dtype=x.dtype)[:, None] * frequencies[None]
    cos, sin = jnp.cos(angles)[None, :, None], jnp.sin(angles)[None, :, None]
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """The mean cross-entropy over all labels; logits have one more dimension."""
    log_probs = jax.nn.log_softmax(logits, axis=-1)
    return -jnp.mean(jnp.take_along_axis(log_probs, labels[..., None], axis=-1))
