"""The rows of a cache: repeated for several results, and reordered for beams."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, PyTree

from ..core._errors import type_name

Dims = tuple[int | None, ...]


def cache_batch_dims(cache: PyTree, rows: int) -> Dims:
    """Finds the batch dimension of each array of a cache with `rows` rows.

    Raises `TypeError` if the cache has no method `take` for its rows.
    """
    # An array has a method of this name, too, which is for all its elements.
    if isinstance(cache, jax.Array) or not callable(getattr(cache, "take", None)):
        raise TypeError(
            f"The cache is a {type_name(cache)}, whose rows cannot be gathered. `beams`, "
            "`num_return_sequences` and `rows` need a cache with a method `take(rows)`: return an "
            "object that has it from `init_cache`, such as an `eqx.Module`."
        )
    # A cache says itself which dimension of each array is of rows: the one that `take` changes.
    more = jax.eval_shape(lambda cache: cache.take(jnp.zeros(rows + 1, jnp.int32)), cache)
    shapes, shapes_of_more = _shapes(cache), _shapes(more)
    return tuple(map(_first_difference, shapes, shapes_of_more))


def _shapes(tree: PyTree) -> list[tuple[int, ...]]:
    return [x.shape for x in jax.tree.leaves(tree)]


def _first_difference(shape: tuple[int, ...], other: tuple[int, ...]) -> int | None:
    for d, (size, other_size) in enumerate(zip(shape, other, strict=True)):
        if size != other_size:
            return d
    return None


def repeat_rows(cache: PyTree, dims: Dims, times: int) -> PyTree:
    leaves, structure = jax.tree.flatten(cache)
    for i, d in enumerate(dims):
        if d is not None:
            leaves[i] = jnp.repeat(leaves[i], times, axis=d)
    return structure.unflatten(leaves)


def reorder_rows(
    cache: PyTree, before: PyTree, dims: Dims, parent: Int[Array, "batch beams"]
) -> PyTree:
    """Replaces the beams of each row by their parents.

    Arrays that are the same objects as in `before`, such as the encoder's keys and values, are the
    same for all beams of a row and are not copied.
    """
    leaves, structure = jax.tree.flatten(cache)
    for i, (x, old, d) in enumerate(zip(leaves, jax.tree.leaves(before), dims, strict=True)):
        if d is not None and x is not old:
            leaves[i] = _take_parents(x, d, parent)
    return structure.unflatten(leaves)


def _take_parents(x: Array, d: int, parent: Int[Array, "batch beams"]) -> Array:
    # (..., batch, beams, ...)
    by_beam = x.reshape(*x.shape[:d], *parent.shape, *x.shape[d + 1 :])
    # Within a row of the batch, so that a sharded batch needs no communication.
    take = lambda beams, parent: jnp.take(beams, parent, axis=d)
    return jax.vmap(take, in_axes=(d, 0), out_axes=d)(by_beam, parent).reshape(x.shape)
