"""Which dimensions of a program are sharded like the batch, and over how many devices."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from .._mesh_axes import parts
from ._classes import Classes
from ._program import Program

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
    splits_examples: bool = False

    @property
    def count(self) -> int:
        """The number of devices that share the batch."""
        return prod(nodes.count for nodes in self.sets)

    @property
    def is_split(self) -> bool:
        return any(nodes.roots for nodes in self.sets)

    def __getitem__(self, node: int) -> int:
        # Gradients of all rows are summed together, whether the rows are linked or not.
        if self.has(node):
            return _ALL_ROWS
        return self.sets[0].classes[node]

    def has(self, node: int) -> bool:
        return self.set_of(node) is not None

    def set_of(self, node: int) -> SplitNodes | None:
        """The set that a node is in, if any."""
        for nodes in self.sets:
            if nodes.has(node):
                return nodes
        return None

    def parts(self, dims: Iterable[int]) -> int:
        """The number of devices that share an array with these dimensions."""
        return self._count(dims)

    def alone(self, node: int, dims: Iterable[int]) -> int:
        """The number of devices that share an array, apart from those that `node` is over."""
        return self._count(dims, but_for=self.set_of(node))

    def _count(self, dims: Iterable[int], but_for: SplitNodes | None = None) -> int:
        dims, count = tuple(dims), 1
        for nodes in self.sets:
            if nodes is not but_for and any(map(nodes.has, dims)):
                count *= nodes.count
        return count


def batch_dims(program: Program, count: int) -> BatchDims:
    """The dimensions that are sharded with the batch over `count` devices, if that is possible."""
    batch = program.batch
    return BatchDims((_split_nodes(program, batch.of_inputs, batch.of_created, count),))


def _split_nodes(
    program: Program,
    of_inputs: Sequence[int],
    of_created: Sequence[int],
    count: int,
    axes: tuple[str, ...] = (),
) -> SplitNodes:
    # Parts of an example do not follow into weights, as they would along learned positions.
    apart = frozenset[int]()
    if program.batch.splits_examples:
        apart = program.owned
    classes = Classes(program.graph, count, soft=True, apart=apart)
    if not any(map(classes.divides, of_inputs)):
        return SplitNodes(classes, frozenset(), 1)
    roots = classes.of(filter(classes.divides, (*of_inputs, *of_created)))
    return SplitNodes(classes, roots, count, axes)


def split_axes(program: Program, axes: Sequence[str], sizes: Mapping[str, int]) -> tuple[str, ...]:
    """The axes that the batch is split over: fewer than are given if it does not divide."""
    if program.batch.sets:
        of_sets = set[str]().union(*(split_set.axes for split_set in program.batch.sets))
        return tuple(filter(of_sets.__contains__, axes))
    over = tuple(axes)
    # From the last, since `data` has no other use than the batch.
    while over and not batch_dims(program, parts(over, sizes)).is_split:
        over = over[:-1]
    return over


def batch_over(program: Program, axes: Sequence[str], sizes: Mapping[str, int]) -> BatchDims:
    """The dimensions that are sharded with the batch over as many of the axes as it divides."""
    batch = program.batch
    sets: list[SplitNodes] = []
    for split in batch.sets:
        count = parts(split.axes, sizes)
        sets.append(_split_nodes(program, split.of_inputs, split.of_created, count, split.axes))
    if not sets:
        over = split_axes(program, axes, sizes)
        sets.append(
            _split_nodes(program, batch.of_inputs, batch.of_created, parts(over, sizes), over)
        )
    return BatchDims(tuple(sets), batch.splits_examples)


@dataclass(frozen=True)
class Examples:
    """The dimensions of a program that count the examples of its batch, and their number."""

    dims: BatchDims
    count: int

    def has(self, node: int) -> bool:
        """Whether a dimension counts examples."""
        return self.dims.has(node)


def example_count(program: Program) -> int:
    """The size of the batch; 0 without one. Arrays with one row, which all examples share, do not
    count."""
    sizes = map(program.graph.sizes.__getitem__, program.batch.of_inputs)
    return max(sizes, default=0)


def find_examples(program: Program) -> Examples | None:
    """The examples of a program; None if there are fewer than two, which cannot be related."""
    count = example_count(program)
    if count < 2:
        return None
    return Examples(batch_dims(program, 1), count)
