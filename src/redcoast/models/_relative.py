"""Positions as distances between tokens, told apart by ranges
(Raffel et al., 2020, <https://arxiv.org/abs/1910.10683>, section 2.1)."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int


def check_buckets(count: int, far: int) -> None:
    """Refuses counts and distances for which there are no ranges."""
    if count < 4 or far <= count // 2:
        raise ValueError(
            "`buckets` must be at least 4 and `distance` more than half of it, but they are "
            f"{count} and {far}."
        )


def distance_buckets(count: int, far: int, *, causal: bool) -> Int[np.ndarray, " distances"]:
    """The bucket, out of `count`, of each distance from a query to a key, from `-far` to `far`.

    Half of the buckets have one distance each, and the other half have ranges, each longer than
    the last by the same factor. Where keys behind the query are seen, half of all are for them.
    """
    apart = np.arange(-far, far + 1)
    count = count if causal else count // 2
    size = np.maximum(-apart, 0) if causal else np.abs(apart)
    exact = count // 2
    growth = np.log(np.maximum(size, exact) / exact) / np.log(far / exact)
    # Where a range begins, at powers of the factor, the logarithm's rounding must not decide.
    ranged = exact + np.floor(growth * (count - exact) + 1e-6).astype(int)
    bucket = np.where(size < exact, size, np.minimum(ranged, count - 1))
    return bucket if causal else bucket + count * (apart > 0)


def relative_bias(
    table: Float[Array, "buckets heads"],
    queries: Int[Array, "#batch queries"],
    keys: Int[Array, "#batch keys"],
    *,
    far: int,
    causal: bool,
) -> Float[Array, "#batch heads queries keys"]:
    """What is added to the scores of queries and keys at these positions.

    **Arguments:**

    - `table`: for each bucket and head.
    - `queries`, `keys`: positions.
    - `far`: the distance from which on all are in one bucket.
    - `causal`: whether queries see only keys before them, and buckets are for those alone.
    """
    buckets = jnp.asarray(distance_buckets(table.shape[0], far, causal=causal))
    apart = jnp.clip(keys[:, None] - queries[:, :, None], -far, far)
    by_distance = jnp.take(table, buckets, axis=0)
    return jnp.moveaxis(jnp.take(by_distance, apart + far, axis=0), -1, 1)
