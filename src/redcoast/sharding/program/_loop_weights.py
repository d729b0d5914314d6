"""Loop-invariant weights whose gradient can be summed over the batch once, after the loop."""

from math import prod
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn

from ...core._jaxpr import variables
from ..operations._elementwise_rules import ELEMENTWISE
from ._graph import output


def can_hoist_gradient_sum(jaxpr: Jaxpr, var: Any) -> bool:
    """Whether a jaxpr only multiplies by one of its inputs, or adds it."""
    users = [equation for equation in jaxpr.eqns if var in variables(equation.invars)]
    return (
        var not in variables(jaxpr.outvars)
        and all(_is_supported(equation, var) for equation in users)
        and all(can_hoist_gradient_sum(jaxpr, e.outvars[0]) for e in users if rearranges(e))
    )


def rearranges(equation: JaxprEqn) -> bool:
    """Whether an equation transposes or casts a weight, or adds dimensions of size one."""
    if equation.primitive.name != "broadcast_in_dim":
        return equation.primitive.name in ("transpose", "convert_element_type")
    operand: Any = equation.invars[0].aval
    return prod(operand.shape) == prod(output(equation).shape)


def uses(equation: JaxprEqn, var: Any) -> bool:
    """Whether an equation multiplies by a weight, or broadcasts it."""
    if equation.primitive.name in ELEMENTWISE:
        return var.aval.shape != output(equation).shape and len(var.aval.shape) > 0
    broadcasts = equation.primitive.name == "broadcast_in_dim" and not rearranges(equation)
    return broadcasts or equation.primitive.name == "dot_general"


def _is_supported(equation: JaxprEqn, var: Any) -> bool:
    if equation.primitive.name == "dot_general":
        _, (batch, _) = equation.params["dimension_numbers"]
        return not batch and variables(equation.invars).count(var) == 1
    return rearranges(equation) or uses(equation, var)
