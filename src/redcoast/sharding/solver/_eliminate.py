"""Finds the cheapest set of classes to shard by bucket elimination, which is exact unless a group
shares costs with more than `MAX_NEIGHBOURS` others."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ._cost import Choice, Problem

# A group that shares costs with more others is never chosen: tables double with each neighbour.
MAX_NEIGHBOURS = 14
# Costs that differ by less are equal up to floating point rounding.
_TOLERANCE = 1e-9


@dataclass(frozen=True)
class _Table:
    """The joint costs of some groups: one axis per group, index 1 if it is chosen."""

    groups: tuple[int, ...]
    costs: np.ndarray


@dataclass(frozen=True)
class _BestChoice:
    """Whether a group is chosen, for each choice of `others`: one axis for each of them."""

    group: int
    others: tuple[int, ...]
    is_chosen: np.ndarray


def search_groups(problem: Problem) -> Choice:
    """Returns the cheapest allowed set of groups. Ties are resolved by not choosing a group.

    Groups are eliminated one by one, starting with the one with the fewest neighbours: its best
    decision is tabulated for every decision of its neighbours (bucket elimination, Dechter, 1999,
    doi:10.1016/S0004-3702(99)00059-4). In programs that are chains of layers, even with a residual
    stream, groups have few neighbours, and the time is linear in the number of groups.
    """
    tables = _tables(problem)
    # The groups that share a table, with costs that are not sums of theirs.
    neighbours: dict[int, set[int]] = {group: set() for group in problem.groups}
    for table in tables:
        _connect(neighbours, table.groups)
    decisions: list[_BestChoice] = []
    while neighbours:
        group = min(neighbours, key=lambda group: len(neighbours[group]))
        if len(neighbours[group]) > MAX_NEIGHBOURS:
            group = max(neighbours, key=lambda group: len(neighbours[group]))
            _remove(neighbours, group)
            tables = [_without(table, group) for table in tables]
            continue
        others = tuple(sorted(_remove(neighbours, group)))
        _connect(neighbours, others)
        joint = np.zeros((2,) * (len(others) + 1))
        rest: list[_Table] = []
        for table in tables:
            if group in table.groups:
                joint = joint + _aligned(table, (*others, group))
            else:
                rest.append(table)
        without, split = joint[..., 0], joint[..., 1]
        is_cheaper = split < without * (1 - _TOLERANCE)
        decisions.append(_BestChoice(group, others, np.asarray(is_cheaper)))
        tables = [*rest, _Table(others, np.where(is_cheaper, split, without))]
    # Backwards, since a decision depends on those of groups that were eliminated later.
    chosen: set[int] = set()
    for decision in reversed(decisions):
        index = tuple(int(other in chosen) for other in decision.others)
        if decision.is_chosen[index]:
            chosen.add(decision.group)
    return frozenset(chosen)


def _tables(problem: Problem) -> list[_Table]:
    sums: dict[Choice, np.ndarray] = {}  # (2, 2, ...), an axis for each group
    for (_, groups), (hit, miss) in problem.costs.items():
        costs = np.full((2,) * len(groups), hit)
        costs[(0,) * len(groups)] = miss
        if groups:  # other costs are the same for all choices
            sums[groups] = sums.get(groups, 0.0) + costs
    tables = [_Table(tuple(sorted(groups)), costs) for groups, costs in sums.items()]
    both_forbidden = np.array([[0.0, 0.0], [0.0, np.inf]])
    for group in problem.groups:
        for other in sorted(problem.against[group]):
            if group < other:
                tables.append(_Table((group, other), both_forbidden))
    return tables


def _connect(neighbours: dict[int, set[int]], groups: Sequence[int]) -> None:
    """Makes all of `groups` neighbours of each other."""
    for group in groups:
        neighbours[group].update(groups)
        neighbours[group].discard(group)


def _remove(neighbours: dict[int, set[int]], group: int) -> set[int]:
    """Removes a group from the graph of neighbours and returns its neighbours."""
    others = neighbours.pop(group)
    for other in others:
        neighbours[other].discard(group)
    return others


def _without(table: _Table, group: int) -> _Table:
    """The table for the case that a group is not chosen."""
    if group not in table.groups:
        return table
    axis = table.groups.index(group)
    rest = table.groups[:axis] + table.groups[axis + 1 :]
    return _Table(rest, np.asarray(table.costs.take(0, axis=axis)))


def _aligned(table: _Table, groups: Sequence[int]) -> np.ndarray:
    """The table's costs with one axis for each of `groups`, in their order."""
    axes = [groups.index(group) for group in table.groups]
    shape = [1] * len(groups)
    for axis in axes:
        shape[axis] = 2
    return table.costs.transpose(np.argsort(axes)).reshape(shape)
