from collections import Counter
from math import factorial

import jax
import numpy as np
import pytest

from redcoast.data._permutation import batch_indices, data_seed, example_generators, shuffled

SEED = np.array([1, 2], np.uint64)


@pytest.mark.parametrize("length", [1, 2, 3, 5, 10, 97, 1000, 4097])
def test_each_epoch_visits_every_example_once(length):
    epochs, indices = shuffled(np.arange(3 * length), length, SEED)
    for epoch in range(3):
        assert sorted(indices[epochs == epoch]) == list(range(length))


def permuted(position, length, keys):
    """The definition, in Python's integers."""
    rows = int(np.ceil(np.sqrt(length)))
    columns = -(-length // rows)
    mixed = lambda x, key: hashed((((x + 1) * 0x9E3779B97F4A7C15) % 2**64) ^ key)
    while True:
        left, right = divmod(position, columns)
        for i in range(0, len(keys), 2):
            left = (left + mixed(right, keys[i])) % rows
            right = (right + mixed(left, keys[i + 1])) % columns
        position = left * columns + right
        if position < length:
            return position


def hashed(x):
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) % 2**64
    return x ^ (x >> 31)


@pytest.mark.parametrize("length", [2, 7, 97, 20_000, 10**9 + 7, 2**52 + 1])
def test_the_order_is_the_one_that_earlier_versions_had(length):
    # A run that is resumed with a new version has to continue in the same order.
    seed = np.array([3, 2**63 + 5], np.uint64)
    positions = np.array([0, 1, length // 3, length - 1])
    _, actual = shuffled(positions, length, seed)
    keys = np.random.Philox(key=seed, counter=[0, 0, 0, 0]).random_raw(12).tolist()
    assert actual.tolist() == [permuted(x, length, keys) for x in positions.tolist()]


def test_epochs_and_seeds_have_their_own_orders():
    indices = shuffled(np.arange(200), 100, SEED)[1]
    other = shuffled(np.arange(100), 100, SEED + np.uint64(1))[1]
    assert (indices[:100] != indices[100:]).mean() > 0.9
    assert (indices[:100] != other).mean() > 0.9


@pytest.mark.thorough
@pytest.mark.parametrize("length", [3, 4])
def test_all_orders_are_equally_likely(length):
    draws = 2000
    seen = Counter(
        tuple(shuffled(np.arange(length), length, np.array([s, 7], np.uint64))[1])
        for s in range(draws)
    )
    expected = draws / factorial(length)
    chi_squared = sum((n - expected) ** 2 / expected for n in seen.values())
    # The 99.9 % quantiles for 5 and 23 degrees of freedom.
    assert len(seen) == factorial(length)
    assert chi_squared < {3: 20.5, 4: 49.7}[length]


def test_neighbouring_positions_are_spread_out():
    _, indices = shuffled(np.arange(100_000), 100_000, SEED)
    correlation = np.corrcoef(indices[:-1], indices[1:])[0, 1]
    assert abs(correlation) < 0.02
    assert abs(np.corrcoef(np.arange(100_000), indices)[0, 1]) < 0.02


def test_an_example_does_not_depend_on_the_first_position():
    _, whole = shuffled(np.arange(10**8, 10**8 + 50), 10**7, SEED)
    _, part = shuffled(np.arange(10**8 + 40, 10**8 + 50), 10**7, SEED)
    assert (whole[40:] == part).all()


def test_batches_continue_across_epochs():
    batches = list(batch_indices(0, 25, 4, 10, SEED))
    assert [len(i) for _, i in batches] == [4, 4, 4, 4, 4, 4, 1]
    assert batches[2][0] == [0, 0, 1, 1]
    flat = [i for _, indices in batches for i in indices]
    assert sorted(flat[:10]) == sorted(flat[10:20]) == list(range(10))
    later = list(batch_indices(12, 25, 4, 10, SEED))
    assert later == batches[3:]


def test_the_seed_depends_on_the_key():
    assert (data_seed(jax.random.key(0)) == data_seed(jax.random.PRNGKey(0))).all()
    assert (data_seed(jax.random.key(0)) != data_seed(jax.random.key(1))).any()


def test_generators_belong_to_examples():
    first, second = example_generators([0, 0], [3, 4], SEED)
    (again,) = example_generators([0], [4], SEED)
    (next_epoch,) = example_generators([1], [4], SEED)
    draws = [g.random(4) for g in (first, second, again, next_epoch)]
    assert (draws[1] == draws[2]).all()
    assert (draws[0] != draws[1]).all()
    assert (draws[1] != draws[3]).all()
