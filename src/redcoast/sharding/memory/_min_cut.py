"""Decides which values of a block are kept, and which are computed again from them.

A value is available in the backward pass if it is kept, or if all that it is computed from is
available. At a price for each kept byte, the cheapest choice is a minimum cut, as in the
partitioner of PyTorch's compiler (https://dev-discuss.pytorch.org/t/467).
"""

from collections.abc import Collection, Sequence

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

from ._flat import Flat, FlatStep

_PRECISION = 1e7  # of capacities, which are integers
_INFINITE = 2**30  # two of them are still an `int32`
_APART = 0.1  # the part by which the price of the last value is above that of the first


def choose_kept(
    flat: Flat,
    steps: Sequence[FlatStep],
    price: float,
    seconds: Sequence[float],
    free: Collection[int],
    *,
    forced: bool = True,
) -> tuple[set[int], set[int]]:
    """The values that are kept, and the places of the steps that are computed again.

    - `steps`: the steps of the block.
    - `price`: seconds for each kept byte.
    - `seconds`: what each step takes.
    - `free`: values of the block that are kept in any case.
    - `forced`: whether steps whose derivatives need values inside of them are computed again.
    """
    writes: dict[int, int] = {}
    needed: set[int] = set()
    for place, step in enumerate(steps):
        writes.update(dict.fromkeys(step.outputs, place))
        needed |= step.needs
    needed &= writes.keys()
    numbers = list(writes)
    # Nodes: the source, the sink, a node for each value, and one for each step.
    node_of = {number: 2 + place for place, number in enumerate(numbers)}
    first_step = 2 + len(numbers)
    heads: list[int] = []
    tails: list[int] = []
    costs: list[float] = []

    def connect(head: int, tail: int, cost: float) -> None:
        heads.append(head)
        tails.append(tail)
        costs.append(cost)

    for place, number in enumerate(numbers):
        if number in needed:
            connect(0, node_of[number], np.inf)
        # Values that are worth as much, as the results of like products, are told apart.
        kept = price * flat.sizes[number] * (1 + _APART * place / len(numbers))
        if number in free:
            kept = 0.0
        connect(node_of[number], first_step + writes[number], kept)
    for place, step in enumerate(steps):
        node = first_step + place
        connect(node, 1, seconds[place])
        if step.hides and forced:
            connect(0, node, np.inf)
        for number in step.reads:
            if number in node_of:
                connect(node, node_of[number], np.inf)
    reached = _reached(heads, tails, np.array(costs), first_step + len(steps))
    again = {place for place in range(len(steps)) if first_step + place in reached}
    kept = set[int]()
    for number in numbers:
        if node_of[number] in reached and writes[number] not in again:
            kept.add(number)
    return kept, again


def _reached(heads: Sequence[int], tails: Sequence[int], costs: np.ndarray, count: int) -> set[int]:
    """The nodes on the side of the source of a minimum cut."""
    finite = costs[np.isfinite(costs)]
    unit = max(float(np.sum(finite)) / _PRECISION, 1e-30)
    capacities = np.full(len(costs), _INFINITE)
    is_finite = np.isfinite(costs)
    capacities[is_finite] = np.ceil(costs[is_finite] / unit).astype(int)
    shape = (count, count)
    graph = csr_array((capacities, (heads, tails)), shape=shape, dtype=np.int32)
    graph.sum_duplicates()
    graph.data = np.minimum(graph.data, _INFINITE)
    flow = maximum_flow(graph, 0, 1).flow
    left = csr_array(graph - flow)
    left.eliminate_zeros()
    order = breadth_first_order(left, 0, return_predecessors=False)
    return set(map(int, order))
