"""Draws for some rows the random bits that are drawn for all rows on one device.

JAX's default generator, threefry, makes each number from the key and a counter, which is the index
of the number in the array. The numbers of some rows need no others.
"""

from dataclasses import dataclass
from math import prod

import jax
import jax.numpy as jnp
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
    for d, size in enumerate(shape):
        indices = jnp.arange(size, dtype=jnp.uint32)
        if d == bits.dim:
            indices = rows.astype(jnp.uint32)
        stride = prod(bits.shape[d + 1 :])
        offset_high, offset_low = _times(indices, stride)  # (size,)
        offset_high = jax.lax.broadcast_in_dim(offset_high, shape, (d,))
        offset_low = jax.lax.broadcast_in_dim(offset_low, shape, (d,))
        high, low = _add((high, low), (offset_high, offset_low))
    return high, low


def _times(x: UInt32[Array, " n"], by: int) -> Halves:
    """The product with a number below 2**64, by long multiplication with digits of 16 bits."""
    low, high = x & jnp.uint32(0xFFFF), x >> jnp.uint32(16)
    total = jnp.zeros_like(x), jnp.zeros_like(x)
    for bits in range(0, 64, 16):
        digit = jnp.uint32(by >> bits & 0xFFFF)
        total = _add(total, _shift_left(low * digit, bits))
        total = _add(total, _shift_left(high * digit, bits + 16))
    return total


def _shift_left(x: UInt32[Array, " n"], bits: int) -> Halves:
    zero = jnp.zeros_like(x)
    if bits >= 64:
        return zero, zero
    if bits >= 32:
        return x << jnp.uint32(bits - 32), zero
    if bits == 0:  # a shift by all 32 bits is undefined
        return zero, x
    return x >> jnp.uint32(32 - bits), x << jnp.uint32(bits)


def _add(augend: Halves, addend: Halves) -> Halves:
    low = augend[1] + addend[1]  # modulo 2**32
    carry = (low < augend[1]).astype(jnp.uint32)
    return augend[0] + addend[0] + carry, low
