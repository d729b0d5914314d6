"""What operations do with the rows of a batch.

A dimension of rows may only be carried along, or summed over at the end. What sorts, cuts or
numbers the rows would give another result for a part of the batch than for all of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import jax

from ...core._jaxpr import is_inexact
from ..operations import Dimension, Factor, Rule, rule_of
from ._row_states import SUM, Mixed, Pair, Rows, State, differing

# Without rows among their operands, these make arrays in which all rows are equal.
_MAKERS = frozenset(["broadcast_in_dim", "iota"])
# Of integers, these round.
_ROUNDED = frozenset(["convert_element_type", "div"])


@dataclass(frozen=True)
class _Place:
    """The rows within a factor, which is a product of `outer`, the rows and `inner`.

    `outer` is None if the elements along the factor are equal.
    """

    factor: Factor
    outer: int | None
    inner: int


def apply_rule(pair: Pair, inputs: Sequence[State]) -> list[State]:
    """Where the rows of the results of an operation on rows, or on sums over rows, are."""
    name, count = pair.name, len(pair.few.outvars)
    if name == "sharding_constraint":
        raise Mixed("it constrains the sharding of rows itself")
    if name == "random_bits" and inputs[0] is None:
        return [_draw(pair)]
    rule = rule_of(pair.few)
    if rule is None:
        raise Mixed(f"`{name}` is applied to rows")
    if SUM in inputs:
        return [_linear(pair, rule, inputs)] * count
    places = _places(pair, rule, inputs)
    if not places:
        return [_made(pair, rule)] * count
    place = _same_place(pair, list(places.values()))
    if place.factor in rule.reduced:
        return [_summed(pair, rule, set(places))] * count
    for operand, dimensions in enumerate(rule.operands):
        if inputs[operand] is None and place.factor in _all_factors(dimensions):
            raise Mixed(f"`{name}` combines rows with an array of as many elements")
    if place.factor in rule.whole | rule.moved | rule.indexed:
        raise Mixed(f"`{name}` is applied along rows")
    return [_rows_at(rule, dimensions, place) for dimensions in rule.results]


def _linear(pair: Pair, rule: Rule, inputs: Sequence[State]) -> State:
    """Sums of what parts of the batch add are only equal to the sum of all in a linear function."""
    if any(isinstance(state, Rows) for state in inputs):
        raise Mixed(f"`{pair.name}` combines a sum over rows with rows")
    sums = frozenset(place for place, state in enumerate(inputs) if state is SUM)
    rounds = pair.name in _ROUNDED and not is_inexact(pair.few.outvars[0].aval)
    if sums not in rule.linear or rounds:
        raise Mixed(f"`{pair.name}` is applied to a sum over rows, and is not linear")
    return SUM


def _places(pair: Pair, rule: Rule, inputs: Sequence[State]) -> dict[int, _Place]:
    """Where the rows of each operand are in the factors of the rule."""
    return {
        place: _within(pair, rule, rule.operands[place][state.dim], state)
        for place, state in enumerate(inputs)
        if isinstance(state, Rows)
    }


def _within(pair: Pair, rule: Rule, dimension: Dimension, rows: Rows) -> _Place:
    """The factor of a dimension that the rows are in."""
    if rows.outer is None and len(dimension) == 1:
        return _Place(dimension[0], None, 1)
    if rows.outer is None:
        # A reshape of equal rows has them in the factor whose size follows from their number.
        return _Place(_counted(pair, rule), None, 1)
    size = prod(rule.sizes[factor] for factor in dimension)
    count = size // (rows.outer * rows.inner)
    before = 1
    for factor in dimension:
        own = rule.sizes[factor]
        if before * own > rows.outer:
            outer, torn = divmod(rows.outer, before)
            if not torn and own % (outer * count) == 0:
                return _Place(factor, outer, own // (outer * count))
            break
        before *= own
    raise Mixed(f"`{pair.name}` tears rows apart")


def _counted(pair: Pair, rule: Rule) -> Factor:
    return rule.results[0][_new_dimension(pair)][0]


def _same_place(pair: Pair, places: Sequence[_Place]) -> _Place:
    """The place of the rows of all operands, which have to be in the same."""
    known = {place for place in places if place.outer is not None}
    factors = {place.factor for place in places}
    if len(known) > 1 or len(factors) > 1:
        raise Mixed(f"`{pair.name}` combines rows with other rows")
    return next(iter(known), places[0])


def _summed(pair: Pair, rule: Rule, carriers: set[int]) -> State:
    """The state of a result that is reduced over rows; `carriers` are the operands with rows."""
    if not rule.sums:
        raise Mixed(f"`{pair.name}` reduces over rows")
    for group in rule.linear:
        # What is added to the sum, such as an array that is scattered to, would be added again
        # with each part of the batch.
        if not group <= carriers and group & carriers:
            raise Mixed(f"`{pair.name}` sums rows with an array of as many elements")
    reduced = [_all_factors(dimensions) & rule.reduced for dimensions in rule.operands]
    if any(reduced[place] for place in range(len(reduced)) if place not in carriers):
        raise Mixed(f"`{pair.name}` sums over rows with an array of as many elements")
    return SUM


def _rows_at(rule: Rule, dimensions: Sequence[Dimension], place: _Place) -> State:
    """The rows of a result; None if it has no dimension with their factor."""
    for d, dimension in enumerate(dimensions):
        if place.factor not in dimension:
            continue
        if place.outer is None:
            return Rows(d, None)
        at = dimension.index(place.factor)
        slower = prod(rule.sizes[factor] for factor in dimension[:at])
        faster = prod(rule.sizes[factor] for factor in dimension[at + 1 :])
        return Rows(d, slower * place.outer, place.inner * faster)
    return None


def _made(pair: Pair, rule: Rule) -> State:
    """An array that is made with as many rows as the batch, all of them equal."""
    if pair.name not in _MAKERS:
        raise Mixed(f"`{pair.name}` makes rows")
    d = _new_dimension(pair)
    if rule.indexed.intersection(rule.results[0][d]):
        raise Mixed(f"`{pair.name}` numbers the rows")
    return Rows(d, None)


def _new_dimension(pair: Pair) -> int:
    """The dimension of the result whose size depends on the number of rows."""
    dimensions = differing(pair.few.outvars[0].aval, pair.all.outvars[0].aval)
    if len(dimensions) != 1:
        raise Mixed(f"`{pair.name}` makes an array whose size depends on the number of rows")
    return dimensions[0]


def _all_factors(dimensions: Sequence[Dimension]) -> set[Factor]:
    return {factor for dimension in dimensions for factor in dimension}


def _draw(pair: Pair) -> State:
    """Random numbers that differ from row to row."""
    if str(pair.few.invars[0].aval.dtype) != "key<fry>":  # pyright: ignore[reportAttributeAccessIssue]
        raise Mixed(
            "it draws random numbers for rows with another generator than JAX's default, "
            "`threefry2x32`"
        )
    if not jax.config.jax_threefry_partitionable:  # pyright: ignore[reportAttributeAccessIssue]
        raise Mixed("it draws random numbers for rows, and `jax_threefry_partitionable` is off")
    return Rows(_new_dimension(pair))
