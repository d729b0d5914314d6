"""Which dimensions of a program are sharded like the batch, and over how many devices."""

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

from ._classes import Classes

_ALL_ROWS = -1  # in place of the class of rows


@dataclass(frozen=True)
class SplitNodes:
    """The nodes that are sharded over `count` devices, which are those along `axes` of a mesh."""

    classes: Classes
    roots: frozenset[int]
    count: int
    axes: tuple[str, ...] = ()

    def has(self, node: int) -> bool:
        return self.classes[node] in self.roots


@dataclass(frozen=True)
class BatchDims:
    """The nodes that are sharded like the batch.

    Usually there is one set of them, the rows. An example may be split along several dimensions,
    each over other devices.
    """

    sets: tuple[SplitNodes, ...]

    @property
    def count(self) -> int:
        """The number of devices that share the batch."""
        return prod(one.count for one in self.sets)

    @property
    def is_split(self) -> bool:
        return any(one.roots for one in self.sets)

    def __getitem__(self, node: int) -> int:
        # Gradients of all rows are summed together, whether the rows are linked or not.
        return _ALL_ROWS if self.has(node) else self.sets[0].classes[node]

    def has(self, node: int) -> bool:
        return any(one.has(node) for one in self.sets)

    def set_of(self, node: int) -> SplitNodes | None:
        """The set that a node is in, if any."""
        return next((one for one in self.sets if one.has(node)), None)

    def parts(self, dims: Iterable[int]) -> int:
        """The number of devices that share an array with these dimensions."""
        nodes = tuple(dims)
        return prod(one.count for one in self.sets if any(map(one.has, nodes)))

    def alone(self, node: int, dims: Iterable[int]) -> int:
        """The number of devices that share an array, apart from those that `node` is over."""
        nodes, own = tuple(dims), self.set_of(node)
        sets = (one for one in self.sets if one is not own)
        return prod(one.count for one in sets if any(map(one.has, nodes)))
