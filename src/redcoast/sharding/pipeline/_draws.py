"""Draws for some rows the random bits that are drawn for all rows on one device.

JAX's default generator, threefry, makes each number from the key and a counter, which is the index
of the number in the array. The numbers of some rows need no others.
"""

from dataclasses import dataclass
from math import prod

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.random import threefry2x32_p
from jaxtyping import Array, Integer, PRNGKeyArray, UInt32

# 64-bit numbers without `jax_enable_x64`: their high and low 32 bits.
Halves = tuple[UInt32[Array, "..."], UInt32[Array, "..."]]


@dataclass(frozen=True)
class RandomBits:
    """Random bits for rows: the dimension of the rows, and the shape of the bits for all rows."""

    dim: int
    shape: tuple[int, ...]


def draw_rows(
    key: PRNGKeyArray, bits: RandomBits, rows: Integer[Array, " rows"], bit_width: int
) -> Array:
    """The random bits of some rows, as `jax.random.bits` draws them for all."""
    high, low = _counters(bits, rows)  # as all that follows, of the shape of the rows' bits
    first_word, second_word = jax.random.key_data(key)
    first_word = jnp.broadcast_to(first_word, high.shape)
    second_word = jnp.broadcast_to(second_word, high.shape)
    first, second = threefry2x32_p.bind(first_word, second_word, high, low)
    if bit_width == 64:
        high_bits = jax.lax.shift_left(first.astype(jnp.uint64), jnp.uint64(32))
        return high_bits | second.astype(jnp.uint64)
    return (first ^ second).astype(f"uint{bit_width}")


def _counters(bits: RandomBits, rows: Integer[Array, " rows"]) -> Halves:
    """The index of each number in the flattened array for all rows."""
    shape = (*bits.shape[: bits.dim], rows.shape[0], *bits.shape[bits.dim + 1 :])
    high = low = jnp.zeros(shape, jnp.uint32)
    for d, size in enumerate(bits.shape):
        # Of all indices, (size,), since NumPy has numbers of 64 bits.
        offsets = np.arange(size, dtype=np.uint64) * np.uint64(prod(bits.shape[d + 1 :]))
        halves = [
            jnp.asarray(half.astype(np.uint32)) for half in (offsets >> np.uint64(32), offsets)
        ]
        if d == bits.dim:
            halves = [half[rows] for half in halves]
        offset_high, offset_low = (jax.lax.broadcast_in_dim(half, shape, (d,)) for half in halves)
        low = low + offset_low  # modulo 2**32
        high = high + offset_high + (low < offset_low).astype(jnp.uint32)
    return high, low
