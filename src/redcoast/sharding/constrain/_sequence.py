"""Sequence parallelism: the sequence is sharded over `model` where no other dimension is.

Between the tensor-parallel parts of a layer, every device computes normalisation, dropout and
residual sums for all of its tokens. Sharding them along the sequence saves memory. An all-reduce
becomes a reduce-scatter and an all-gather, which communicate as many bytes (arXiv:2205.05198,
section 4.2.2).
"""

from collections import Counter

from ..solver._classes import Classes
from ..solver._cost import BatchDims
from ..solver._strategy import Program

# The sequence has at most this fraction of the parameters: learned positions are along it. Most
# parameters are along the width of the model.
_MOST_PARAMETERS = 0.2


def sequence_classes(
    program: Program, classes: Classes, chosen: frozenset[int], batch: BatchDims
) -> frozenset[int]:
    """Finds the sequence: the class with the most bytes of activations that are not sharded.

    The batch and classes of many parameters are excluded.
    """
    graph = program.graph
    blocked = classes.of(graph.blocked)
    owned: Counter[int] = Counter()
    for value in program.parameters:
        owned.update(dict.fromkeys(classes.of(value.dims), value.bytes))
    most = _MOST_PARAMETERS * sum(value.bytes for value in program.parameters)
    many = {one for one, size in owned.items() if size > most}
    kept: Counter[int] = Counter()
    for dims, size in graph.traffic.items():
        roots = {classes[node] for node in dims if classes.divides(node)}
        if roots.isdisjoint(chosen) and any(batch.has(node) for node in dims):
            free = {classes[n] for n in dims if classes.divides(n) and not batch.has(n)}
            kept.update(dict.fromkeys(free - many - blocked, size))
    return frozenset(one for one, _ in kept.most_common(1))
