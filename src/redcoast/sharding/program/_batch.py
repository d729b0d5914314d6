"""Finds the batch dimensions, in the arguments of a program and in the arrays that it creates.

An array that the program creates, such as the noise in a loss or the zeros at the start of a
recurrence, is only linked to the batch if the two are combined. If they are not, and the array has
as many rows as the batch, its rows are sharded like the batch, unless something prevents it.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from ...distributed._mesh import BATCH_AXES
from ._classes import Classes
from ._graph import Graph, Nodes, Value

# For axes of a mesh, dimensions of the batch's arrays: the place of the array, and the dimension.
Split = tuple[tuple[tuple[str, ...], tuple[tuple[int, int], ...]], ...]


class NotRows(Enum):
    """Why a dimension of a created array is not sharded with the batch."""

    OTHER_SIZE = "it has another size"
    OF_PARAMETERS = "it belongs to parameters, constants or blocked operations"
    WITH_BATCH = "it is mostly combined with the batch"
    REPLICATED = "the program constrains it to be replicated"


@dataclass(frozen=True)
class SplitNodes:
    """The nodes that are split over `count` devices, which are those along `axes` of a mesh.

    These are all nodes whose class is one of `roots`: the dimensions `of_inputs` of the batch's own
    arrays, and what is linked to them.
    """

    of_inputs: tuple[int, ...]
    classes: Classes
    roots: frozenset[int]
    count: int
    axes: tuple[str, ...] = ()

    def has(self, node: int) -> bool:
        return self.classes[node] in self.roots


@dataclass(frozen=True)
class BatchNodes:
    """The dimensions of a program that count rows of its batch, as nodes.

    `of_inputs` are dimensions of the batch's own arrays, and `of_created` of arrays that the
    program creates. `not_rows` are the places of the batch's arrays that are not rows. Beside
    these, `candidates` may be rows too: dimensions of created arrays, and leading ones of other
    arguments of the size of a batch. Those of parameters and constants, and others of arguments,
    are `never` rows.

    With `splits_examples`, examples are split, and `of_inputs` are the dimensions that they are
    split along, perhaps beside rows. This is so if rows do not divide, if a step does not fit into
    memory, or if the program asks for it. `why_whole` is the reason why they are not. `sets` has
    the axes of each dimension; without it, they are the batch's axes of a strategy. `split` is the
    same as `sets`, by the places of dimensions in the batch's arrays.
    """

    of_inputs: tuple[int, ...]
    of_created: tuple[int, ...] = ()
    not_rows: tuple[int, ...] = ()
    candidates: frozenset[int] = frozenset()
    never: frozenset[int] = frozenset()
    splits_examples: bool = False
    why_whole: str = ""
    sets: tuple[SplitNodes, ...] = ()
    split: Split = ()


def find_batch(
    graph: Graph, parameters: Sequence[Value], arrays: Sequence[Value], others: Sequence[Value]
) -> BatchNodes:
    """Finds the batch dimensions of `arrays`, of the other arguments, and of created arrays."""
    never = set(graph.of_constants)
    for value in parameters:
        # Dimensions that are linked to these are not rows, whatever their size.
        never.update(value.nodes)
    rows, not_rows = _rows(graph, arrays, never)
    sizes = _sizes(graph, rows)
    # Leading dimensions of other arguments are treated like created rows; other dimensions of
    # arguments are never rows.
    leading: set[int] = set()
    for value in others:
        if value.nodes and value.shape[0] in sizes:
            leading.add(value.nodes[0])
    for value in (*arrays, *others):
        never.update(set(value.nodes) - leading - set(rows))
    candidates = frozenset(graph.created | leading)
    batch = BatchNodes(rows, not_rows=not_rows, candidates=candidates, never=frozenset(never))
    return replace(batch, of_created=created_rows(graph, batch))


def _sizes(graph: Graph, nodes: Iterable[int]) -> set[int]:
    return set(map(graph.sizes.__getitem__, nodes))


def _rows(
    graph: Graph, arrays: Sequence[Value], never: Collection[int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The leading dimensions of the batch's arrays that are rows, and the places of the others.

    If the sizes differ, the batch size is the one with the most arithmetic. Dimensions that are
    linked to one of `never` (running averages) or are another dimension of the batch (positions in
    a sequence) are not rows.
    """
    leading: dict[int, int] = {}  # by the place of the array
    several: dict[int, int] = {}  # those of more than one element
    counts: Counter[int] = Counter()  # how many arrays have a size
    for place, value in enumerate(arrays):
        if not value.nodes:
            continue
        leading[place] = value.nodes[0]
        if value.shape[0] != 1:  # as of a mask that all examples share
            several[place] = value.nodes[0]
            counts[value.shape[0]] += 1
    if len(counts) < 2:
        return tuple(leading.values()), ()
    # Rows that are cut or joined are still rows, so that soft links count.
    soft = Classes(graph, 1, soft=True, least=2)
    free = _free(graph, arrays, several, never)
    if free:
        all_shares = _WorkShares(graph, soft, ())

        def work_of(node: int) -> tuple[float, float, int]:
            return *all_shares.alone(soft[node]), counts[graph.sizes[node]]

        size = graph.sizes[max(free.values(), key=work_of)]
    else:
        size = counts.most_common(1)[0][0]
    # The rows of this size, by which those of other sizes are judged. A graph has several sizes:
    # its nodes and its edges.
    main = soft.of(node for node in (free or several).values() if graph.sizes[node] == size)
    shares = _WorkShares(graph, soft, main)
    rows: list[int] = []
    not_rows: list[int] = []
    for place, node in leading.items():
        is_row = place in free and shares.mostly_alone(soft[node])
        if is_row or soft[node] in main:
            rows.append(node)
        elif place in several:
            not_rows.append(place)
    return tuple(rows), tuple(not_rows)


