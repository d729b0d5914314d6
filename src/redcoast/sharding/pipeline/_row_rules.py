"""Where the rows of a batch are in the arrays of a layer, and what operations do with them.

A dimension of rows may only be carried along, or summed over at the end. What sorts, cuts or
numbers the rows would give another result for a part of the batch than for all of it.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Literal, NamedTuple

import jax
from jax.extend.core import JaxprEqn

from ...core._control_flow import primitive_name
from ..operations import Atom, Dimension, Dimensions, Factor, Rule, all_factors, rule_of, shape_of


class MixesRows(Exception):
    """Raised when a layer mixes the rows of the batch; `args[0]` says how."""


@dataclass(frozen=True)
class RowDim:
    """Where the rows of an array are: in dimension `dim`, of `outer * rows * inner` elements.

    `dim` is counted from the last dimension, which is -1, so that it is the same in a stack of
    arrays and in an iteration over the stack. The dimension is a reshape of three, of which the
    rows are the middle one. `outer` is None if the elements along the dimension are equal.
    """

    dim: int
    outer: int | None = 1
    inner: int = 1

    def place_in(self, atom: Atom) -> int:
        """The number of the dimension in an array."""
        return self.dim + len(shape_of(atom))


class RowSum(Enum):
    """An array without rows that is the sum of what each row adds to it."""

    SUM = "sum"


ROW_SUM: Literal[RowSum.SUM] = RowSum.SUM
# `None` is the state of an array that all rows share.
RowState = RowDim | Literal[RowSum.SUM] | None
RowStates = list[RowState]


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


def join_rows(states: Sequence[RowState]) -> RowState:
    """The rows of an array that is one of several, which have to have them in the same place."""
    if ROW_SUM in states:
        if any(state is not ROW_SUM for state in states):
            raise MixesRows("a branch or a loop has a sum over rows or something else")
        return ROW_SUM
    joined: RowDim | None = None
    for state in states:
        if not isinstance(state, RowDim):
            continue
        # Equal elements can be combined with rows that are any factor of the dimension.
        if joined is None or (joined.outer is None and joined.dim == state.dim):
            joined = state
        elif state.dim != joined.dim or (state.outer is not None and state != joined):
            raise MixesRows("a branch or a loop has rows in several places")
    return joined


class _WithinFactor(NamedTuple):
    """The rows within a factor, which is a product of `outer`, the rows and `inner`.

    `outer` is None if the elements along the factor are equal.
    """

    factor: Factor
    outer: int | None
    inner: int


def apply_rule(pair: EquationPair, inputs: Sequence[RowState]) -> list[RowState]:
    """Where the rows of the results of an operation on rows, or on sums over rows, are."""
    name, count = pair.name, len(pair.few.outvars)
    if name == "sharding_constraint":
        raise MixesRows("it constrains the sharding of rows itself")
    if name == "random_bits" and inputs[0] is None:
        return [_random_bits(pair)]
    rule = rule_of(pair.few)
    if rule is None:
        raise MixesRows(f"`{name}` is applied to rows")
    if ROW_SUM in inputs:
        return [_linear(name, rule, inputs)] * count
    by_operand: dict[int, _WithinFactor] = {}
    for operand, state in enumerate(inputs):
        if isinstance(state, RowDim):
            dimension = rule.operands[operand][state.dim]
            by_operand[operand] = _within_factor(pair, rule, dimension, state)
    if not by_operand:
        # An array that is created with as many rows as the batch, all of them equal.
        dim = _dim_of_rows(pair)
        factors = frozenset(rule.results[0][dim])
        if factors <= rule.repeated:
            return [RowDim(dim, None)] * count
        if not rule.operands and factors & rule.indexed:
            raise MixesRows(f"`{name}` numbers the rows")
        raise MixesRows(f"`{name}` creates an array with a row for each example")
    # The rows of all operands have to be at the same place of the same factor.
    rows, *others = by_operand.values()
    for other in others:
        # Equal elements can be combined with rows at any place in the factor.
        if rows.outer is None and other.factor == rows.factor:
            rows = other
        elif other.factor != rows.factor or (other.outer is not None and other != rows):
            raise MixesRows(f"`{name}` combines rows with other rows")
    if rows.factor in rule.reduced:
        return [_sum_over_rows(name, rule, by_operand.keys())] * count
    for operand, dimensions in enumerate(rule.operands):
        if inputs[operand] is None and rows.factor in all_factors(dimensions):
            raise MixesRows(f"`{name}` combines rows with an array of as many elements")
    if not rule.is_carried(rows.factor):
        raise MixesRows(f"`{name}` is applied along rows")
    return [_rows_of_result(rule, dimensions, rows) for dimensions in rule.results]


def _linear(name: str, rule: Rule, inputs: Sequence[RowState]) -> RowState:
    """Sums of what parts of the batch add are only equal to the sum of all in a linear function."""
    if any(isinstance(state, RowDim) for state in inputs):
        raise MixesRows(f"`{name}` combines a sum over rows with rows")
    # As `a - b` of two sums is, and `a * b` is not.
    sums = frozenset(operand for operand, state in enumerate(inputs) if state is ROW_SUM)
    if sums not in rule.linear:
        raise MixesRows(f"`{name}` is applied to a sum over rows, and is not linear")
    return ROW_SUM


def _within_factor(
    pair: EquationPair, rule: Rule, dimension: Dimension, rows: RowDim
) -> _WithinFactor:
    """The factor of a dimension that the rows are in."""
    if rows.outer is None:
        factor = dimension[0]
        if len(dimension) > 1:
            # A reshape of equal rows has them in the factor whose size follows from their number.
            factor = rule.results[0][_dim_of_rows(pair)][0]  # the slowest
        return _WithinFactor(factor, None, 1)
    count = rule.size(dimension) // (rows.outer * rows.inner)
    slower = 1  # the elements of the factors before this one
    # The first factor that goes beyond the elements before the rows has the rows.
    for factor in dimension:
        own = rule.sizes[factor]
        if slower * own > rows.outer:
            outer, remainder = divmod(rows.outer, slower)
            if remainder == 0 and own % (outer * count) == 0:
                return _WithinFactor(factor, outer, own // (outer * count))
            break
        slower *= own
    raise MixesRows(f"`{pair.name}` does not keep the elements of a row together")


def _sum_over_rows(name: str, rule: Rule, with_rows: Collection[int]) -> RowState:
    """The state of a result that is reduced over rows, which are in the operands `with_rows`."""
    if not rule.sums:
        raise MixesRows(f"`{name}` reduces over rows")
    for group in rule.linear:
        # What is added to the sum, such as an array that is scattered to, would be added again
        # with each part of the batch.
        if not group.isdisjoint(with_rows) and not group.issubset(with_rows):
            raise MixesRows(f"`{name}` sums rows with an array of as many elements")
    for operand, dimensions in enumerate(rule.operands):
        if operand not in with_rows and all_factors(dimensions) & rule.reduced:
            raise MixesRows(f"`{name}` sums over rows with an array of as many elements")
    return ROW_SUM


def _rows_of_result(rule: Rule, dimensions: Dimensions, rows: _WithinFactor) -> RowState:
    """The rows of a result; None if it has no dimension with their factor."""
    for d, dimension in enumerate(dimensions):
        if rows.factor not in dimension:
            continue
        place = d - len(dimensions)
        if rows.outer is None:
            return RowDim(place, None)
        index = dimension.index(rows.factor)
        slower, faster = rule.size(dimension[:index]), rule.size(dimension[index + 1 :])
        return RowDim(place, slower * rows.outer, rows.inner * faster)
    return None


def _dim_of_rows(pair: EquationPair) -> int:
    """The dimension of the result whose size depends on the number of rows, from the last."""
    dims = differing(pair.few.outvars[0], pair.all.outvars[0])
    if len(dims) != 1:
        raise MixesRows(f"`{pair.name}` makes an array whose size depends on the number of rows")
    return dims[0] - len(shape_of(pair.few.outvars[0]))


def _random_bits(pair: EquationPair) -> RowState:
    """Random bits that differ from row to row."""
    key = pair.few.invars[0].aval
    if str(getattr(key, "dtype", "")) != "key<fry>":
        raise MixesRows(
            "it draws random numbers for rows with another generator than JAX's default, "
            "`threefry2x32`"
        )
    if not jax.config.jax_threefry_partitionable:  # pyright: ignore[reportAttributeAccessIssue]
        raise MixesRows("it draws random numbers for rows, and `jax_threefry_partitionable` is off")
    return RowDim(_dim_of_rows(pair))
