"""Where the rows of a batch are in the arrays of a layer."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from operator import index
from typing import Literal, SupportsIndex

from jax.extend.core import JaxprEqn

from ...core._control_flow import primitive_name
from ..operations import Atom, shape_of


class MixesRows(Exception):
    """Raised when a layer mixes the rows of the batch; `args[0]` says how."""


@dataclass(frozen=True)
class RowDim:
    """Where the rows of an array are: in dimension `dim`, of `outer * rows * inner` elements.

    Such a dimension is a reshape of three, of which the rows are the middle one. `outer` is None if
    the elements along the dimension are equal.
    """

    dim: int
    outer: int | None = 1
    inner: int = 1

    def at(self, dim: SupportsIndex) -> "RowDim":
        """The same rows in another dimension."""
        return replace(self, dim=index(dim))


class SumOfRows(Enum):
    """An array without rows that is the sum of what each row adds to it."""

    SUM = "sum"


SUM: Literal[SumOfRows.SUM] = SumOfRows.SUM
# `None` is the state of an array that all rows share.
State = RowDim | Literal[SumOfRows.SUM] | None
States = list[State]


@dataclass(frozen=True)
class EquationPair:
    """An equation of the layer for few rows, and the same for all rows."""

    few: JaxprEqn
    all: JaxprEqn

    @property
    def name(self) -> str:
        return primitive_name(self.few)


def differing(few: Atom, all_: Atom) -> list[int]:
    """The dimensions whose sizes differ."""
    few_shape, shape = shape_of(few), shape_of(all_)
    if len(few_shape) != len(shape):
        raise MixesRows("the rank of an array depends on the number of rows")
    return [d for d, size in enumerate(few_shape) if size != shape[d]]


def join_rows(pair: EquationPair, states: Sequence[State]) -> State:
    """The rows of arrays of the same shape, which have to be in the same place."""
    if SUM in states:
        if any(state is not SUM for state in states):
            raise MixesRows(f"`{pair.name}` combines a sum over rows with something else")
        return SUM
    joined: RowDim | None = None
    for state in states:
        if not isinstance(state, RowDim):
            continue
        # Equal elements can be combined with rows that are any factor of the dimension.
        if joined is None or (joined.outer is None and joined.dim == state.dim):
            joined = state
        elif state.dim != joined.dim or (state.outer is not None and state != joined):
            raise MixesRows(f"`{pair.name}` combines rows with other rows")
    return joined
