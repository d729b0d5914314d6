"""The arithmetic of the primitives that contract dimensions."""

from collections.abc import Callable
from math import prod
from typing import Any

from jax.extend.core import JaxprEqn


def multiply_adds(equation: JaxprEqn) -> int | None:
    """Counts the multiply-adds of a contraction; None for other equations.

    Zeros that pad or dilate the input of a convolution are counted.
    """
    rule = _RULES.get(equation.primitive.name)
    return None if rule is None else rule(equation)


def _shape(atom: Any) -> tuple[int, ...]:
    return atom.aval.shape


def _dot_general(equation: JaxprEqn) -> int:
    (contracted, _), _ = equation.params["dimension_numbers"]
    left = _shape(equation.invars[0])
    return prod(_shape(equation.outvars[0])) * prod(left[d] for d in contracted)


def _ragged_dot(equation: JaxprEqn) -> int:
    """Each row belongs to one group, whichever dimension the groups are along."""
    numbers = equation.params["ragged_dot_dimension_numbers"]
    (_, contracted), (_, batch) = numbers.dot_dimension_numbers
    counted = {*contracted, *batch, *numbers.rhs_group_dimensions}
    left, right = map(_shape, equation.invars[:2])
    return prod(left) * prod(size for d, size in enumerate(right) if d not in counted)


def _convolution(equation: JaxprEqn) -> int:
    kernel = _shape(equation.invars[1])
    taps = prod(kernel) // kernel[equation.params["dimension_numbers"].rhs_spec[0]]
    return prod(_shape(equation.outvars[0])) * taps


def _fused_attention(equation: JaxprEqn) -> int:
    """cuDNN attention: two products forward, five backward (the scores are recomputed)."""
    batch, queries, heads, head_dim = _shape(equation.invars[0])
    keys = _shape(equation.invars[1])[1]
    products = 5 if "bwd" in equation.primitive.name else 2
    return products * batch * heads * queries * keys * head_dim


_RULES: dict[str, Callable[[JaxprEqn], int]] = {
    "dot_general": _dot_general,
    "ragged_dot_general": _ragged_dot,
    "conv_general_dilated": _convolution,
    "dot_product_attention_fwd_wrapper": _fused_attention,
    "dot_product_attention_bwd_wrapper": _fused_attention,
}
