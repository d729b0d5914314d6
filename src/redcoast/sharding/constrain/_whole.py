"""Gathers operands of products that need all of a sequence that is split.

In attention, scores have two dimensions of tokens, of which that of the queries stays split. The
keys and values are needed as a whole by every device.
"""

from collections.abc import Sequence
from typing import Any

from jax.extend.core import JaxprEqn, Literal

from ..program._graph import Value
from ..program._walk import Scope
from ._shardings import Shardings


def gather_operands(
    equation: JaxprEqn, scope: Scope, shardings: Shardings, operands: Sequence[Any]
) -> list[Any]:
    """Replicates operands of a `dot_general` along a split dimension that does not stay split."""
    if any(isinstance(atom, Literal) for atom in equation.invars):
        return list(operands)
    values = [scope.values[atom] for atom in equation.invars]
    split = [shardings.batch_dim(value) for value in values]
    kept = shardings.batch_dim(scope.values[equation.outvars[0]])
    places = _places(equation, values)
    result = []
    for one, (x, value) in enumerate(zip(operands, values, strict=True)):
        if (d := split[one]) is None:
            result.append(x)
            continue
        partner = places[one][d]
        stays = partner == kept if isinstance(partner, int) else split[1 - one] == partner[0]
        result.append(x if stays else shardings.gather(x, value, d))
    return result


def _places(equation: JaxprEqn, values: Sequence[Value]) -> list[list[Any]]:
    """For each dimension of both operands its place in the result; if it is summed over, a list
    with the dimension of the other operand."""
    sums, batch = equation.params["dimension_numbers"]
    found: list[list[Any]] = [[None] * len(value.dims) for value in values]
    for one in (0, 1):
        for mine, theirs in zip(sums[one], sums[1 - one], strict=True):
            found[one][mine] = [theirs]
        for place, d in enumerate(batch[one]):
            found[one][d] = place
    place = len(batch[0])
    for one in (0, 1):
        for d, known in enumerate(found[one]):
            if known is None:
                found[one][d] = place
                place += 1
    return found
