"""Draws for some rows the random numbers that are drawn for all rows on one device.

JAX's default generator, threefry, makes each number from the key and from the number's place in the
array. Those of some rows need no others.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn
from jax.extend.random import threefry2x32_p
from jaxtyping import Array, Integer, PRNGKeyArray, UInt32

from ...core._control_flow import AnyJaxpr, Call, control_flow
from ...core._jaxpr import iter_equations
from ._row_states import Mixed, differing


@dataclass(frozen=True)
class Draw:
    """Random numbers for rows: their dimension, and the shape of those for all rows."""

    dim: int
    shape: tuple[int, ...]


def find_draws(small: AnyJaxpr, few: AnyJaxpr, all_: AnyJaxpr, rows: int) -> Mapping[int, Draw]:
    """The draws of a layer for rows, by the `id` of their equation in `small`.

    The three are the layer for the rows of one microbatch, for few, and for all of the `rows` of
    the batch. Raises `Mixed`.
    """
    found: dict[int, Draw | None] = {}
    for one, other, equation in zip(*map(_draws, (small, few, all_)), strict=True):
        own_keys = differing(other.invars[0].aval, equation.invars[0].aval)  # a key for each row
        dims = differing(other.outvars[0].aval, equation.outvars[0].aval)
        draw = Draw(dims[0], tuple(equation.params["shape"])) if dims and not own_keys else None
        if draw is not None and draw.shape[draw.dim] != rows:
            raise Mixed("it draws random numbers along a dimension that joins rows with another")
        if found.setdefault(id(one), draw) != draw:
            raise Mixed("it draws random numbers of the same shape for rows and for something else")
    inside = [id(one) for one in _draws(small, skip=_has_derivative)]
    draws = {place: draw for place, draw in found.items() if draw is not None}
    if draws.keys() - inside:
        raise Mixed("it draws random numbers for rows in a function with a custom derivative")
    return draws


def _has_derivative(equation: JaxprEqn) -> bool:
    flow = control_flow(equation)
    return isinstance(flow, Call) and flow.has_derivative


def _draws(
    jaxpr: AnyJaxpr, skip: Callable[[JaxprEqn], bool] = lambda equation: False
) -> list[JaxprEqn]:
    equations = iter_equations(jaxpr, skip)
    return [equation for equation in equations if equation.primitive.name == "random_bits"]


def draw_rows(
    key: PRNGKeyArray, draw: Draw, rows: Integer[Array, " rows"], bit_width: int
) -> Array:
    """The random bits of some rows, as `jax.random.bits` draws them for all."""
    high, low = _places(draw, rows)
    one, two = (jnp.broadcast_to(x, high.shape) for x in jax.random.key_data(key))
    bits = threefry2x32_p.bind(one, two, high, low)
    if bit_width == 64:
        high, low = (x.astype(jnp.uint64) for x in bits)
        return jax.lax.shift_left(high, jnp.uint64(32)) | low
    return (bits[0] ^ bits[1]).astype(f"uint{bit_width}")


def _places(draw: Draw, rows: Array) -> tuple[UInt32[Array, "..."], UInt32[Array, "..."]]:
    """The places of the numbers in the array for all rows, as the halves of 64 bits."""
    shape = (*draw.shape[: draw.dim], rows.shape[0], *draw.shape[draw.dim + 1 :])
    high = low = jnp.zeros(shape, jnp.uint32)
    for d in range(len(shape)):
        at = rows.astype(jnp.uint32) if d == draw.dim else jnp.arange(shape[d], dtype=jnp.uint32)
        more = _times(at, prod(draw.shape[d + 1 :]))
        more = [jnp.expand_dims(x, [i for i in range(len(shape)) if i != d]) for x in more]
        high, low = _add((high, low), [jnp.broadcast_to(x, shape) for x in more])
    return high, low


def _times(x: UInt32[Array, " n"], by: int) -> tuple[Array, Array]:
    """The product with a number below 2**64, as the halves of 64 bits."""
    low, high = x & jnp.uint32(0xFFFF), x >> jnp.uint32(16)
    total = jnp.zeros_like(x), jnp.zeros_like(x)
    for place in range(4):
        part = jnp.uint32(by >> (16 * place) & 0xFFFF)
        total = _add(total, _shifted(low * part, 16 * place))
        total = _add(total, _shifted(high * part, 16 * (place + 1)))
    return total


def _shifted(x: Array, bits: int) -> tuple[Array, Array]:
    """32 bits shifted to the left, as the halves of 64 bits."""
    if bits >= 64:
        return jnp.zeros_like(x), jnp.zeros_like(x)
    if bits >= 32:
        return x << jnp.uint32(bits - 32), jnp.zeros_like(x)
    return (x >> jnp.uint32(32 - bits) if bits else jnp.zeros_like(x)), x << jnp.uint32(bits)


def _add(one: Sequence[Array], other: Sequence[Array]) -> tuple[Array, Array]:
    low = one[1] + other[1]
    return one[0] + other[0] + (low < one[1]).astype(jnp.uint32), low
