"""Weights that are stored as integers of 4 or 8 bits with scales, for training adapters.

The 4-bit numbers are NF4 (Dettmers et al., 2023, <https://arxiv.org/abs/2305.14314>): quantiles of
a normal distribution. A weight is dequantised where it is used, in the forward and in the backward
pass, and only its integers are kept between them.
"""

import math
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt, UInt32

from ..core._low_rank import AbstractQuantised

Numbers = Literal["nf4", "int8"]
# The values of the 4-bit codes, as bitsandbytes has them.
NF4 = np.array(
    """
    -1.0 -0.6961928009986877 -0.5250730514526367 -0.39491748809814453 -0.28444138169288635
    -0.18477343022823334 -0.09105003625154495 0.0 0.07958029955625534 0.16093020141124725
    0.24611230194568634 0.33791524171829224 0.44070982933044434 0.5626170039176941
    0.7229568362236023 1.0
    """.split(),  # noqa: SIM905
    np.float32,
)
# The largest number of 4-bit numbers that have one scale.
_BLOCK = 64


class QuantisedWeight(AbstractQuantised):
    """A weight as integers and scales. It replaces the weight in a model.

    Dimensions are those of the weight, so that both arrays are sharded like it. Along one of them,
    which is summed over in products, several numbers have one scale, and a byte has two 4-bit
    codes, the first one in its upper bits.

    - `codes`: the integers.
    - `scales`: the scale of each block, as the bits of a float32: an array that is not of a
        floating type is neither trained nor cast to a compute dtype.
    - `numbers`: `"nf4"` or `"int8"`.
    - `axis`: the dimension of the blocks, counted from the last, as -1.
    - `dtype`: the dtype of the weight before it was quantised.
    """

    codes: UInt[Array, "..."] | Int[Array, "..."]
    scales: UInt32[Array, "..."]
    numbers: Numbers = eqx.field(static=True)
    axis: int = eqx.field(static=True)
    dtype: np.dtype = eqx.field(static=True)

    @property
    def shape(self) -> tuple[int, ...]:
        shape = list(self.codes.shape)
        if self.numbers == "nf4":
            shape[self.axis] *= 2
        return tuple(shape)

    @property
    def ndim(self) -> int:
        return self.codes.ndim

    def dequantised(self, dtype: Any = None) -> Float[Array, "..."]:
        """Returns the weight: products in float32, rounded once to `dtype`, by default its own."""
        at = self.codes.ndim + self.axis
        scales = jax.lax.bitcast_convert_type(self.scales, jnp.float32)
        before, behind = self.codes.shape[:at], self.codes.shape[at + 1 :]
        # A block has this number of bytes, each of one 8-bit number or of two 4-bit numbers.
        blocks, size = scales.shape[at], self.codes.shape[at] // scales.shape[at]
        codes = self.codes.reshape(*before, blocks, size, *behind)
        scales = jnp.expand_dims(scales, at + 1)
        if self.numbers == "nf4":
            along = jnp.array([4, 0], jnp.uint8).reshape(2, *[1] * len(behind))
            shifts = jnp.expand_dims(along, range(at + 2))
            codes = (jnp.expand_dims(codes, at + 2) >> shifts) & jnp.uint8(15)
            # Codes are looked up by selections: TPUs have no fast gather.
            table: list[Any] = [jnp.float32(x) for x in NF4]
            for bit in range(4):
                is_set = (codes >> jnp.uint8(bit)) & jnp.uint8(1) == 1
                # One bit of the code halves the candidates; four select one of 16.
                pairs = zip(table[::2], table[1::2], strict=True)
                table = [jnp.where(is_set, odd, even) for even, odd in pairs]
            values = table[0] * jnp.expand_dims(scales, at + 1)
        else:
            values = codes.astype(jnp.float32) * scales  # (*before, blocks, size, *behind)
        return values.reshape(self.shape).astype(dtype or self.dtype)

    def __matmul__(self, x: Array) -> Array:
        return self.multiply(lambda weight, x: weight @ x, x)

    def __jax_array__(self) -> Array:
        return self.dequantised()

    def multiply(self, fn: Any, x: Array) -> Array:
        """Returns `fn(weight, x)`, of which only `x` and the integers are kept for the backward
        pass."""
        run = lambda weight, x: fn(weight.dequantised(x.dtype), x)
        return jax.checkpoint(run)(self, x)


def quantised_weight(weight: Float[Array, "..."], numbers: Numbers, axis: int) -> QuantisedWeight:
    """Quantises a weight. Blocks are along `axis`, counted from the last dimension, as -1.

    Raises `ValueError` if the size of this dimension is odd and two codes share a byte.
    """
    size = weight.shape[axis]
    if numbers == "nf4" and size % 2:
        raise ValueError(
            f"A weight of shape {weight.shape} cannot be stored in NF4: two numbers share a byte, "
            f"but dimension {weight.ndim + axis} has {size}. Leave it out of `targets`, or use "
            "'int8'."
        )
    block = size
    if numbers == "nf4":
        block = math.gcd(size, _BLOCK)
    at = weight.ndim + axis
    shape = (*weight.shape[:at], size // block, block, *weight.shape[at + 1 :])
    blocks = weight.astype(jnp.float32).reshape(shape)
    largest = jnp.max(jnp.abs(blocks), axis=at + 1)  # of each block
    inverse = 1 / jnp.where(largest == 0, 1, largest)  # a block of zeros stays one
    parts = blocks * jnp.expand_dims(inverse, at + 1)
    if numbers == "nf4":
        # A code is the number of midpoints below the value, since the values are sorted.
        codes = jnp.zeros(parts.shape, jnp.uint8)
        for middle in (NF4[1:] + NF4[:-1]) / 2:
            codes = codes + (parts > jnp.float32(middle)).astype(jnp.uint8)
        codes = codes.reshape(*shape[: at + 1], block // 2, 2, *shape[at + 2 :])
        upper, lower = (jnp.take(codes, i, axis=at + 2) for i in (0, 1))
        codes, scales = (upper << jnp.uint8(4)) | lower, largest
    else:
        # One code less than int8 has, so that both signs have the same range.
        codes, scales = jnp.round(parts * 127).astype(jnp.int8), largest / 127
    codes = codes.reshape(*weight.shape[:at], -1, *weight.shape[at + 1 :])
    bits = jax.lax.bitcast_convert_type(scales, jnp.uint32)
    return QuantisedWeight(codes, bits, numbers, axis, np.dtype(weight.dtype))


def is_quantised(x: object) -> bool:
    return isinstance(x, QuantisedWeight)


def unquantised(weight: Array | QuantisedWeight) -> Float[Array, "..."]:
    if isinstance(weight, QuantisedWeight):
        return weight.dequantised()
    return weight
