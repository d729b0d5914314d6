"""Loop-invariant weights whose gradient can be summed over the batch once, after the loop."""

from collections.abc import Callable
from math import prod

from jax.extend.core import Jaxpr, JaxprEqn, Var

from ...core._control_flow import Call, control_flow, open_jaxpr
from ...core._jaxpr import variables
from ..operations import Atom, shape_of
from ..operations._elementwise_rules import ELEMENTWISE


def can_hoist_gradient_sum(
    jaxpr: Jaxpr, var: Var, suits: Callable[[JaxprEqn], bool] = lambda equation: True
) -> bool:
    """Whether a jaxpr only multiplies by one of its inputs, or adds it, in equations that `suits`
    selects."""
    if var in variables(jaxpr.outvars):
        return False
    for equation in jaxpr.eqns:
        if var not in variables(equation.invars):
            continue
        if not suits(equation):
            return False
        called = gets_copies(equation)
        if called is not None:
            for atom, inside in zip(equation.invars, called.invars, strict=True):
                if atom is var and not can_hoist_gradient_sum(called, inside, suits):
                    return False
            continue
        if not _is_supported(equation, var):
            return False
        if rearranges(equation) and not can_hoist_gradient_sum(jaxpr, equation.outvars[0], suits):
            return False
    return True


def gets_copies(equation: JaxprEqn) -> Jaxpr | None:
    """What an equation calls with copies of weights in their place, if it calls anything so.

    A policy of `jax.checkpoint` may keep products with weights, and not those with copies.
    """
    flow = control_flow(equation)
    if not isinstance(flow, Call) or flow.has_derivative or flow.policy is not None:
        return None
    return open_jaxpr(flow.jaxpr)


def rearranges(equation: JaxprEqn) -> bool:
    """Whether an equation transposes, casts or scales a weight, or adds dimensions of size one."""
    name, operands = equation.primitive.name, list(map(shape_of, equation.invars))
    if name == "broadcast_in_dim":
        return prod(operands[0]) == prod(shape_of(equation.outvars[0]))
    if name == "dot_general":
        return () in operands
    return name in ("transpose", "convert_element_type")


def uses(equation: JaxprEqn, var: Atom) -> bool:
    """Whether an equation multiplies by a weight, or broadcasts it."""
    if equation.primitive.name in ELEMENTWISE:
        return shape_of(var) not in ((), shape_of(equation.outvars[0]))
    broadcasts = equation.primitive.name == "broadcast_in_dim" and not rearranges(equation)
    return broadcasts or equation.primitive.name == "dot_general"


def _is_supported(equation: JaxprEqn, var: Var) -> bool:
    """Whether an equation can have copies of a weight in place of the weight."""
    if equation.primitive.name == "dot_general":
        _, (batch, _) = equation.params["dimension_numbers"]
        return not batch and variables(equation.invars).count(var) == 1
    return rearranges(equation) or uses(equation, var)
