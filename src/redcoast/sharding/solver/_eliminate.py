"""Finds the cheapest set of classes to shard by bucket elimination.

It is exact unless each class that is left shares costs with more than `MAX_NEIGHBOURS` others.
"""

from dataclasses import dataclass

import numpy as np

from ._cost import Choice, Problem

# If all classes that are left have more neighbours, the one with the most is not chosen: tables
# double with each neighbour.
MAX_NEIGHBOURS = 14
# Costs that differ by less are equal up to floating point rounding.
_TOLERANCE = 1e-9


@dataclass(frozen=True)
class _Table:
    """A value for each choice among some classes: one axis per class, index 1 if it is chosen."""

    classes: tuple[int, ...]
    values: np.ndarray


def search_classes(problem: Problem) -> Choice:
    """Returns the cheapest allowed set of classes, by the sum of all parts of a step's time.

    Ties are resolved by not choosing a class.

    Classes are eliminated one by one, starting with the one with the fewest neighbours: its best
    decision is tabulated for every decision of its neighbours (bucket elimination, Dechter, 1999,
    doi:10.1016/S0004-3702(99)00059-4). In programs that are chains of layers, even with a residual
    stream, classes have few neighbours, and the time is linear in the number of classes.
    """
    tables = _tables(problem)
    # The classes that share a table, with costs that are not sums of theirs.
    neighbours: dict[int, set[int]] = {root: set() for root in problem.against}
    for table in tables:
        for root in table.classes:
            neighbours[root].update(table.classes)
            neighbours[root].discard(root)
    decisions: list[tuple[int, _Table]] = []  # a class, and whether it is chosen
    while neighbours:
        root = min(neighbours, key=lambda root: len(neighbours[root]))
        is_tabulated = len(neighbours[root]) <= MAX_NEIGHBOURS
        if not is_tabulated:
            root = max(neighbours, key=lambda root: len(neighbours[root]))
        others = tuple(sorted(neighbours.pop(root)))
        for other in others:
            if is_tabulated:
                neighbours[other].update(others)
            neighbours[other] -= {other, root}
        if not is_tabulated:
            tables = [_without(table, root) for table in tables]
            continue
        joint = np.zeros((2,) * (len(others) + 1))
        rest: list[_Table] = []
        for table in tables:
            if root in table.classes:
                joint = joint + _aligned(table, (*others, root))
            else:
                rest.append(table)
        without, split = joint[..., 0], joint[..., 1]
        is_cheaper = np.asarray(split < without * (1 - _TOLERANCE))
        decisions.append((root, _Table(others, is_cheaper)))
        tables = [*rest, _Table(others, np.where(is_cheaper, split, without))]
    # Backwards, since a decision depends on those of classes that were eliminated later.
    chosen: set[int] = set()
    for root, is_chosen in reversed(decisions):
        index = tuple(int(other in chosen) for other in is_chosen.classes)
        if is_chosen.values[index]:
            chosen.add(root)
    return frozenset(chosen)


def _tables(problem: Problem) -> list[_Table]:
    sums: dict[Choice, np.ndarray] = {}  # (2, 2, ...), an axis for each class
    for (_, classes), (if_any, if_none) in problem.costs.items():
        costs = np.full((2,) * len(classes), if_any)
        costs[(0,) * len(classes)] = if_none
        if classes:  # other costs are the same for all choices
            sums[classes] = sums.get(classes, 0.0) + costs
    tables = [_Table(tuple(sorted(classes)), costs) for classes, costs in sums.items()]
    both_forbidden = np.array([[0.0, 0.0], [0.0, np.inf]])
    for root, conflicting in problem.against.items():
        for other in sorted(conflicting):
            if root < other:
                tables.append(_Table((root, other), both_forbidden))
    return tables


def _without(table: _Table, root: int) -> _Table:
    """The table for the case that a class is not chosen."""
    if root not in table.classes:
        return table
    axis = table.classes.index(root)
    rest = table.classes[:axis] + table.classes[axis + 1 :]
    return _Table(rest, np.asarray(table.values.take(0, axis=axis)))


def _aligned(table: _Table, classes: tuple[int, ...]) -> np.ndarray:
    """The table's values with one axis for each of `classes`, in their order."""
    axes = [classes.index(root) for root in table.classes]
    shape = [1] * len(classes)
    for axis in axes:
        shape[axis] = 2
    return table.values.transpose(np.argsort(axes)).reshape(shape)
