"""Classes of dimensions that must be sharded together, and those that can be sharded at all."""

from collections.abc import Collection, Iterable, Sequence

from ._graph import Graph


class Classes:
    """A union-find over the nodes of a graph, for sharding over `n` devices.

    A link holds if both sizes are divisible by `n`: a dimension of 12 heads of 64 can be sharded
    over 8 devices, but not together with the 12 heads. Sizes below `least` have no links. Soft
    links hold if `soft`, but not those of the classes of `only_hard` nodes.

    Rows that are computed in batches, one after the other, are sharded as the batches are, or
    softly as the rows of each batch, if the batches are not divisible.
    """

    def __init__(
        self,
        graph: Graph,
        n: int,
        *,
        soft: bool = False,
        least: int = 1,
        only_hard: Collection[int] = (),
    ):
        self._parent = list(range(len(graph.sizes)))
        self._divides = [size >= least and size % n == 0 for size in graph.sizes]
        for a, b in graph.links:
            self._join(a, b)
        if not soft:
            return
        # After the links, so that these are entire classes.
        excluded = self.of(only_hard)
        for a, b in graph.soft_links:
            if self[a] not in excluded and self[b] not in excluded:
                self._join(a, b)
        for rows, (batches, *of_batch) in graph.groupings:
            if of_batch and batches in graph.mapped and not self._divides[batches]:
                self._join(rows, of_batch[0])

    def _join(self, a: int, b: int) -> None:
        if self._divides[a] and self._divides[b]:
            a, b = self[a], self[b]
            # The smallest node represents a class, so that the order of links makes no difference.
            self._parent[max(a, b)] = min(a, b)

    def __getitem__(self, node: int) -> int:
        parent = self._parent
        while parent[node] != node:
            parent[node] = parent[parent[node]]
            node = parent[node]
        return node

    def divides(self, node: int) -> bool:
        """Whether the size of a node is divisible, and not below `least`."""
        return self._divides[node]

    def of(self, nodes: Iterable[int]) -> frozenset[int]:
        return frozenset(self[node] for node in nodes)


def splittable(graph: Graph, classes: Classes, nodes: Iterable[int]) -> frozenset[int]:
    """The classes of `nodes` that can be sharded.

    Excludes classes with a blocked dimension, and those that one array has twice.
    """
    roots = classes.of(filter(classes.divides, nodes))
    excluded = set(classes.of(graph.blocked))
    for dims in graph.together:
        of_array: set[int] = set()
        # As of a covariance: sharded along one of the two, it needs the other as a whole.
        for node in filter(classes.divides, dims):
            root = classes[node]
            if root in of_array:
                excluded.add(root)
            of_array.add(root)
    return roots - excluded


def conflicts(graph: Graph, classes: Classes, candidates: Sequence[int]) -> dict[int, set[int]]:
    """For each candidate, those that it cannot be sharded together with: one array has both."""
    against: dict[int, set[int]] = {candidate: set() for candidate in candidates}
    for dims in graph.together:
        in_array = against.keys() & classes.of(filter(classes.divides, dims))
        for candidate in in_array:
            against[candidate] |= in_array - {candidate}
    return against
