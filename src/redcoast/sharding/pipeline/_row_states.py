"""Where the rows of a batch are in the arrays of a layer."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from operator import index
from typing import Any, Literal, SupportsIndex

from jax.extend.core import JaxprEqn

from ...core._control_flow import primitive_name


class Mixed(Exception):
    """Raised when a layer mixes the rows of the batch; `args[0]` says how."""


@dataclass(frozen=True)
class Rows:
    """Where the rows of an array are: in dimension `dim`, of `outer * rows * inner` elements.

    Such a dimension is a reshape of three, of which the rows are the middle one. `outer` is None if
    the elements along the dimension are equal.
    """

    dim: int
    outer: int | None = 1
    inner: int = 1

    def at(self, dim: SupportsIndex) -> "Rows":
        """The same rows in another dimension."""
        return replace(self, dim=index(dim))


class RowSum(Enum):
    """An array without rows that is the sum of what each row adds to it."""

    SUM = "sum"


SUM: Literal[RowSum.SUM] = RowSum.SUM
# `None` is the state of an array that all rows share.
State = Rows | Literal[RowSum.SUM] | None
States = list[State]


@dataclass(frozen=True)
class Pair:
    """An equation of the layer for few rows, and the same for all rows."""

    few: JaxprEqn
    all: JaxprEqn

    @property
    def name(self) -> str:
        return primitive_name(self.few)


def differing(few: Any, all_: Any) -> list[int]:
    """The dimensions whose sizes differ."""
    if len(few.shape) != len(all_.shape):
        raise Mixed("the rank of an array depends on the number of rows")
    sizes = zip(few.shape, all_.shape, strict=True)
    return [d for d, (one, other) in enumerate(sizes) if one != other]


def join_rows(pair: Pair, states: Sequence[State]) -> State:
    """The rows of arrays of the same shape, which have to be in the same place."""
    if SUM in states:
        if any(state is not SUM for state in states):
            raise Mixed(f"`{pair.name}` combines a sum over rows with something else")
        return SUM
    found = {state for state in states if isinstance(state, Rows)}
    known = {state for state in found if state.outer is not None}
    if len({state.dim for state in found}) > 1 or len(known) > 1:
        raise Mixed(f"`{pair.name}` combines rows with other rows")
    return next(iter(known or found), None)
