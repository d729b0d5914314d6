"""Dimensions that must be split alike, as classes, and which of them can be split at all."""

from collections.abc import Iterable, Sequence

from ..program._graph import Graph


class Classes:
    """The nodes of a graph in classes, as they are when they are split over `n` devices.

    A link between two dimensions holds if both divide: a dimension of 12 heads of 64 can be split
    over 8 devices, but not together with the 12 heads. Sizes below `least` have no links.
    """

    def __init__(self, graph: Graph, n: int, *, soft: bool = False, least: int = 1):
        self._parent = list(range(len(graph.sizes)))
        self._n = n
        self._least = least
        self._sizes = graph.sizes
        for a, b in [*graph.links, *graph.soft_links] if soft else graph.links:
            if self._divides(a) and self._divides(b):
                self._join(a, b)

    def __getitem__(self, node: int) -> int:
        parent = self._parent
        while parent[node] != node:
            parent[node] = parent[parent[node]]
            node = parent[node]
        return node

    def divides(self, node: int) -> bool:
        return self._divides(node)

    def _divides(self, node: int) -> bool:
        return self._sizes[node] >= self._least and self._sizes[node] % self._n == 0

    def _join(self, a: int, b: int) -> None:
        a, b = self[a], self[b]
        # The least number stands for a class, so that it does not depend on the order of links.
        self._parent[max(a, b)] = min(a, b)

    def of(self, nodes: Iterable[int]) -> frozenset[int]:
        return frozenset(self[node] for node in nodes)


def splittable(graph: Graph, classes: Classes, nodes: Iterable[int]) -> list[int]:
    """The classes of `nodes` that can be split over an axis, in the order of the program.

    Not those with a dimension that is blocked, nor those that an array has twice.
    """
    blocked = classes.of(graph.blocked) | _twice(graph, classes)
    found = dict.fromkeys(classes[node] for node in nodes if classes.divides(node))
    return [one for one in found if one not in blocked]


def _twice(graph: Graph, classes: Classes) -> frozenset[int]:
    found = set()
    for dims in graph.together:
        roots = [classes[node] for node in dims if classes.divides(node)]
        if len(set(roots)) < len(roots):
            found.update(root for root in roots if roots.count(root) > 1)
    return frozenset(found)


def conflicts(graph: Graph, classes: Classes, candidates: Sequence[int]) -> dict[int, set[int]]:
    """For each candidate those that it cannot be split together with: an array has both."""
    known = set(candidates)
    against: dict[int, set[int]] = {one: set() for one in candidates}
    for dims in graph.together:
        here = {classes[node] for node in dims if classes.divides(node)} & known
        for one in here if len(here) > 1 else ():
            against[one] |= here - {one}
    return against
