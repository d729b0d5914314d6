"""Relative position biases, shared by buckets of distances
(Raffel et al., 2020, <https://arxiv.org/abs/1910.10683>, section 2.1)."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int


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

    Half of the buckets hold one distance each. The others hold ranges that grow geometrically. If
    keys after the query are visible, half of all buckets are for them.
    """
    apart = np.arange(-far, far + 1)
    count = count if causal else count // 2
    size = np.maximum(-apart, 0) if causal else np.abs(apart)
    exact = count // 2
    growth = np.log(np.maximum(size, exact) / exact) / np.log(far / exact)
    # At the start of a range the result must not depend on the rounding of the logarithm.
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
    """Returns the bias of the attention scores for queries and keys at these positions.

    **Arguments:**

    - `table`: the learned bias of each bucket and head.
    - `queries`, `keys`: positions of the queries and keys.
    - `far`: the distance from which on all distances share one bucket.
    - `causal`: whether queries see only earlier keys, so that all buckets are for those.
    """
    buckets = jnp.asarray(distance_buckets(table.shape[0], far, causal=causal))
    apart = jnp.clip(keys[:, None] - queries[:, :, None], -far, far)
    by_distance = jnp.take(table, buckets, axis=0)
    return jnp.moveaxis(jnp.take(by_distance, apart + far, axis=0), -1, 1)
