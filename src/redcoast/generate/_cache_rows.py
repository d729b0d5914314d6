"""The rows of a cache: repeated for several results, and reordered for beams."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, PyTree

Dims = tuple[int | None, ...]


def cache_batch_dims(cache: PyTree, rows: int) -> Dims:
    """Finds the batch dimension of each array of a cache with `rows` rows."""
    more = jax.eval_shape(lambda cache: cache.take(jnp.zeros(rows + 1, jnp.int32)), cache)
    changed = lambda x, y: next((d for d in range(x.ndim) if x.shape[d] != y.shape[d]), None)
    return tuple(map(changed, jax.tree.leaves(cache), jax.tree.leaves(more)))


def repeat_rows(cache: PyTree, dims: Dims, times: int) -> Any:
    """Repeats each row of a cache `times` times."""
    leaves, structure = jax.tree.flatten(cache)
    return structure.unflatten(
        x if d is None else jnp.repeat(x, times, axis=d) for x, d in zip(leaves, dims, strict=True)
    )


def reorder_rows(
    cache: PyTree, before: PyTree, dims: Dims, parent: Int[Array, "batch beams"]
) -> Any:
    """Replaces the beams of each row by their parents.

    Arrays that are the same objects as in `before`, such as the encoder's keys and values, are the
    same for all beams of a row and are not copied.
    """
    leaves, structure = jax.tree.flatten(cache)
    old = jax.tree.leaves(before)
    return structure.unflatten(
        x if d is None or x is y else _take_parents(x, d, parent)
        for x, y, d in zip(leaves, old, dims, strict=True)
    )


def _take_parents(x: Array, d: int, parent: Int[Array, "batch beams"]) -> Array:
    apart = x.reshape(*x.shape[:d], *parent.shape, *x.shape[d + 1 :])
    take = lambda beams, parent: jnp.take(beams, parent, axis=d)
    return jax.vmap(take, in_axes=(d, 0), out_axes=d)(apart, parent).reshape(x.shape)
