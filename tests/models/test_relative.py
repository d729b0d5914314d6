"""Buckets of distances against the formula, one at a time, and what is made of them."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from redcoast.models._relative import check_buckets, distance_buckets, relative_bias


def bucket(apart, count, far, causal):
    """The bucket of one distance from a query to a key, in exact steps."""
    if not causal:
        half = count // 2
        return bucket(-abs(apart), half, far, True) + (half if apart > 0 else 0)
    size, exact = max(-apart, 0), count // 2
    if size < exact:
        return size
    # The last range that begins at this distance or before.
    begins = [exact * (far / exact) ** (i / (count - exact)) for i in range(count - exact)]
    return exact + sum(begin <= size + 1e-6 for begin in begins) - 1


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("count", "far"), [(32, 128), (8, 20), (6, 9), (16, 64)])
def test_every_distance_is_in_its_bucket(count, far, causal):
    expected = [bucket(apart, count, far, causal) for apart in range(-far, far + 1)]
    np.testing.assert_array_equal(distance_buckets(count, far, causal=causal), expected)


def test_the_published_sizes():
    # What the paper says of 32 buckets: in the encoder 16 a side, of which 8 are of one distance.
    buckets = distance_buckets(32, 128, causal=False)
    assert list(buckets[128 - 8 : 128 + 1]) == [8, 7, 6, 5, 4, 3, 2, 1, 0]
    assert list(buckets[128 + 1 : 128 + 9]) == [17, 18, 19, 20, 21, 22, 23, 24]
    assert [buckets[128 - n] for n in (15, 16, 31, 32, 63, 64, 128)] == [9, 10, 11, 12, 13, 14, 15]
    assert math.prod(buckets.shape) == 257


@pytest.mark.thorough
def test_bias_is_of_the_distance_between_positions():
    table = jnp.arange(8 * 3.0).reshape(8, 3)
    queries, keys = jnp.array([[0, 4], [7, 90]]), jnp.array([[0, 1, 5], [80, 6, 7]])
    for causal in (False, True):
        bias = relative_bias(table, queries, keys, far=9, causal=causal)
        assert isinstance(bias, jax.Array)
        assert bias.shape == (2, 3, 2, 3)
        for at in np.ndindex(bias.shape):
            row, head, i, j = at
            apart = int(np.clip(keys[row, j] - queries[row, i], -9, 9))
            assert bias[at] == table[bucket(apart, 8, 9, causal), head]


def test_sizes_without_ranges_are_refused():
    check_buckets(4, 3)
    with pytest.raises(ValueError, match="at least 4"):
        check_buckets(3, 9)
    with pytest.raises(ValueError, match="more than `buckets / 2`, but they are 8 and 4"):
        check_buckets(8, 4)
