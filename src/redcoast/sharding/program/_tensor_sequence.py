"""The dimension that sequence parallelism splits, between the parts that are tensor-parallel."""

from collections import Counter
from collections.abc import Sequence
from itertools import filterfalse

from ._batch_dims import BatchDims
from ._classes import Classes
from ._program import Program

# The sequence has at most this fraction of the parameters: learned positions are along it. Most
# parameters are along the width of the model.
_MOST_PARAMETERS = 0.2


def find_sequence(
    program: Program,
    classes: Classes,
    chosen: frozenset[int],
    batch: BatchDims,
    batch_axes: Sequence[str],
) -> frozenset[int]:
    """Finds the sequence: the class with the most bytes of activations that are not sharded.

    There is none if `batch_axes`, those that the batch is split over, have `model`: nothing is
    tensor-parallel then. The batch and classes of many parameters are excluded. With sequence
    parallelism, every device computes normalisation, dropout and residual sums for some tokens, and
    not for all of them. This saves memory. An all-reduce becomes a reduce-scatter and an
    all-gather, which communicate as many bytes (arXiv:2205.05198, section 4.2.2).
    """
    if "model" in batch_axes:
        return frozenset()
    graph = program.graph
    blocked = classes.of(graph.blocked)
    owned: Counter[int] = Counter()
    for value in program.parameters:
        owned.update(dict.fromkeys(classes.of(value.nodes), value.bytes))
    # Weights have the width of the model and hidden sizes, and no sequence.
    most = _MOST_PARAMETERS * sum(value.bytes for value in program.parameters)
    of_parameters: set[int] = set()
    for root, size in owned.items():
        if size > most:
            of_parameters.add(root)
    unsharded: Counter[int] = Counter()
    for dims, size in graph.memory_traffic.items():
        divided = list(filter(classes.divides, dims))
        # Activations that every device of `model` would have as a whole.
        if classes.of(divided).isdisjoint(chosen) and any(map(batch.has, dims)):
            free = classes.of(filterfalse(batch.has, divided))
            unsharded.update(dict.fromkeys(free - of_parameters - blocked, size))
    return frozenset(root for root, _ in unsharded.most_common(1))
