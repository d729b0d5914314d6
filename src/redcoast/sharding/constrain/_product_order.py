"""The order in which the dimensions of products take the axes of a split example.

In a table of pairs, such as the rows and columns of a pair matrix, both dimensions could be split,
and the first one is. A product that is transposed afterwards, as by `jnp.einsum`, is split along
the dimension that is the first one then. Otherwise an all-to-all would turn every product.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import chain

from jax.extend.core import JaxprEqn, Var

from ...core._jaxpr import struct_of, variables
from ..operations import rule_of
from ..program._graph import Value
from ..program._walk import Scope


def orders_of_products(scope: Scope) -> Mapping[Value, tuple[int, ...]]:
    """The order of the dimensions of each product that is transposed before any other use."""
    orders: dict[Value, tuple[int, ...]] = {}
    # The equations that read each variable; None stands for the results.
    uses: dict[Var, list[JaxprEqn | None]] = defaultdict(list)
    for equation in scope.jaxpr.eqns:
        for var in variables(equation.invars):
            uses[var].append(equation)
    for var in variables(scope.jaxpr.outvars):
        uses[var].append(None)
    for equation in scope.jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            (product,) = equation.outvars
            transpose = _only_transpose(product, uses)
            if transpose is not None:
                order = _order(equation, tuple(transpose.params["permutation"]))
                orders[scope.values[product]] = order
    for inner in scope.inner.values():
        for body in inner:
            orders |= orders_of_products(body)
    return orders


def _order(equation: JaxprEqn, permutation: Sequence[int]) -> tuple[int, ...]:
    """The dimensions of a product: first those of the operand whose come first in the transpose.

    Dimensions of one operand keep their order, so that it is used as it is split.
    """
    (contracted, _), (batched, _) = equation.params["dimension_numbers"]
    batch = len(batched)
    rest = struct_of(equation.invars[0]).ndim - len(contracted)
    # A product is (batch, rest of the first operand, rest of the second one).
    of_first, of_second = range(batch, rest), range(rest, len(permutation))
    groups = [group for group in (of_first, of_second) if group]
    groups.sort(key=lambda group: min(map(permutation.index, group)))
    return (*range(batch), *chain(*groups))


def _only_transpose(var: Var, uses: Mapping[Var, list[JaxprEqn | None]]) -> JaxprEqn | None:
    """The transpose that alone reads a variable, perhaps after it is converted."""
    while len(uses[var]) == 1:
        (equation,) = uses[var]
        if equation is None or len(equation.invars) > 1 or len(equation.outvars) > 1:
            return None
        if equation.primitive.name == "transpose":
            return equation
        # What keeps the dimensions as they are, such as a conversion.
        rule = rule_of(equation)
        if rule is None or rule.operands != rule.results:
            return None
        (var,) = equation.outvars
    return None
