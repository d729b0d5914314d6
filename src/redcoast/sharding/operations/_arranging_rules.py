"""Operations that rearrange, cut and join arrays."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from math import gcd
from typing import Any, Literal

from jax.extend.core import JaxprEqn

from ._rule import (
    TURNED,
    Dimension,
    Factors,
    Linear,
    Rule,
    all_factors,
    at_places,
    each_alone,
    neighbours,
    shape_of,
    shapes_before_and_after,
    together,
    without,
)


def transpose_rule(equation: JaxprEqn) -> Rule:
    # [i j] -> [j i]
    factors = Factors()
    operand = factors.of(shape_of(equation.invars[0]))
    result = at_places(operand, equation.params["permutation"])
    return factors.rule([operand], [result], linear=each_alone(0), copies=True)


def squeeze_rule(equation: JaxprEqn) -> Rule:
    # [i 1] -> [i]
    factors = Factors()
    operand = factors.of(shape_of(equation.invars[0]))
    result = without(operand, equation.params["dimensions"])
    return factors.rule([operand], [result], linear=each_alone(0), copies=True)


def expand_dims_rule(equation: JaxprEqn) -> Rule:
    # [i] -> [i 1]
    factors = Factors()
    operand = factors.of(shape_of(equation.invars[0]))
    result = list(operand)
    for d in sorted(equation.params["dimensions"]):
        result.insert(d, factors.new(1))
    return factors.rule([operand], [result], linear=each_alone(0), copies=True)


def broadcast_in_dim_rule(equation: JaxprEqn) -> Rule:
    # [i 1] -> [n i j], with `n` and `j` repeated
    factors = Factors()
    before, after = shapes_before_and_after(equation)
    operand = factors.of(before)
    result = factors.of(after)
    repeated = set(result)
    for d, result_d in enumerate(equation.params["broadcast_dimensions"]):
        if before[d] == after[result_d]:
            repeated.discard(result[result_d])
            result[result_d] = operand[d]
    # A size that is only known at run time is an operand too.
    sizes = factors.of_each(equation.invars[1:])
    return factors.rule(
        [operand, *sizes], [result], repeated=repeated, linear=each_alone(0), copies=True
    )


def reshape_rule(equation: JaxprEqn) -> Rule:
    """Dimensions are merged from the factors of several, or taken apart into them."""
    # [(i j) k] -> [i (j k)]
    factors = Factors()
    before, after = shapes_before_and_after(equation)
    order = equation.params.get("dimensions") or range(len(before))
    permuted, result, torn = _common_factors(factors, at_places(before, order), after)
    operand: list[Dimension] = [()] * len(before)
    for d, dimension in zip(order, permuted, strict=True):
        operand[d] = dimension
    return factors.rule([operand], [result], whole=torn, linear=each_alone(0), copies=True)


class _Side:
    """One of the two shapes of a reshape, whose dimensions are divided into factors."""

    def __init__(self, shape: Sequence[int]):
        self.dimensions: list[Dimension] = [()] * len(shape)
        self.left = 1  # what is left of the current dimension
        self._shape = shape
        self._next = 0

    def advance(self) -> None:
        """Goes on to the next dimension that has more than one element, if the last is used up."""
        while self.left == 1 and self._next < len(self._shape):
            self.left = self._shape[self._next]
            self._next += 1

    def divide(self, factor: Dimension, size: int) -> None:
        """Adds a factor to the current dimension."""
        self.dimensions[self._next - 1] += factor
        self.left //= size


def _common_factors(
    factors: Factors, before: Sequence[int], after: Sequence[int]
) -> tuple[list[Dimension], list[Dimension], list[Dimension]]:
    """Takes two shapes of as many elements apart into common factors, slowest first.

    Where the boundaries of the two do not meet, such as between (6, 4) and (4, 6), what is left
    of both has factors of its own, which are returned as the third list.
    """
    if 0 in before or 0 in after:
        return factors.of(before), factors.of(after), []
    sides = _Side(before), _Side(after)
    torn: list[Dimension] = []
    while True:
        for side in sides:
            side.advance()
        common = gcd(sides[0].left, sides[1].left)
        if sides[0].left == sides[1].left == 1:
            break
        if common > 1:
            factor = factors.new(common)
            for side in sides:
                side.divide(factor, common)
        else:
            torn += _tear(factors, *sides)
    # A dimension of one element has a factor too.
    for side, shape in zip(sides, (before, after), strict=True):
        for d, size in enumerate(shape):
            if not side.dimensions[d]:
                side.dimensions[d] = factors.new(size)
    return sides[0].dimensions, sides[1].dimensions, torn


def _tear(factors: Factors, before: _Side, after: _Side) -> list[Dimension]:
    """Gives both sides factors of their own, up to where their products are equal again."""
    torn: list[Dimension] = []
    products = {before: 1, after: 1}
    while products[before] != products[after] or products[before] == 1:
        # The side with fewer elements so far takes its next dimension.
        side = min((before, after), key=products.__getitem__)
        side.advance()
        size = side.left
        torn.append(factors.new(size))
        side.divide(torn[-1], size)
        products[side] *= size
    return torn


# The dimensions along which an operation does something, from its parameters and the shapes of
# operand and result.
Acted = Callable[[Mapping[str, Any], Sequence[int], Sequence[int]], Collection[int]]


def resized(params: Mapping[str, Any], before: Sequence[int], after: Sequence[int]) -> list[int]:
    return [d for d, size in enumerate(before) if size != after[d]]


def named(key: str) -> Acted:
    """The dimensions that a parameter names, by default the last."""

    def dims(params: Mapping[str, Any], before: Sequence[int], after: Sequence[int]) -> list[int]:
        dimensions = params.get(key, -1)
        if isinstance(dimensions, int):
            dimensions = (dimensions,)
        return [int(d) % len(before) for d in dimensions]

    return dims


def padded(params: Mapping[str, Any], before: Sequence[int], after: Sequence[int]) -> list[int]:
    return [d for d, padding in enumerate(params["padding_config"]) if any(padding)]


def windowed(params: Mapping[str, Any], before: Sequence[int], after: Sequence[int]) -> list[int]:
    windows = enumerate(params["window_dimensions"])
    return [d for d, window in windows if window > 1 or before[d] != after[d]]


# What an operation does along a dimension that it does not carry; see `Rule`.
Change = Literal["moved", "whole", "shuffled", "blocked", "indexed"]


def along(
    acted: Acted, *changes: Change, linear: Linear = (), has_windows: bool = False
) -> Callable[[JaxprEqn], Rule]:
    """The rule of operations along dimensions of arrays that all have the first operand's shape.

    The other dimensions are carried. Operands of other shapes, such as indices, share nothing.
    """

    def rule(equation: JaxprEqn) -> Rule:
        factors = Factors()
        before, after = shapes_before_and_after(equation)
        dimensions = factors.of(before)
        operands = factors.of_each(equation.invars)
        for operand, atom in enumerate(equation.invars):
            if shape_of(atom) == before:
                operands[operand] = dimensions
        results = [dimensions] * len(equation.outvars)
        places = acted(equation.params, before, after)
        changed = at_places(dimensions, places)
        near: list[tuple[Dimension, int]] = []
        if has_windows:
            names = ("window_dimensions", "window_strides", "base_dilation", "window_dilation")
            for d in places:
                of_window = (equation.params[name][d] for name in names)
                near.append((dimensions[d], neighbours(*of_window)))
        carries_all = factors.rule(operands, results, linear=linear, near=near)
        return replace(carries_all, **dict.fromkeys(changes, all_factors(changed)))

    return rule


def tile_rule(equation: JaxprEqn) -> Rule:
    """A dimension of one element is broadcast; a larger one is repeated."""
    factors = Factors()
    before, after = shapes_before_and_after(equation)
    operand = factors.of(before)
    result = list(operand)
    moved: list[Dimension] = []
    repeated: list[Dimension] = []
    for d, times in enumerate(equation.params["reps"]):
        if times == 1:
            continue
        if before[d] == 1:
            result[d] = factors.new(after[d])
            repeated.append(result[d])
        else:
            moved.append(operand[d])
    return factors.rule(
        [operand], [result], moved=moved, repeated=repeated, linear=each_alone(0), copies=True
    )


def concatenate_rule(equation: JaxprEqn) -> Rule:
    # [i], [i] -> [i], with `i` needed as a whole
    factors, axis = Factors(), equation.params["dimension"]
    result = factors.of(shape_of(equation.outvars[0]))
    operands = [result] * len(equation.invars)
    return factors.rule(operands, [result], whole=[result[axis]], linear=together(len(operands)))


def stack_rule(equation: JaxprEqn) -> Rule:
    # [i], [i] -> [n i]
    factors, axis = Factors(), equation.params["axis"]
    result = factors.of(shape_of(equation.outvars[0]))
    operands = [without(result, [axis])] * len(equation.invars)
    return factors.rule(operands, [result], moved=[result[axis]], linear=together(len(operands)))


def unstack_rule(equation: JaxprEqn) -> Rule:
    # [n i] -> [i], [i]
    factors, axis = Factors(), equation.params["axis"]
    operand = factors.of(shape_of(equation.invars[0]))
    results = [without(operand, [axis])] * len(equation.outvars)
    removed = [operand[axis]]
    return factors.rule(
        [operand], results, whole=removed, indexed=removed, linear=each_alone(0), copies=True
    )


def bitcast_rule(equation: JaxprEqn) -> Rule:
    """If the item sizes differ, the last dimension is added or removed."""
    factors = Factors()
    before, after = shapes_before_and_after(equation)
    longer = factors.of(max(before, after, key=len))
    operand, result = longer[: len(before)], longer[: len(after)]
    common = min(len(before), len(after))
    return factors.rule([operand], [result], moved=longer[common:])


def fourier_rule(equation: JaxprEqn) -> Rule:
    factors = Factors()
    before, after = shapes_before_and_after(equation)
    # The transform of real numbers has half as many elements.
    dimensions = factors.of(map(max, before, after))
    count = len(equation.params["fft_lengths"])
    transformed = dimensions[len(before) - count :]
    return factors.rule(
        [dimensions],
        [dimensions],
        whole=transformed,
        blocked=transformed,
        linear=each_alone(0),
        near=[(dimension, TURNED) for dimension in transformed],
    )


def window_scatter_rule(equation: JaxprEqn) -> Rule:
    """`select_and_scatter_add` and similar: the derivatives of pooling."""
    factors, after = Factors(), shape_of(equation.outvars[0])
    result = factors.of(after)
    moved: set[Dimension] = set()
    near: list[tuple[Dimension, int]] = []
    windows, strides = equation.params["window_dimensions"], equation.params["window_strides"]
    for dimension, window, stride in zip(result, windows, strides, strict=True):
        if window > 1:
            moved.add(dimension)
            near.append((dimension, neighbours(window, stride, 1, 1)))
    operands: list[list[Dimension]] = []
    for atom in equation.invars:
        shape = shape_of(atom)
        if len(shape) != len(after):
            operands.append(factors.of(shape))
            continue
        operands.append(result)
        for d, size in enumerate(shape):
            if size != after[d]:
                moved.add(result[d])
    return factors.rule(operands, [result], moved=moved, blocked=moved, near=near)
