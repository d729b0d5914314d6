"""Classes that play the same part in layers that repeat, as groups that decide alike."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from ..program._graph import Graph
from ._classes import Classes
from ._cost import Parameter


def group(
    graph: Graph,
    classes: Classes,
    candidates: Sequence[int],
    against: Mapping[int, set[int]],
    parameters: Sequence[Parameter],
) -> dict[int, int]:
    """The group of each candidate, numbered in the order of the program."""
    colors = _colors(graph, classes, candidates, parameters)
    # Those of the neighbours tell parts apart that look alike by themselves.
    refined = {
        one: (colors[one], tuple(sorted(Counter(colors[o] for o in against[one]).items())))
        for one in candidates
    }
    members: dict[Any, list[int]] = defaultdict(list)
    for one in candidates:
        members[refined[one]].append(one)
    groups: dict[int, int] = {}
    for alike in members.values():
        for apart in _apart(alike, against):
            groups.update(dict.fromkeys(apart, len(set(groups.values()))))
    return groups


def _colors(
    graph: Graph, classes: Classes, candidates: Sequence[int], parameters: Sequence[Parameter]
) -> dict[int, int]:
    """A number for each candidate, the same for those of the same parameters and prices."""
    marks: dict[int, Counter[Any]] = {one: Counter() for one in candidates}
    for parameter in parameters:
        shape = tuple(sorted(parameter.value.shape))
        for node, size in zip(parameter.value.dims, parameter.value.shape, strict=True):
            if (one := classes[node]) in marks:
                marks[one][("parameter", shape, size, parameter.covered)] += 1
    for found in graph.sums.values():
        if (one := classes[found.node]) in marks:
            marks[one][("sum", found.bytes, found.times, found.backward)] += 1
    for cut in graph.cuts:
        for node, size in ((cut.source, cut.source_bytes), (cut.target, cut.target_bytes)):
            if node is not None and (one := classes[node]) in marks:
                marks[one][("cut", size, cut.times, node == cut.source)] += 1
    known: dict[Any, int] = {}
    return {
        one: known.setdefault(frozenset(mark.items()), len(known)) for one, mark in marks.items()
    }


def _apart(alike: Sequence[int], against: Mapping[int, set[int]]) -> list[list[int]]:
    """Sets of those alike without conflicts: one behind the other, they take turns."""
    sets: list[list[int]] = []
    for one in alike:
        free = (s for s in sets if against[one].isdisjoint(s))
        found = next(free, None)
        if found is None:
            sets.append([one])
        else:
            found.append(one)
    return sets
