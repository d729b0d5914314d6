"""Scans whose iterations do not depend on each other, as those of `jax.lax.map`."""

from collections import Counter
from collections.abc import Mapping, Sequence

from jax.extend.core import JaxprEqn, Var

from ...core._control_flow import Scan, open_jaxpr
from ...core._jaxpr import variables
from ._rule import Atom, shape_of

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
        # What is summed so far may not be used otherwise: it has another value in each iteration.
        if uses[var] > 1 or not _adds_to(var, after, producers, uses):
            return None
        sums.append(True)
    return tuple(sums)


def _adds_to(
    var: Var, result: Atom, producers: Mapping[Var, JaxprEqn], uses: Mapping[Var, int]
) -> bool:
    """Whether a result is a variable to which others are added one after the other."""
    if result is var:
        return True
    if not isinstance(result, Var) or result not in producers or uses[result] > 1:
        return False
    equation = producers[result]
    if shape_of(result) != shape_of(var):
        return False
    terms: Sequence[Atom] = ()
    if equation.primitive.name in _ADDITIONS:
        terms = equation.invars
    elif equation.primitive.name == "sub":
        terms = equation.invars[:1]
    return any(_adds_to(var, term, producers, uses) for term in terms)
