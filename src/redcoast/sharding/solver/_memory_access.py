"""Which operations read from memory and write to it, and how compilers change what they read."""

from collections.abc import Sequence
from itertools import permutations
from math import ceil

import jax.numpy as jnp
from jax.extend.core import JaxprEqn
from jax.lax import Precision

from ...core._control_flow import primitive_name
from ...core._jaxpr import struct_of
from ..operations import Rule, all_factors
from ..operations._rule_table import LARGE_OPERATIONS, REDUCTIONS
from ..program._walk import Scope

# Their operands and results are in memory; so are those of operations without a rule.
_LARGE = LARGE_OPERATIONS | frozenset(
    """
    cholesky dot_product_attention_bwd_splash dot_product_attention_bwd_wrapper
    dot_product_attention_fwd_splash dot_product_attention_fwd_wrapper eig eigh fft
    householder_product lu pallas_call qr schur scatter-max scatter-min scatter-mul scatter_max
    scatter_min scatter_mul sort svd top_k triangular_solve
    """.split()  # noqa: SIM905
)
# Their results are in memory, and what they read is fused into them.
WRITTEN = REDUCTIONS | frozenset(
    """
    concatenate cumlogsumexp cummax cummin cumprod cumsum dynamic_update_slice random_bits
    random_gamma reduce_window_max reduce_window_sum select_and_scatter_add threefry2x32
    """.split()  # noqa: SIM905
)


def uses_memory(scope: Scope, index: int) -> bool:
    """Whether an operation reads from memory and writes to it."""
    rule = scope.rules.get(index)
    is_large = primitive_name(scope.jaxpr.eqns[index]) in _LARGE
    if rule is None:
        return is_large or index not in scope.inner
    # Of a product that sums nothing, compilers multiply each pair of elements where it is used.
    is_outer = rule.is_product and not rule.reduced
    return is_large and not is_outer


def has_outer_gradient(rule: Rule | None, place: int) -> bool:
    """Whether the gradient of an operand of a product sums nothing."""
    if rule is None or not rule.is_product:
        return False
    # The gradient sums over what the other operand alone has.
    return all_factors(rule.operands[1 - place]) <= all_factors(rule.operands[place])


def copied_operands(rule: Rule | None) -> list[int]:
    """The operands of a product that are copied, so that its batch dimensions come first."""
    copied: list[int] = []
    if rule is None or not rule.is_product:
        return copied
    left, right = rule.operands
    batch = [dimension for dimension in rule.results[0] if dimension in left and dimension in right]
    for place, dimensions in enumerate(rule.operands):
        if list(dimensions[: len(batch)]) != batch:
            copied.append(place)
    return copied


def copies_cotangent(rule: Rule | None, place: int) -> bool:
    """Whether XLA for CPU copies the cotangent of a product for the gradient of an operand.

    The gradient of the right operand sums over the first dimensions of the cotangent, which the
    copy has last. One such dimension beside one other is read in either order without a copy, but
    not several, such as rows and tokens.
    """
    if rule is None or not rule.is_product or place == 0:
        return False
    left, right = map(set, rule.operands)
    summed = [dimension for dimension in left - right if rule.size(dimension) > 1]
    kept = [dimension for dimension in right - left if rule.size(dimension) > 1]
    return min(len(summed), len(kept)) > 0 and len(summed) + len(kept) > 2


def is_product_or_convolution(equation: JaxprEqn) -> bool:
    return equation.primitive.name in ("dot_general", "conv_general_dilated")


def reads_narrow(equation: JaxprEqn) -> bool:
    """Whether a TPU computes a product of float32 numbers from bfloat16 ones."""
    if not is_product_or_convolution(equation):
        return False
    if any(struct_of(operand).dtype != jnp.float32 for operand in equation.invars):
        return False
    of_operands = equation.params["precision"]
    if not isinstance(of_operands, tuple):
        of_operands = (of_operands,)
    return set(of_operands) <= {None, Precision.DEFAULT}


def squares(equation: JaxprEqn) -> bool:
    return primitive_name(equation) == "square" or equation.params.get("y") == 2


# The rows and columns of a tile of a TPU's memory.
_TILE = 8, 128


def padding(shape: Sequence[int]) -> float:
    """How much larger an array is in the memory of a TPU, which has tiles of 8 x 128 elements, or
    of 1, 2 or 4 x 128 for so few rows.

    The compiler chooses the two dimensions of tiles; those that need least are assumed.
    """
    least = 1.0 if len(shape) < 2 else float("inf")
    for row, column in permutations(range(len(shape)), 2):
        tile = min(_TILE[0], 1 << (shape[row] - 1).bit_length())
        rows = ceil(shape[row] / tile) * tile
        columns = ceil(shape[column] / _TILE[1]) * _TILE[1]
        least = min(least, rows * columns / (shape[row] * shape[column]))
    return least
