"""Operations that read or write at indices."""

from collections.abc import Collection, Sequence
from operator import index
from typing import SupportsIndex

from jax.extend.core import JaxprEqn

from ._rule import (
    Dimension,
    Factors,
    Linear,
    Rule,
    at_places,
    each_alone,
    shape_of,
    shapes_before_and_after,
    together,
    without,
)

ADDING = frozenset(["scatter-add", "scatter_add"])


def gather_rule(equation: JaxprEqn) -> Rule:
    """An indexed dimension is reduced: each part contributes the elements that it has."""
    # [k d], [i 1] -> [i d], with `k` indexed
    factors, numbers = Factors(), equation.params["dimension_numbers"]
    operand, indices = factors.of_each(equation.invars)
    for d, i in zip(
        numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True
    ):
        indices[i] = operand[d]
    before, after = shapes_before_and_after(equation)
    removed = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
    result, window = _windows(operand, indices, removed, numbers.offset_dims)
    partial: list[Dimension] = []  # a part of these is read
    for place, d in window.items():
        if after[place] != before[d]:
            partial.append(operand[d])
    collapsed = at_places(operand, numbers.collapsed_slice_dims)
    return factors.rule(
        [operand, indices],
        [result],
        reduced=collapsed,
        whole=[indices[-1], *partial],
        indexed=[*collapsed, *partial],
        linear=each_alone(0),
    )


def scatter_rule(equation: JaxprEqn) -> Rule:
    """The dimensions that count the updates are summed over, or are needed as a whole where an
    update overwrites what was there."""
    # [k d], [i 1], [i d] -> [k d], with `i` reduced and `k` indexed
    factors, numbers = Factors(), equation.params["dimension_numbers"]
    before, _, written = map(shape_of, equation.invars)
    operand = factors.of(before)
    indices = factors.of(shape_of(equation.invars[1]))
    index_batching = numbers.scatter_indices_batching_dims
    for d, i in zip(numbers.operand_batching_dims, index_batching, strict=True):
        indices[i] = operand[d]
    inserted = numbers.inserted_window_dims
    removed = (*inserted, *numbers.operand_batching_dims)
    updates, window = _windows(operand, indices, removed, numbers.update_window_dims)
    partial: list[Dimension] = []  # a part of these is written
    parts: list[Dimension] = []  # the dimensions of the updates that are these parts
    for place, d in window.items():
        if written[place] != before[d]:
            updates[place] = factors.new(written[place])
            partial.append(operand[d])
            parts.append(updates[place])
    counted = without(indices[:-1], index_batching)
    reduced, whole = counted, [indices[-1], *parts]
    name = equation.primitive.name
    if name == "scatter":
        reduced, whole = [], whole + counted
    linear: Linear = ()
    if name == "scatter" or name in ADDING:
        linear = (frozenset([0, 2]),)
    return factors.rule(
        [operand, indices, updates],
        [operand],
        reduced=reduced,
        moved=partial,
        whole=whole,
        indexed=partial + at_places(operand, inserted),
        sums=name in ADDING,
        linear=linear,
        writes=2,
    )


def _windows(
    operand: Sequence[Dimension],
    indices: Sequence[Dimension],
    removed: Collection[SupportsIndex],
    offsets: Collection[SupportsIndex],
) -> tuple[list[Dimension], dict[int, int]]:
    """The dimensions of what is read or written; and by the place of each of them that is a part of
    the window, the dimension of the operand."""
    of_operand = without(range(len(operand)), removed)
    window = dict(zip(sorted(map(index, offsets)), of_operand, strict=True))
    dimensions = list(indices[:-1])  # the last dimension of indices holds coordinates
    for place, d in window.items():
        dimensions.insert(place, operand[d])
    return dimensions, window


def dynamic_update_slice_rule(equation: JaxprEqn) -> Rule:
    # [i k], [i u] -> [i k], with `u` written at computed places of `k`
    factors = Factors()
    before, part = shape_of(equation.invars[0]), shape_of(equation.invars[1])
    operand = factors.of(before)
    update: list[Dimension] = []
    written: list[Dimension] = []
    partial: list[Dimension] = []
    for d, size in enumerate(part):
        if size == before[d]:
            update.append(operand[d])
        else:
            update.append(factors.new(size))
            partial.append(update[-1])
            written.append(operand[d])
    starts = factors.of_each(equation.invars[2:])
    return factors.rule(
        [operand, update, *starts],
        [operand],
        moved=written,
        whole=partial,
        indexed=written,
        linear=together(2),
        writes=1,
    )
