"""Computes the example at each position of a run without storing a permutation."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int64, PRNGKeyArray, UInt64

# Pairs of rounds. Two pairs are enough for large domains (Luby and Rackoff, 1988); small domains
# need more for a uniform permutation.
PAIRS = 6
# Positions are permuted in blocks, because the overhead of a NumPy call exceeds the time for
# thousands of numbers. A block takes 2 ms.
BLOCK = 16_384


def data_seed(key: PRNGKeyArray) -> UInt64[np.ndarray, "2"]:
    """Derives the 128-bit seed of the order of the data from the key of a run."""
    if jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        key = jax.random.key_data(key)
    words = np.asarray(key).ravel()
    return np.random.SeedSequence(words.tolist()).generate_state(2, np.uint64)


def shuffled(
    positions: Int64[np.ndarray, " n"], length: int, seed: UInt64[np.ndarray, "2"]
) -> tuple[Int64[np.ndarray, " n"], Int64[np.ndarray, " n"]]:
    """Returns the epoch and the index of the example at each position of a run.

    Positions continue across epochs. Each epoch visits every example once, in its own order. The
    order is a keyed permutation (a Feistel network with cycle walking), which is computed for the
    requested positions only, so any position costs as much as the first.
    """
    epochs, offsets = np.divmod(positions, length)
    indices = np.empty_like(offsets)
    # The smallest near-square rectangle with `length` cells: at most one row is outside the range.
    rows = int(np.ceil(np.sqrt(length)))
    columns = -(-length // rows)
    for epoch in np.unique(epochs):
        here = epochs == epoch
        # Counters of the examples' generators have a 1 as their second word: no number is shared.
        keys = np.random.Philox(key=seed, counter=[0, 0, 0, int(epoch)]).random_raw(2 * PAIRS)
        x = _feistel(offsets[here], rows, columns, keys)
        # A cell outside the range is permuted again until it is inside. That is a permutation, too.
        while (outside := x >= length).any():
            x[outside] = _feistel(x[outside], rows, columns, keys)
        indices[here] = x
    return epochs, indices


def batch_indices(
    start: int, stop: int, batch_size: int, length: int, seed: UInt64[np.ndarray, "2"]
) -> Iterator[tuple[list[int], list[int]]]:
    """Yields the epochs and indices of the examples of each batch between two positions."""
    # Whole batches, so that each is in one block.
    block = max(1, BLOCK // batch_size) * batch_size
    for begin in range(start, stop, block):
        positions = np.arange(begin, min(begin + block, stop), dtype=np.int64)
        epochs, indices = (x.tolist() for x in shuffled(positions, length, seed))
        for i in range(0, len(indices), batch_size):
            yield epochs[i : i + batch_size], indices[i : i + batch_size]


def _feistel(
    x: Int64[np.ndarray, " n"], rows: int, columns: int, keys: UInt64[np.ndarray, " k"]
) -> Int64[np.ndarray, " n"]:
    """Permutes `range(rows * columns)`: each half is shifted by a hash of the other half."""
    # Row and column of each cell.
    left, right = (half.astype(np.uint64) for half in np.divmod(x, columns))
    height, width = np.uint64(rows), np.uint64(columns)
    for i in range(0, len(keys), 2):
        left = _shifted(left, _hash(right, keys[i]), height)
        right = _shifted(right, _hash(left, keys[i + 1]), width)
    return (left * width + right).astype(np.int64)


def _shifted(
    x: UInt64[np.ndarray, " n"], by: UInt64[np.ndarray, " n"], size: np.uint64
) -> UInt64[np.ndarray, " n"]:
    """`(x + by) % size`, for `x` less than `size`, without the operation `%`, which is slow."""
    total = x + (by - by // size * size)
    # Where the total is less than `size`, the difference wraps around to a large number.
    return np.minimum(total, total - size)


def _hash(x: UInt64[np.ndarray, " n"], key: np.uint64) -> UInt64[np.ndarray, " n"]:
    """Applies the finaliser of SplitMix64 (Steele, Lea and Flood, 2014) to a keyed input."""
    x = (x + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15) ^ key
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def example_generators(
    epochs: list[int], indices: list[int], seed: UInt64[np.ndarray, "2"]
) -> list[np.random.Generator]:
    """Creates a generator for each example, which does not depend on the batch it is in."""
    # The upper words of the Philox counter select the stream; the lower two count within it.
    return [
        np.random.Generator(np.random.Philox(key=seed, counter=[0, 1, index, epoch]))
        for epoch, index in zip(epochs, indices, strict=True)
    ]