def _free(
    graph: Graph, arrays: Sequence[Value], leading: dict[int, int], never: Collection[int]
) -> dict[int, int]:
    """Those of `leading` that are not linked to parameters or other dimensions of the batch."""
    classes = Classes(graph, 1, least=2)
    linked = classes.of(graph.blocked.union(never))
    excluded = set(linked)
    for value in arrays:
        if not value.nodes:
            continue
        first, inner = classes[value.nodes[0]], classes.of(value.nodes[1:])
        # A dimension of the batch that is another one's too is a position, as in attention.
        if first not in linked:
            excluded |= inner - {first}
    return {place: node for place, node in leading.items() if classes[node] not in excluded}


def created_rows(graph: Graph, batch: BatchNodes) -> tuple[int, ...]:
    """The nodes of created arrays that are sharded like the rows of the batch's own arrays."""
    if not batch.of_inputs or not (batch.candidates or graph.constrained):
        return ()
    classes = Classes(graph, 1, soft=True, least=2)
    reasons = reasons_against(graph, classes, batch)
    sizes = _sizes(graph, batch.of_inputs)
    created: list[int] = []
    for node, size in enumerate(graph.sizes):
        root, axes = classes[node], graph.constrained.get(node, ())
        # By its size, or because the program says so.
        is_like_batch = size in sizes or not set(BATCH_AXES).isdisjoint(axes)
        if is_like_batch and root in reasons and reasons[root] is None:
            created.append(node)
    return tuple(created)


def reasons_against(graph: Graph, classes: Classes, batch: BatchNodes) -> dict[int, NotRows | None]:
    """For each class of created dimensions, the reason not to shard it with the batch, if any.

    `classes` must include soft links. The classes of the batch itself are left out.
    """
    main = classes.of(batch.of_inputs)
    split: set[int] = set()
    replicated: set[int] = set()
    for node, axes in graph.constrained.items():
        if not axes:
            replicated.add(classes[node])
        elif not set(BATCH_AXES).isdisjoint(axes):
            split.add(classes[node])
    excluded = classes.of(batch.never | graph.blocked)
    sizes = _sizes(graph, batch.of_inputs) - {0, 1}
    fits: set[int] = set()
    for node, size in enumerate(graph.sizes):
        if size in sizes:
            fits.add(classes[node])
    shares = _WorkShares(graph, classes, main)
    reasons: dict[int, NotRows | None] = {}
    for root in sorted((classes.of(batch.candidates) | split) - main):
        reasons[root] = None
        if root in excluded:
            reasons[root] = NotRows.OF_PARAMETERS
        # A constraint of the program is obeyed, unless it is on parameters.
        elif root in split:
            continue
        elif root in replicated:
            reasons[root] = NotRows.REPLICATED
        elif root not in fits:
            reasons[root] = NotRows.OTHER_SIZE
        elif not shares.mostly_alone(root):
            reasons[root] = NotRows.WITH_BATCH
    return reasons


class _WorkShares:
    """The work on each class by itself, and the work on it together with the batch.

    Queries for each example are combined with the batch only where they are linked to it. The
    positions of a sequence as long as the batch is large nearly always occur together with it.
    """

    def __init__(self, graph: Graph, classes: Classes, main: Collection[int]):
        # By class, the arithmetic and the bytes of results.
        self._alone: dict[int, tuple[float, float]] = defaultdict(lambda: (0.0, 0.0))
        self._both: dict[int, tuple[float, float]] = defaultdict(lambda: (0.0, 0.0))
        self._classes, self._main = classes, frozenset(main)
        for work in graph.works:
            self._add(work.nodes, work.forward, 0.0)
        for nodes, size in graph.large_result_bytes.items():
            self._add(nodes, 0.0, size)

    def _add(self, nodes: Nodes, work: float, size: float) -> None:
        roots = Counter(map(self._classes.__getitem__, nodes))
        for root, times in roots.items():
            share = self._alone
            if times > 1 or not self._main.isdisjoint(roots.keys() - {root}):
                share = self._both
            total_work, total_size = share[root]
            share[root] = total_work + work, total_size + size

    def alone(self, root: int) -> tuple[float, float]:
        return self._alone[root]

    def mostly_alone(self, root: int) -> bool:
        """Whether most arithmetic on a class is without the batch; ties go by bytes of results."""
        return self._alone[root] > self._both[root]
