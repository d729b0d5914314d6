"""Draws for some rows the random bits that are drawn for all rows on one device.

JAX's default generator, threefry, makes each number from the key and a counter, which is the index
of the number in the array. The numbers of some rows need no others.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn
from jax.extend.random import threefry2x32_p
from jaxtyping import Array, Integer, PRNGKeyArray, UInt32

from ...core._control_flow import AnyJaxpr, Call, control_flow
from ...core._jaxpr import iter_equations
from ._row_states import MixesRows, differing

# 64-bit numbers without `jax_enable_x64`: their high and low 32 bits.
Halves = tuple[UInt32[Array, "..."], UInt32[Array, "..."]]


@dataclass(frozen=True)
class RandomBits:
    """Random bits for rows: the dimension of the rows, and the shape of the bits for all rows."""

    dim: int
    shape: tuple[int, ...]


def find_random_bits(
    microbatch: AnyJaxpr, few: AnyJaxpr, all_: AnyJaxpr, rows: int
) -> Mapping[int, RandomBits]:
    """The random bits of a layer for rows, by the `id` of their equation in `microbatch`.

    The three are the layer for the rows of one microbatch, for few, and for all of the `rows` of
    the batch. Raises `MixesRows`.
    """
    by_equation: dict[int, RandomBits | None] = {}
    layers = map(_equations_of_bits, (microbatch, few, all_))
    for equation, of_few, of_all in zip(*layers, strict=True):
        bits = _bits_of_rows(of_few, of_all, rows)
        # A function that the layer calls twice has the same equations both times.
        if by_equation.setdefault(id(equation), bits) != bits:
            raise MixesRows(
                "it draws random numbers of the same shape for rows and for something else"
            )
    of_rows = {place: bits for place, bits in by_equation.items() if bits is not None}
    replaceable = _equations_of_bits(microbatch, skip=_has_derivative)
    if of_rows.keys() - set(map(id, replaceable)):
        raise MixesRows("it draws random numbers for rows in a function with a custom derivative")
    return of_rows


def _bits_of_rows(few: JaxprEqn, all_: JaxprEqn, rows: int) -> RandomBits | None:
    """The random bits of an equation; None if they are not for rows, or each row has a key."""
    has_own_keys = differing(few.invars[0], all_.invars[0])
    dims = differing(few.outvars[0], all_.outvars[0])
    if has_own_keys or not dims:
        return None
    bits = RandomBits(dims[0], tuple(all_.params["shape"]))
    if bits.shape[bits.dim] != rows:
        raise MixesRows("it draws random numbers along a dimension that joins rows with another")
    return bits


def _has_derivative(equation: JaxprEqn) -> bool:
    flow = control_flow(equation)
    return isinstance(flow, Call) and flow.has_derivative


def _equations_of_bits(
    jaxpr: AnyJaxpr, skip: Callable[[JaxprEqn], bool] = lambda equation: False
) -> list[JaxprEqn]:
    equations = iter_equations(jaxpr, skip)
    return [equation for equation in equations if equation.primitive.name == "random_bits"]


def draw_rows(
    key: PRNGKeyArray, bits: RandomBits, rows: Integer[Array, " rows"], bit_width: int
) -> Array:
    """The random bits of some rows, as `jax.random.bits` draws them for all."""
    high, low = _counters(bits, rows)
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
    low = augend[1] + addend[1]
    carry = (low < augend[1]).astype(jnp.uint32)
    return augend[0] + addend[0] + carry, low
