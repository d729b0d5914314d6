"""An equation that is evaluated again, with what is known about the values that it reads."""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
from jax.extend.core import JaxprEqn, Var
from jax.sharding import PartitionSpec as P

from ..operations import Atom
from ..program._graph import Value
from ..program._trace import Arrays
from ..program._walk import Scope
from ._shardings import Shardings

# The copies of arrays that are looked up in, by the array and the axes that it is split over.
Tables = dict[tuple[Var, tuple[str, ...]], jax.Array]


@dataclass(frozen=True)
class BoundEquation:
    """An equation with its operands, in the scope of its jaxpr, with the scopes of those it calls.

    `stored` selects the operands that are arrays of the model, or large constants, as they are
    stored: they are not gathered yet. `specs` are those by which operands are FSDP-sharded, if
    known. `tables` are those of all lookups in the jaxpr.
    """

    # By `id`, pipelines know equations: it is the one of the traced program.
    equation: JaxprEqn
    scope: Scope
    inner: list[Scope]
    shardings: Shardings
    operands: Arrays
    stored: list[bool]
    specs: list[P | None]
    tables: Tables

    @property
    def values(self) -> list[Value]:
        """The values of the operands of an equation without literals."""
        return values_of(self.scope, self.equation.invars)

    @property
    def results(self) -> list[Value]:
        return values_of(self.scope, self.equation.outvars)


def values_of(scope: Scope, atoms: Sequence[Atom]) -> list[Value]:
    return list(map(scope.values.__getitem__, atoms))
