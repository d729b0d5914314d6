"""Which dimensions of a program are sharded like the batch, and over how many devices."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from .._mesh_axes import parts
from ._batch import SplitSet
from ._classes import Classes
from ._program import Program

_ALL_ROWS = -1  # in place of the class of rows
Entries = list[tuple[str, ...] | None]  # of a spec


@dataclass(frozen=True)
class SplitNodes:
    """The nodes that are sharded over `count` devices, which are those along `axes` of a mesh.

    These are all nodes whose class is one of `roots`: those of a `SplitSet`, and what is linked.
    """

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

    def over(self, axes: Iterable[str]) -> tuple[str, ...]:
        """Those of some axes that the batch is split over."""
        used = set[str]().union(*(nodes.axes for nodes in self.sets))
        return tuple(filter(used.__contains__, axes))

    def __getitem__(self, node: int) -> int:
        """The class of a node, as in `Classes`, where all dimensions of the batch are one class.

        Gradients of all rows are summed together, whether the rows are linked or not.
        """
        if self.has(node):
            return _ALL_ROWS
        return self.sets[0].classes[node]

    def has(self, node: int | None) -> bool:
        return self.set_of(node) is not None

    def set_of(self, node: int | None) -> SplitNodes | None:
        """The set that a node is in, if any."""
        for nodes in self.sets:
            if node is not None and nodes.has(node):
                return nodes
        return None

    def parts(self, dims: Iterable[int]) -> int:
        """The number of devices that share an array with these dimensions."""
        dims = tuple(dims)
        return prod(nodes.count for nodes in self.sets if any(map(nodes.has, dims)))

    def axes_of(
        self, dims: Iterable[int], is_chosen: Callable[[int], bool], model_axes: tuple[str, ...]
    ) -> Entries:
        """The axes that each dimension of an array is sharded over, each axis once.

        These are the batch's, or `model_axes` for a dimension that is chosen.
        """
        entries: Entries = []
        taken: set[str] = set()
        for node in dims:
            split, over = self.set_of(node), None
            # The batch first: a chosen dimension takes what is left.
            if split is not None and taken.isdisjoint(split.axes):
                over = split.axes
            elif is_chosen(node) and taken.isdisjoint(model_axes):
                over = model_axes
            taken.update(over or ())
            entries.append(over)
        return entries

    def around(self, node: int | None, dims: Iterable[int]) -> tuple[int, int]:
        """How many devices `node` is split over, and how many others share an array with these
        dimensions. A node that is not of the batch is split over one."""
        own = self.set_of(node)
        if own is None:
            return 1, self.parts(dims)
        others = BatchDims(tuple(nodes for nodes in self.sets if nodes is not own))
        return own.count, others.parts(dims)


def batch_dims(program: Program, count: int) -> BatchDims:
    """The dimensions that are sharded with the batch over `count` devices, if that is possible."""
    split = SplitSet((), program.batch.of_inputs, program.batch.of_created)
    return BatchDims((_split_nodes(program, split, count),))


def batch_over(program: Program, axes: Sequence[str], sizes: Mapping[str, int]) -> BatchDims:
    """The dimensions that are sharded with the batch over as many of the axes as it divides."""
    sets: list[SplitNodes] = []
    for split in program.batch.sets:
        sets.append(_split_nodes(program, split, parts(split.axes, sizes)))
    over = tuple(axes)
    while not sets:
        split = SplitSet(over, program.batch.of_inputs, program.batch.of_created)
        rows = _split_nodes(program, split, parts(over, sizes))
        if rows.roots or not over:
            sets.append(rows)
        over = over[:-1]  # from the last, since `data` has no other use than the batch
    return BatchDims(tuple(sets), program.batch.splits_examples)


def _split_nodes(program: Program, split: SplitSet, count: int) -> SplitNodes:
    # Parts of an example do not follow into weights, as they would along learned positions.
    apart = frozenset[int]()
    if program.batch.splits_examples:
        apart = program.owned
    classes = Classes(program.graph, count, soft=True, apart=apart)
    if not any(map(classes.divides, split.of_inputs)):
        return SplitNodes(classes, frozenset(), 1)
    roots = classes.of(filter(classes.divides, (*split.of_inputs, *split.of_created)))
    return SplitNodes(classes, roots, count, split.axes)


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
