"""Rows of a cache for the hypotheses of a beam search.

`cache.take` says which dimension of each array is the batch. With it known, hypotheses are taken
among those of their own row: as indices of all rows, a cache that is split along the batch would be
gathered whole at each step, for all that the compiler can tell.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

Dims = tuple[int | None, ...]


def batch_dims(cache: Any, rows: int) -> Dims:
    """For each array of a cache of so many rows, which dimension they are along."""
    more = jax.eval_shape(lambda cache: cache.take(jnp.zeros(rows + 1, jnp.int32)), cache)
    return tuple(map(_changed, jax.tree.leaves(cache), jax.tree.leaves(more)))


def _changed(x: Array, y: jax.ShapeDtypeStruct) -> int | None:
    return next((d for d in range(x.ndim) if x.shape[d] != y.shape[d]), None)


def repeat_rows(cache: Any, dims: Dims, times: int) -> Any:
    """The cache with each row as often as said, one after the other."""
    leaves, structure = jax.tree.flatten(cache)
    return structure.unflatten(
        x if d is None else jnp.repeat(x, times, axis=d) for x, d in zip(leaves, dims, strict=True)
    )


def reorder_rows(cache: Any, before: Any, dims: Dims, parent: Int[Array, "batch beams"]) -> Any:
    """The cache with the beams of each row replaced by their parents, of the same row.

    What a step did not touch since `before`, such as what is kept of an encoder, is alike for all
    beams of a row, and stays.
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
