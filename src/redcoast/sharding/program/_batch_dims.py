"""Which dimensions of a program are sharded like the batch, and over how many devices."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from .._mesh_axes import parts
from ._batch import SplitNodes
from ._classes import Classes
from ._program import Program

Entries = list[tuple[str, ...] | None]  # of a spec


@dataclass(frozen=True)
class BatchDims:
    """The nodes that are sharded like the batch over some devices: its `BatchNodes`, and all that
    are linked to them.

    Usually there is one set of them, the rows. An example may be split along several dimensions,
    each over other devices. `size` is that of the batch, as in `Program`.
    """

    sets: tuple[SplitNodes, ...]
    size: int
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

    def has(self, node: int | None) -> bool:
        return self.set_of(node) is not None

    def set_of(self, node: int | None) -> SplitNodes | None:
        """The set that a node is in, if any."""
        for nodes in self.sets:
            if node is not None and nodes.has(node):
                return nodes
        return None

    def splits_alike(self, node: int, others: Iterable[int]) -> bool:
        """Whether one of other dimensions is sharded over the same devices as a node."""
        own = self.set_of(node)
        return own is not None and any(map(own.has, others))

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
        used: set[str] = set()
        for node in dims:
            split, over = self.set_of(node), None
            # The batch first: a chosen dimension takes what is left.
            if split is not None and used.isdisjoint(split.axes):
                over = split.axes
            elif is_chosen(node) and used.isdisjoint(model_axes):
                over = model_axes
            used.update(over or ())
            entries.append(over)
        return entries

    def around(self, node: int | None, dims: Sequence[int]) -> tuple[int, int]:
        """The number of devices that `node` is split over, and of those that the other sets split
        an array with these dimensions over.

        Together, they are the devices that share the array if it has `node`, or a sum over `node`.
        """
        own, devices = self.set_of(node), self.parts(dims)
        if own is None:
            return 1, devices
        if any(map(own.has, dims)):
            devices //= own.count
        return own.count, devices


def batch_dims(program: Program, count: int) -> BatchDims:
    """The dimensions that are sharded with the batch over `count` devices, if that is possible."""
    return BatchDims((_split_nodes(program, (), count),), program.batch_size)


def batch_over(program: Program, axes: Sequence[str], sizes: Mapping[str, int]) -> BatchDims:
    """The dimensions that are sharded with the batch over as many of the axes as it divides."""
    batch = program.batch
    sets = batch.sets
    over = tuple(axes)
    while not sets:
        rows = _split_nodes(program, over, parts(over, sizes))
        if rows.roots or not over:
            sets = (rows,)
        over = over[:-1]  # from the last, since `data` has no other use than the batch
    return BatchDims(sets, program.batch_size, batch.splits_examples)


def _split_nodes(program: Program, axes: tuple[str, ...], count: int) -> SplitNodes:
    batch = program.batch
    # Parts of an example do not follow into weights, as they would along learned positions.
    only_hard = frozenset[int]()
    if batch.splits_examples:
        only_hard = program.owned
    classes = Classes(program.graph, count, soft=True, only_hard=only_hard)
    if not any(map(classes.divides, batch.of_inputs)):
        return SplitNodes(batch.of_inputs, classes, frozenset(), 1)
    roots = classes.of(filter(classes.divides, (*batch.of_inputs, *batch.of_created)))
    return SplitNodes(batch.of_inputs, classes, roots, count, axes)


def find_examples(program: Program) -> BatchDims | None:
    """The dimensions that count examples; None if these are fewer than two, which cannot be
    related."""
    if program.batch_size < 2:
        return None
    return batch_dims(program, 1)
