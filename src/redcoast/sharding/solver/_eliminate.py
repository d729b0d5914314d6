"""Finds the cheapest set of classes to shard, exactly, by bucket elimination."""

from collections.abc import Iterator, Sequence
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


def search_groups(problem: Problem) -> Choice:
    """Returns the cheapest allowed set of groups. Ties are resolved by not choosing a group.

    Groups are eliminated one by one, starting with the one with the fewest neighbours: its best
    decision is tabulated for every decision of its neighbours (bucket elimination, Dechter, 1999,
    doi:10.1016/S0004-3702(99)00059-4). In programs that are chains of layers, even with a residual
    stream, groups have few neighbours, and the time is linear in the number of groups.
    """
    tables = list(_tables(problem))
    near: dict[int, set[int]] = {one: set() for one in problem.groups}
    for table in tables:
        for one in table.groups:
            near[one].update(other for other in table.groups if other != one)
    decided: list[tuple[int, Sequence[int], np.ndarray]] = []
    while near:
        one = min(near, key=lambda group: len(near[group]))
        if len(near[one]) > MAX_NEIGHBOURS:
            one = max(near, key=lambda group: len(near[group]))
            tables = [_without(table, one) for table in tables]
            _remove(near, one)
            continue
        others = sorted(_remove(near, one))
        for other in others:
            near[other].update(o for o in others if o != other)
        touching = [table for table in tables if one in table.groups]
        joined = sum(_aligned(table, (*others, one)) for table in touching)
        joined = np.broadcast_to(joined, (2,) * (len(others) + 1))
        without, split = joined[..., 0], joined[..., 1]
        take = split < without * (1 - _TOLERANCE)
        decided.append((one, others, take))
        tables = [table for table in tables if one not in table.groups]
        tables.append(_Table(tuple(others), np.where(take, split, without)))
    chosen: set[int] = set()
    for one, others, take in reversed(decided):
        if take[tuple(int(other in chosen) for other in others)]:
            chosen.add(one)
    return frozenset(chosen)


def _tables(problem: Problem) -> Iterator[_Table]:
    for one in problem.groups:
        yield _Table((one,), np.array([0.0, problem.single.get(one, 0.0)]))
        for other in sorted(problem.against[one]):
            if one < other:
                yield _Table((one, other), np.array([[0.0, 0.0], [0.0, np.inf]]))
    for groups, (hit, miss) in problem.covers.items():
        costs = np.full((2,) * len(groups), hit)
        costs[(0,) * len(groups)] = miss
        yield _Table(tuple(sorted(groups)), costs)


def _remove(near: dict[int, set[int]], one: int) -> set[int]:
    """Removes a group from the graph of neighbours and returns its neighbours."""
    others = near.pop(one)
    for other in others:
        near[other].discard(one)
    return others


def _without(table: _Table, one: int) -> _Table:
    """The table for the case that a group is not chosen."""
    if one not in table.groups:
        return table
    rest = tuple(other for other in table.groups if other != one)
    return _Table(rest, np.asarray(table.costs.take(0, axis=table.groups.index(one))))


def _aligned(table: _Table, groups: Sequence[int]) -> np.ndarray:
    """The table's costs with one axis for each of `groups`, in their order."""
    order = np.argsort([groups.index(one) for one in table.groups])
    shape = [2 if one in table.groups else 1 for one in groups]
    return table.costs.transpose(order).reshape(shape)
