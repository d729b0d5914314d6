"""How much of a program's arithmetic each device does."""

from collections.abc import Mapping

from .dataflow import Decision, batch_dims, parts


def arithmetic(decision: Decision, axes: Mapping[str, int]) -> dict[str, int | float]:
    """Floating point operations of a step's contractions: all, and those of one device.

    Gradients and what is computed again for them are among them; loops without a known end count as
    often as the planner takes them to run.
    """
    graph, classes = decision.program.graph, decision.classes
    batch = batch_dims(decision.program, parts(decision.way.batch, axes))
    n = parts(decision.way.model, axes)
    total = share = 0.0
    for work in graph.works:
        split = any(classes.divides(d) and classes[d] in decision.chosen for d in work.dims)
        total += work.flops
        share += work.flops / batch.parts(work.dims) / (n if split else 1)
    return {"flops": total, "per_device": share}
