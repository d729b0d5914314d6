"""Finds the batch dimensions, in the arguments of a program and in the arrays that it creates.

An array that the program creates, such as the noise in a loss or the zeros at the start of a
recurrence, is only linked to the batch if the two are combined. If they are not, and the array has
as many rows as the batch, its rows are sharded like the batch, unless something prevents it.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from ...distributed._mesh import BATCH_AXES
from ._classes import Classes
from ._graph import Graph, Value

# Reasons not to shard a dimension of a created array with the batch: another size; a dimension of
# parameters, constants or blocked operations; mostly combined with the batch; replicated by the
# program's own constraint.
SIZE, OF_PARAMETERS, WITH_BATCH, REPLICATED = "size", "held", "met", "whole"


# For axes of a mesh, dimensions of the batch's arrays: the place of the array, and the dimension.
Split = tuple[tuple[tuple[str, ...], tuple[tuple[int, int], ...]], ...]


@dataclass(frozen=True)
class SplitSet:
    """Dimensions that are split over some axes of the mesh, as nodes.

    `made` are dimensions of arrays that the program creates.
    """

    axes: tuple[str, ...]
    given: tuple[int, ...]
    made: tuple[int, ...] = ()


@dataclass(frozen=True)
class BatchNodes:
    """The dimensions that are sharded with the batch, as nodes.

    `given` are dimensions of the batch's own arrays, and `made` of arrays that the program
    creates. `left_out` are the indices of the batch's arrays that are not rows. With `sequence`,
    examples are split along other dimensions, since there are fewer rows than devices, and `given`
    are those. `whole` is the reason if they cannot be split either. `sets` has the axes of each
    dimension, where they are not those that a strategy splits the batch over, and `split` the same
    by the places of dimensions in the batch's arrays.
    """

    given: tuple[int, ...]
    made: tuple[int, ...] = ()
    left_out: tuple[int, ...] = ()
    sequence: bool = False
    whole: str = ""
    sets: tuple[SplitSet, ...] = ()
    split: Split = ()


def find_batch(graph: Graph, arrays: Sequence[Value], others: Sequence[Value]) -> BatchNodes:
    """Finds the batch dimensions of `arrays`, of the other arguments, and of created arrays."""
    given, left_out = _rows(graph, arrays)
    sizes = {graph.sizes[node] for node in given}
    # Leading dimensions of other arguments are treated like created rows; other dimensions of
    # arguments are never rows.
    leading: set[int] = set()
    for value in others:
        if value.dims and value.shape[0] in sizes:
            leading.add(value.dims[0])
    of_arguments: set[int] = set()
    for value in (*arrays, *others):
        of_arguments.update(value.dims)
    graph.created.update(leading)
    graph.of_parameters.update(of_arguments - leading - set(given))
    return BatchNodes(given, made_rows(graph, given), left_out)


def _rows(graph: Graph, arrays: Sequence[Value]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The leading dimensions of the batch's arrays that are rows, and the indices of the others.

    If the sizes differ, the batch size is the one with the most arithmetic. Dimensions that belong
    to parameters (running averages) or are another dimension of the batch (positions in a sequence)
    are not rows.
    """
    leading = {place: value.dims[0] for place, value in enumerate(arrays) if value.dims}
    sizes = Counter(graph.sizes[node] for node in leading.values())
    del sizes[1]
    if len(sizes) < 2:
        return tuple(leading.values()), ()
    several = {place: node for place, node in leading.items() if graph.sizes[node] != 1}
    soft = Classes(graph, 1, soft=True, least=2)
    free = _free(graph, arrays, several)
    if free:
        shares = _WorkShares(graph, soft, ())
        most_work = lambda node: (*shares.alone(soft[node]), sizes[graph.sizes[node]])
        size = graph.sizes[max(free.values(), key=most_work)]
    else:
        size = sizes.most_common(1)[0][0]
    main = soft.of(n for n in (free or several).values() if graph.sizes[n] == size)
    shares = _WorkShares(graph, soft, main)
    rows: list[int] = []
    left_out: list[int] = []
    for place, node in leading.items():
        is_row = place in free and shares.mostly_alone(soft[node])
        if is_row or soft[node] in main:
            rows.append(node)
        elif place in several:
            left_out.append(place)
    return tuple(rows), tuple(left_out)


def _free(graph: Graph, arrays: Sequence[Value], leading: dict[int, int]) -> dict[int, int]:
    """Those of `leading` that are not linked to parameters or other dimensions of the batch."""
    classes = Classes(graph, 1, least=2)
    never = _never_rows(graph, classes)
    excluded = set(never)
    for value in arrays:
        if not value.dims:
            continue
        first, *inner = (classes[node] for node in value.dims)
        if first not in never:
            excluded.update(root for root in inner if root != first)
    return {place: node for place, node in leading.items() if classes[node] not in excluded}


def _never_rows(graph: Graph, classes: Classes) -> frozenset[int]:
    """The classes of parameters, constants and dimensions that cannot be sharded."""
    return classes.of(graph.of_parameters | graph.blocked)


def made_rows(graph: Graph, given: Collection[int]) -> tuple[int, ...]:
    """The nodes of created arrays that are sharded like the `given` batch dimensions."""
    if not given or not (graph.created or graph.constrained):
        return ()
    classes = Classes(graph, 1, soft=True, least=2)
    reasons = reasons_against(graph, classes, given)
    sizes = {graph.sizes[node] for node in given}
    rows: list[int] = []
    for node, size in enumerate(graph.sizes):
        asked = not set(BATCH_AXES).isdisjoint(graph.constrained.get(node, ()))
        if (size in sizes or asked) and reasons.get(classes[node]) == "":
            rows.append(node)
    return tuple(rows)


def reasons_against(graph: Graph, classes: Classes, given: Collection[int]) -> dict[int, str]:
    """For each class of created dimensions, the reason not to shard it with the batch, or "".

    `classes` must include soft links. The classes of the batch itself are left out.
    """
    main = classes.of(given)
    split, replicated = set(), set()
    for node, axes in graph.constrained.items():
        if not axes:
            replicated.add(classes[node])
        elif not set(BATCH_AXES).isdisjoint(axes):
            split.add(classes[node])
    excluded = _never_rows(graph, classes)
    sizes = {graph.sizes[node] for node in given} - {0, 1}
    fits = {classes[node] for node, size in enumerate(graph.sizes) if size in sizes}
    shares = _WorkShares(graph, classes, main)
    reasons: dict[int, str] = {}
    for root in sorted((classes.of(graph.created) | split) - main):
        if root in excluded:
            reasons[root] = OF_PARAMETERS
        elif root in split:
            reasons[root] = ""
        elif root in replicated:
            reasons[root] = REPLICATED
        elif root not in fits:
            reasons[root] = SIZE
        elif shares.mostly_alone(root):
            reasons[root] = ""
        else:
            reasons[root] = WITH_BATCH
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
        amounts = [(work.dims, work.forward, 0.0) for work in graph.works]
        amounts += [(dims, 0.0, size) for dims, size in graph.contraction_bytes.items()]
        for dims, work, size in amounts:
            roots = Counter(classes[node] for node in dims)
            for root in roots:
                share = self._alone
                if roots[root] > 1 or any(other in main for other in roots if other != root):
                    share = self._both
                total_work, total_size = share[root]
                share[root] = total_work + work, total_size + size

    def alone(self, root: int) -> tuple[float, float]:
        return self._alone[root]

    def mostly_alone(self, root: int) -> bool:
        """Whether most arithmetic on a class is without the batch; ties go by bytes of results."""
        return self._alone[root] > self._both[root]
