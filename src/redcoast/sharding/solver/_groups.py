"""Groups the corresponding classes of repeated layers, so that they are decided together."""

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
    # The colors of neighbours distinguish classes that look alike by themselves.
    refined = {
        one: (colors[one], tuple(sorted(Counter(colors[o] for o in against[one]).items())))
        for one in candidates
    }
    members: dict[Any, list[int]] = defaultdict(list)
    for one in candidates:
        members[refined[one]].append(one)
    sets = [apart for alike in members.values() for apart in _without_conflicts(alike, against)]
    return {one: number for number, apart in enumerate(sets) for one in apart}


def _colors(
    graph: Graph, classes: Classes, candidates: Sequence[int], parameters: Sequence[Parameter]
) -> dict[int, int]:
    """A number for each candidate, equal for candidates with the same parameters and costs."""
    marks: dict[int, Counter[Any]] = {one: Counter() for one in candidates}
    for parameter in parameters:
        shape = tuple(sorted(parameter.value.shape))
        for node, size in zip(parameter.value.dims, parameter.value.shape, strict=True):
            if (one := classes[node]) in marks:
                marks[one][("parameter", shape, size, parameter.sharded)] += 1
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


def _without_conflicts(alike: Sequence[int], against: Mapping[int, set[int]]) -> list[list[int]]:
    """Partitions classes that are alike into sets without conflicts."""
    sets: list[list[int]] = []
    for one in alike:
        for members in sets:
            if against[one].isdisjoint(members):
                members.append(one)
                break
        else:
            sets.append([one])
    return sets
