"""Products in 8 bits, with a scale for each operand, forward and backward.

Scales are of the operands at hand (current scaling), so that there is no state: the largest
magnitude of an operand becomes the largest number of the 8-bit type.

- `"float8"`: operands are e4m3 and cotangents e5m2, each with one scale. All three products, of the
  result and of both cotangents, are in 8 bits, and the operands are kept for the backward pass so.
- `"int8"`: an operand has a scale for each vector that is summed over. The product of the result,
  and that of the activations' cotangent, are in 8 bits; the weight's gradient is not.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero, custom_vjp_primal_tree_values
from jaxtyping import Array

Numbers = Literal["float8", "int8"]
Dims = tuple[int, ...]
Operand = Array | np.ndarray

_LARGEST = {
    # Those of the OCP's 8-bit formats, and of integers, a range that is symmetric.
    np.dtype(jnp.float8_e4m3fn): 448.0,
    np.dtype(jnp.float8_e5m2): 57344.0,
    np.dtype(np.int8): 127.0,
}
_OPERAND = {"float8": np.dtype(jnp.float8_e4m3fn), "int8": np.dtype(np.int8)}
_COTANGENT = np.dtype(jnp.float8_e5m2)  # of float8
_SMALLEST = 1e-30  # of scales, so that their inverse is finite


@dataclass(frozen=True)
class Contraction:
    """What `jax.lax.dot_general` computes: the dimensions of each operand that are summed over, and
    those that are common to both and to the result."""

    summed: tuple[Dims, Dims]
    batch: tuple[Dims, Dims]
    ranks: tuple[int, int]

    def free(self, side: int) -> Dims:
        """The dimensions of an operand that only it and the result have."""
        others = (*self.summed[side], *self.batch[side])
        return tuple(d for d in range(self.ranks[side]) if d not in others)

    def result_dims(self, side: int) -> Dims:
        """The dimensions of the result that are the free ones of an operand."""
        # In order: the batch, what only x has, what only y has.
        first = len(self.batch[0])
        if side == 1:
            first += len(self.free(0))
        return tuple(range(first, first + len(self.free(side))))

    @property
    def numbers(self) -> tuple[tuple[Dims, Dims], tuple[Dims, Dims]]:
        return self.summed, self.batch

    def of_cotangent(self, side: int) -> tuple["Contraction", Dims]:
        """The product of the result's cotangent with the other operand, which is the cotangent of
        the operand `side`, and the order of its dimensions in that operand."""
        other = 1 - side
        batch = tuple(range(len(self.batch[0])))
        rank = len(batch) + len(self.free(0)) + len(self.free(1))
        product = Contraction(
            (self.result_dims(other), self.free(other)),
            (batch, self.batch[other]),
            (rank, self.ranks[other]),
        )
        # What the other operand sums over comes last, in the order of its dimensions.
        pairs = dict(zip(self.summed[other], self.summed[side], strict=True))
        summed = tuple(pairs[d] for d in sorted(pairs))
        dims = (*self.batch[side], *self.free(side), *summed)
        return product, tuple(int(d) for d in np.argsort(dims))


@dataclass(frozen=True)
class Product:
    """A product in 8 bits. `weight` is the operand that is a weight, and `dtype` the result's."""

    numbers: Numbers
    contraction: Contraction
    weight: int
    dtypes: tuple[np.dtype, np.dtype]
    dtype: np.dtype


@dataclass(frozen=True)
class _Scaled:
    """An array of 8 bits and its scale, which has size 1 along the dimensions that share one."""

    array: Array
    scale: Array


jax.tree_util.register_dataclass(_Scaled, ["array", "scale"], [])


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def scaled_product(product: Product, x: Operand, y: Operand) -> Array:
    """`jax.lax.dot_general(x, y)` in 8 bits."""
    operands = _quantised_operands(product, x, y)
    return _multiply(product.contraction, *operands, product.dtype)


def _quantised_operands(product: Product, x: Operand, y: Operand) -> tuple[_Scaled, _Scaled]:
    dtype, (summed_x, summed_y) = _OPERAND[product.numbers], product.contraction.summed
    return _quantise(product, x, summed_x, dtype), _quantise(product, y, summed_y, dtype)


