"""The sequence dimension, which can be split over `model` where nothing else is.

Between the parts of a layer that are computed split, normalisation, dropout and residual sums are
done by every device for all of its tokens. Split along the sequence they take a part of the memory,
and an all-reduce becomes a reduce-scatter and an all-gather, which send as much
(arXiv:2205.05198, section 4.2.2).
"""

from collections import Counter

from ..solver._classes import Classes
from ..solver._cost import BatchDims
from ..solver._strategy import Program

# Learned positions are parameters along the sequence; the width of the model is most of them.
_FEW = 0.2


def sequence_classes(
    program: Program, classes: Classes, chosen: frozenset[int], batch: BatchDims
) -> frozenset[int]:
    """The class of dimensions, of few parameters and no batch, with the most bytes kept whole."""
    graph = program.graph
    blocked = classes.of(graph.blocked)
    owned: Counter[int] = Counter()
    for value in program.parameters:
        owned.update(dict.fromkeys(classes.of(value.dims), value.bytes))
    most = _FEW * sum(value.bytes for value in program.parameters)
    many = {one for one, size in owned.items() if size > most}
    kept: Counter[int] = Counter()
    for dims, size in graph.traffic.items():
        roots = {classes[node] for node in dims if classes.divides(node)}
        if roots.isdisjoint(chosen) and any(batch.has(node) for node in dims):
            free = {classes[n] for n in dims if classes.divides(n) and not batch.has(n)}
            kept.update(dict.fromkeys(free - many - blocked, size))
    return frozenset(one for one, _ in kept.most_common(1))
