"""Which dimensions are the batch: of the arrays that a program is given, and of those it makes.

An array that is made in the program, as noise that a loss draws or the zeros that a recurrence
starts from, has nothing to do with the batch unless it meets it. Where it does not, and has as many
rows as the batch, these are split with it if nothing speaks against it.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import chain

from ..program._graph import Graph, Value
from ._classes import Classes

_AXES = frozenset(["data", "fsdp"])
# Why a dimension of what the program makes is not split with the batch.
SIZE, HELD, MET, WHOLE = "size", "held", "met", "whole"


@dataclass(frozen=True)
class Batch:
    """The dimensions that are split with the batch, as nodes.

    `given` are those of its own arrays, and `made` are those that the program makes. `left_out` are
    the places of the batch's arrays that are not taken as rows.
    """

    given: tuple[int, ...]
    made: tuple[int, ...] = ()
    left_out: tuple[int, ...] = ()


def find_batch(graph: Graph, arrays: Sequence[Value], others: Sequence[Value]) -> Batch:
    """The batch among its `arrays`, the `others` that a function is given, and what it makes."""
    given, left_out = _rows(graph, arrays)
    sizes = {graph.sizes[node] for node in given}
    leading = {value.dims[0] for value in others if value.dims and value.shape[0] in sizes}
    rest = {node for value in (*arrays, *others) for node in value.dims} - leading
    # Rows of another argument are like those that are made; whatever else is given is not.
    graph.made.update(leading)
    graph.held.update(rest.difference(given))
    return Batch(given, made_rows(graph, given), left_out)


def _rows(graph: Graph, arrays: Sequence[Value]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The leading dimensions of the batch's arrays that are rows, and the places of the others.

    Where they have several sizes, the batch is what most of the work is done for; not what belongs
    to parameters, as running averages do, and not what is another dimension of the batch, as the
    positions in a sequence are.
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
        met = _Met(graph, soft, ())
        most = lambda node: (*met.alone(soft[node]), sizes[graph.sizes[node]])
        size = graph.sizes[max(free.values(), key=most)]
    else:
        size = sizes.most_common(1)[0][0]
    main = soft.of(n for n in (free or several).values() if graph.sizes[n] == size)
    met = _Met(graph, soft, main)
    rows = {
        place: node
        for place, node in leading.items()
        if soft[node] in main or (place in free and met.mostly_alone(soft[node]))
    }
    return tuple(rows.values()), tuple(place for place in several if place not in rows)


def _free(graph: Graph, arrays: Sequence[Value], leading: dict[int, int]) -> dict[int, int]:
    """Those of `leading` that are neither tied to parameters nor another dimension of the batch."""
    classes = Classes(graph, 1, least=2)
    bound = set(_bound(graph, classes))
    inner = {
        classes[node]
        for value in arrays
        for node in value.dims[1:]
        if classes[value.dims[0]] not in bound and classes[node] != classes[value.dims[0]]
    }
    bound |= inner
    return {place: node for place, node in leading.items() if classes[node] not in bound}


def _bound(graph: Graph, classes: Classes) -> frozenset[int]:
    """Classes that are no rows: of parameters and constants, and what must not be split."""
    return classes.of(graph.held | (graph.blocked - graph.only_rows))


def made_rows(graph: Graph, given: Collection[int]) -> tuple[int, ...]:
    """The nodes of what a program makes that are rows like those that are `given`."""
    if not given or not (graph.made or graph.asked):
        return ()
    classes = Classes(graph, 1, soft=True, least=2)
    why = reasons_against(graph, classes, given)
    sizes = {graph.sizes[node] for node in given}
    taken = {one for one, reason in why.items() if not reason}
    asked = {node for node, axes in graph.asked.items() if not _AXES.isdisjoint(axes)}
    return tuple(
        node
        for node, size in enumerate(graph.sizes)
        if (size in sizes or node in asked) and classes[node] in taken
    )


def reasons_against(graph: Graph, classes: Classes, given: Collection[int]) -> dict[int, str]:
    """Of each class of what a program makes, why it is not split with the batch; or nothing.

    The classes are to be those of all links, soft ones too. Those of the batch are left out.
    """
    main = classes.of(given)
    split, whole = set(), set()
    for node, axes in graph.asked.items():
        (whole if not axes else split if not _AXES.isdisjoint(axes) else set()).add(classes[node])
    bound = _bound(graph, classes)
    sizes = {graph.sizes[node] for node in given} - {0, 1}
    fits = {classes[node] for node, size in enumerate(graph.sizes) if size in sizes}
    met = _Met(graph, classes, main)
    found: dict[int, str] = {}
    for one in sorted((classes.of(graph.made) | split) - main):
        if one in bound:
            found[one] = HELD
        elif one in split:
            found[one] = ""
        elif one in whole:
            found[one] = WHOLE
        elif one not in fits:
            found[one] = SIZE
        else:
            found[one] = "" if met.mostly_alone(one) else MET
    return found


class _Met:
    """How much is done for a class by itself, and how much together with the batch.

    Of queries for each example, nothing is done together with examples but what is linked; a
    sequence of as many tokens as there are examples is nearly always met together with them.
    """

    def __init__(self, graph: Graph, classes: Classes, main: Collection[int]):
        self._alone: dict[tuple[int, str], float] = defaultdict(float)
        self._both: dict[tuple[int, str], float] = defaultdict(float)
        works = ((work.dims, "work", work.forward) for work in graph.works)
        results = ((dims, "result", size) for dims, size in graph.computed.items())
        for dims, kind, amount in chain(works, results):
            roots = [classes[node] for node in dims]
            for one in set(roots):
                others = any(root in main for root in roots if root != one)
                many = self._both if others or roots.count(one) > 1 else self._alone
                many[one, kind] += amount

    def alone(self, one: int) -> tuple[float, float]:
        return self._alone[one, "work"], self._alone[one, "result"]

    def mostly_alone(self, one: int) -> bool:
        """Whether more arithmetic, or without any more of what is looked up, is for it alone."""
        return self.alone(one) > (self._both[one, "work"], self._both[one, "result"])
