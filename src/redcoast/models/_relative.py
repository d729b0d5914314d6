"""Relative position biases, shared by buckets of distances
(Raffel et al., 2020, <https://arxiv.org/abs/1910.10683>, section 2.1)."""

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from ._view import has_many_pairs


def check_buckets(count: int, far: int) -> None:
    """Raises if there are too few buckets, or if the largest distance is too small for them."""
    if count < 4 or far <= count // 2:
        raise ValueError(
            "`buckets` must be at least 4 and `distance` more than `buckets / 2`, but they are "
            f"{count} and {far}."
        )


def distance_buckets(count: int, far: int, *, causal: bool) -> Int[np.ndarray, " distances"]:
    """Returns the bucket, out of `count`, of each distance from a query to a key, from `-far` to
    `far`.

    Half of the buckets contain one distance each. The others contain ranges that grow
    geometrically. If keys after the query are visible, half of all buckets are for them.
    """
    distances = np.arange(-far, far + 1)
    size = np.maximum(-distances, 0)  # of keys before the query; later ones have 0
    if not causal:
        count, size = count // 2, np.abs(distances)
    exact = count // 2  # buckets of one distance each
    growth = np.log(np.maximum(size, exact) / exact) / np.log(far / exact)
    # At the start of a range the result must not depend on the rounding of the logarithm.
    ranged = exact + np.floor(growth * (count - exact) + 1e-6).astype(int)
    bucket = np.where(size < exact, size, np.minimum(ranged, count - 1))
    if not causal:
        bucket = bucket + count * (distances > 0)  # the other half is for later keys
    return bucket


class RelativeBias(eqx.Module):
    """The bias of the attention scores for queries and keys at these positions.

    - `queries`, `keys`: positions of the queries and keys.
    """

    by_distance: Float[Array, "distances heads"]  # the bias of each distance from `-far` to `far`
    queries: Int[Array, "#batch queries"]
    keys: Int[Array, "#batch keys"]

    def at(
        self, rows: Int[Array, " rows"], columns: Int[Array, " columns"]
    ) -> Float[Array, "#batch heads rows columns"]:
        """Returns the bias for some of the queries and keys; the last stands for
        indices beyond it."""
        queries = jnp.take(self.queries, rows, axis=1, mode="clip")
        keys = jnp.take(self.keys, columns, axis=1, mode="clip")
        return _between(self.by_distance, queries, keys)


def _between(by_distance: Array, queries: Array, keys: Array) -> Array:
    far = by_distance.shape[0] // 2
    # (batch, queries, keys)
    distances = jnp.clip(keys[:, None] - queries[:, :, None], -far, far)
    # (batch, heads, queries, keys)
    return jnp.moveaxis(jnp.take(by_distance, distances + far, axis=0), -1, 1)


def relative_bias(
    table: Float[Array, "buckets heads"],
    queries: Int[Array, "#batch queries"],
    keys: Int[Array, "#batch keys"],
    *,
    far: int,
    causal: bool,
) -> Float[Array, "#batch heads queries keys"] | RelativeBias:
    """Returns the bias of the attention scores for queries and keys at these positions.

    If there are many pairs, it is a `RelativeBias`, which computes parts of this array.

    From the distance `far` on, all distances share one bucket of the table. If `causal`, queries
    only see earlier keys, so that all buckets are for them.
    """
    buckets = jnp.asarray(distance_buckets(table.shape[0], far, causal=causal))
    by_distance = jnp.take(table, buckets, axis=0)  # (distances, heads)
    if has_many_pairs(queries.shape[1], keys.shape[1]):
        return RelativeBias(by_distance, queries, keys)
    return _between(by_distance, queries, keys)
