"""Scans whose iterations do not depend on each other, as those of `jax.lax.map`."""

from collections import Counter

from jax.extend.core import JaxprEqn, Var

from ...core._control_flow import Scan, open_jaxpr
from ...core._jaxpr import variables
from ._rule import shape_of

_ADDITIONS = frozenset(["add", "add_any"])


def sums_over_iterations(scan: Scan) -> tuple[bool, ...] | None:
    """For each carried value, whether it is a sum over all iterations; if not, none changes it.

    None if an iteration depends on another one.
    """
    body = open_jaxpr(scan.body)
    _, carried, _ = scan.split(body.invars)
    producers = {var: equation for equation in body.eqns for var in equation.outvars}
    uses = Counter(variables(body.outvars))
    for equation in body.eqns:
        uses.update(variables(equation.invars))
    sums: list[bool] = []
    for var, after in zip(carried, body.outvars[: scan.carry], strict=True):
        if after is var:
            sums.append(False)
            continue
        if not isinstance(after, Var) or after not in producers:
            return None
        # What is summed so far may not be used otherwise: it has another value in each iteration.
        if not _adds_to(producers[after], var) or uses[var] > 1 or uses[after] > 1:
            return None
        sums.append(True)
    return tuple(sums)


def _adds_to(equation: JaxprEqn, var: Var) -> bool:
    """Whether an equation adds something to a variable."""
    is_same_shape = shape_of(equation.outvars[0]) == shape_of(var)
    adds = equation.primitive.name in _ADDITIONS and is_same_shape
    return adds and var in variables(equation.invars)
