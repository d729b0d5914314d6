"""How much of a program's arithmetic each device does."""

from collections.abc import Callable, Mapping, Sequence
from math import prod

from ..program.graph import Graph
from .classes import Classes
from .dataflow import Decision, batch_dims, parts


def arithmetic(decision: Decision, axes: Mapping[str, int]) -> dict[str, int | float]:
    """Floating point operations of a step's contractions: all, and those of one device.

    Gradients and what is computed again for them are among them; loops without a known end count as
    often as the planner takes them to run.
    """
    shared = sharing(decision, axes)
    total = share = 0.0
    for work in decision.program.graph.works:
        total += work.flops
        share += work.flops / shared(work.dims)
    return {"flops": total, "per_device": share}


def sharing(decision: Decision, axes: Mapping[str, int]) -> Callable[[Sequence[int]], int]:
    """How many devices share what is done over some dimensions: 1 if each does all of it."""
    classes, way = decision.classes, decision.way
    batch = batch_dims(decision.program, parts(way.batch, axes))
    asked = asked_axes(decision.program.graph)

    def shared(dims: Sequence[int]) -> int:
        rows = [d for d in dims if batch.has(d)]
        split = [d for d in dims if classes.divides(d) and classes[d] in decision.chosen]
        taken = {*(way.batch if rows else ()), *(way.model if split else ())}
        # Of the other dimensions, what the program splits itself goes over the axes that are left.
        own = {axis for d in {*dims} - {*rows, *split} for axis in asked.get(d, ())} - taken
        count = batch.parts(dims) * (parts(way.model, axes) if split else 1)
        return count * prod(axes.get(axis, 1) for axis in own)

    return shared


def asked_axes(graph: Graph) -> dict[int, tuple[str, ...]]:
    """The axes that a program itself splits dimensions over, and all those linked to them."""
    asked = {node: names for node, names in graph.asked.items() if names}
    if not asked:
        return {}
    classes = Classes(graph, 1, least=2)
    named = {classes[node]: names for node, names in asked.items()}
    return {n: named[classes[n]] for n in range(len(graph.sizes)) if classes[n] in named}