def _quantise(product: Product, x: Operand, summed: Dims, dtype: np.dtype) -> _Scaled:
    """An operand in 8 bits, which a product sums over some dimensions."""
    shared = summed
    if product.numbers == "float8":
        shared = tuple(range(x.ndim))
    most = _LARGEST[dtype]
    largest = jnp.max(jnp.abs(x), axis=shared, keepdims=True).astype(jnp.float32)
    scale = jnp.maximum(largest, _SMALLEST * most) / most
    parts = x.astype(jnp.float32) / scale
    if product.numbers == "int8":
        parts = jnp.round(parts)
    # What is not finite stays so in a scale, or here.
    return _Scaled(jnp.clip(parts, -most, most).astype(dtype), scale)


def _multiply(contraction: Contraction, x: _Scaled, y: _Scaled, dtype: np.dtype) -> Array:
    # Sums of 8-bit integers are exact in 32 bits; a float16 cannot hold sums of unscaled numbers.
    summed_in = np.dtype(np.float32)
    if x.array.dtype == np.int8:
        summed_in = np.dtype(np.int32)
    elif dtype == jnp.bfloat16:
        summed_in = dtype
    total = jax.lax.dot_general(
        x.array, y.array, contraction.numbers, preferred_element_type=summed_in
    )
    scale = _along_result(contraction, 0, x.scale) * _along_result(contraction, 1, y.scale)
    return (total.astype(jnp.float32) * scale).astype(dtype)


def _along_result(contraction: Contraction, side: int, scale: Array) -> Array:
    """The scale of an operand, with the dimensions of the result."""
    batch, free = contraction.batch[side], contraction.free(side)
    # Of size 1 along what is summed over, and along what only the other operand has.
    scale = scale.transpose((*batch, *free, *contraction.summed[side]))
    of_batch = scale.shape[: len(batch)]
    of_free = scale.shape[len(batch) : len(batch) + len(free)]
    of_other = (1,) * len(contraction.free(1 - side))
    if side == 0:
        return scale.reshape(*of_batch, *of_free, *of_other)
    return scale.reshape(*of_batch, *of_other, *of_free)


def _forward(product: Product, x: Any, y: Any) -> tuple[Array, tuple[Any, Any]]:
    # With `symbolic_zeros`, operands are pairs of a value and of whether it has a tangent.
    is_needed = y.perturbed, x.perturbed  # an operand, for the cotangent of the other one
    x, y = custom_vjp_primal_tree_values((x, y))
    operands = _quantised_operands(product, x, y)
    result = _multiply(product.contraction, *operands, product.dtype)
    if product.numbers == "int8":
        # Each product has scales along other dimensions.
        operands = x, y
    residuals: list[Any] = [None, None]
    for side in (0, 1):
        if is_needed[side]:
            residuals[side] = operands[side]
    return result, (residuals[0], residuals[1])


def _backward(
    product: Product, residuals: tuple[Any, Any], cotangent: Operand | SymbolicZero
) -> tuple[Array | None, Array | None]:
    if isinstance(cotangent, SymbolicZero):
        return None, None
    scaled: Operand | _Scaled = cotangent
    if product.numbers == "float8":
        scaled = _quantise(product, cotangent, (), _COTANGENT)
    of_x = _cotangent_of(product, 0, scaled, residuals[1])
    of_y = _cotangent_of(product, 1, scaled, residuals[0])
    return of_x, of_y


def _cotangent_of(product: Product, side: int, cotangent: Any, other: Any) -> Array | None:
    """The cotangent of an operand, or None if it is not needed."""
    if other is None:
        return None
    contraction, order = product.contraction.of_cotangent(side)
    dtype = product.dtypes[side]
    if product.numbers == "int8" and side == product.weight:
        other = other.astype(cotangent.dtype)
        total = jax.lax.dot_general(cotangent, other, contraction.numbers)
        return total.astype(dtype).transpose(order)
    if product.numbers == "int8":
        cotangent = _quantise(product, cotangent, contraction.summed[0], _OPERAND["int8"])
        other = _quantise(product, other, contraction.summed[1], _OPERAND["int8"])
    return _multiply(contraction, cotangent, other, dtype).transpose(order)


scaled_product.defvjp(_forward, _backward, symbolic_zeros=True)
