"""The cheapest set of classes to split, found exactly by elimination."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ._cost import Choice, Problem

# Groups that share a price with more others than this are left whole: tables double with each.
WIDEST = 14
# Below this difference two prices are the same, to the last bits of floating point.
_SAME = 1e-9


@dataclass(frozen=True)
class _Table:
    """What some groups cost together: an axis for each, with its price if whole and if split."""

    groups: tuple[int, ...]
    prices: np.ndarray


def search(problem: Problem) -> Choice:
    """The cheapest allowed set of groups; where it makes no difference, a group is left whole.

    One group after another, that with the fewest neighbours first, is decided for each way in
    which its neighbours may be decided (bucket elimination, as in Dechter, 1999,
    doi:10.1016/S0004-3702(99)00059-4). Programs are chains of layers, perhaps along a residual
    stream, so that neighbours are few, and the time is proportional to the number of groups.
    """
    tables = list(_tables(problem))
    near = _neighbours(problem.groups, tables)
    decided: list[tuple[int, Sequence[int], np.ndarray]] = []
    while near:
        one = min(near, key=lambda group: len(near[group]))
        if len(near[one]) > WIDEST:
            one = max(near, key=lambda group: len(near[group]))
            tables = [_whole(table, one) for table in tables]
            _forget(near, one)
            continue
        others = sorted(_forget(near, one))
        for other in others:
            near[other].update(o for o in others if o != other)
        touching = [table for table in tables if one in table.groups]
        joined = sum(_aligned(table, (*others, one)) for table in touching)
        joined = np.broadcast_to(joined, (2,) * (len(others) + 1))
        whole, split = joined[..., 0], joined[..., 1]
        take = split < whole * (1 - _SAME)
        decided.append((one, others, take))
        tables = [table for table in tables if one not in table.groups]
        tables.append(_Table(tuple(others), np.where(take, split, whole)))
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
        prices = np.full((2,) * len(groups), hit)
        prices[(0,) * len(groups)] = miss
        yield _Table(tuple(sorted(groups)), prices)


def _neighbours(groups: Sequence[int], tables: Sequence[_Table]) -> dict[int, set[int]]:
    near: dict[int, set[int]] = {one: set() for one in groups}
    for table in tables:
        for one in table.groups:
            near[one].update(other for other in table.groups if other != one)
    return near


def _forget(near: dict[int, set[int]], one: int) -> set[int]:
    """Takes a group from the neighbourhoods; returns its neighbours."""
    others = near.pop(one)
    for other in others:
        near[other].discard(one)
    return others


def _whole(table: _Table, one: int) -> _Table:
    """The table if a group is not split."""
    if one not in table.groups:
        return table
    rest = tuple(other for other in table.groups if other != one)
    return _Table(rest, np.asarray(table.prices.take(0, axis=table.groups.index(one))))


def _aligned(table: _Table, groups: Sequence[int]) -> np.ndarray:
    """The table's prices with an axis for each of `groups`, in their order."""
    order = np.argsort([groups.index(one) for one in table.groups])
    shape = [2 if one in table.groups else 1 for one in groups]
    return table.prices.transpose(order).reshape(shape)
