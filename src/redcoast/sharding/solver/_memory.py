"""How much memory a plan takes on each device, by a rough count, and how to stay in a budget."""

from collections.abc import Callable, Mapping, Sequence
from math import prod

from ..program._graph import Graph
from ..tree._overrides import spec_parts
from ..tree._rows import Row
from ._classes import Classes
from ._strategy import Decision, Program, batch_dims, parts, saved_bytes


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


# So much of a device may be taken by an estimate, which leaves out what compilers add.
FILLED = 0.85
# Of devices that do not say what they have: an A100.
ASSUMED = 80e9
Make = Callable[[Sequence[bool]], tuple[list[Row], Decision]]


def estimate(
    rows: Sequence[Row], decision: Decision, axes: Mapping[str, int], state_bytes: int
) -> dict[str, int]:
    """Bytes on each device: the arrays, their gradients and optimizer state, and activations.

    `state_bytes` is how many bytes of optimizer state there are in all; it is split as the
    parameters that are trained are. What the function closes over is on every device.
    """
    arrays = gradients = trained = 0.0
    for row, value in zip(rows, decision.program.parameters, strict=True):
        share = spec_parts(row.spec, axes)
        arrays += value.bytes / share
        gradients += value.grad * value.bytes / share
        trained += value.grad * value.bytes
    found = {
        "arrays": round(arrays),
        "gradients": round(gradients),
        "optimizer_state": round(state_bytes * gradients / max(1, trained)),
        "activations": round(saved_bytes(decision, axes)),
        "closed_over": sum(one.bytes for one in decision.program.constants),
    }
    return found | {"total": sum(found.values())}


def room(
    program: Program,
    axes: Mapping[str, int],
    covered: Sequence[bool],
    memory: int | float,
    state_bytes: int,
) -> int | float:
    """Bytes left on each device for activations, if large arrays are split as far as they go."""
    devices = axes["fsdp"] * axes["model"]
    held = sum(one.bytes for one in program.constants)
    grads = trained = 0.0
    for value, cover in zip(program.parameters, covered, strict=True):
        part = value.bytes / (devices if cover else 1)
        held += part
        grads += value.grad * part
        trained += value.grad * value.bytes
    return FILLED * memory - held - grads - state_bytes * grads / max(1, trained)


def fit_budget(
    make: Make,
    large: Sequence[bool],
    program: Program,
    axes: Mapping[str, int],
    budget: int,
    state_bytes: int,
) -> tuple[list[Row], Decision]:
    """The plan that splits the fewest arrays, the largest ones, and stays in the budget."""
    sizes = [
        value.bytes if big else 0 for value, big in zip(program.parameters, large, strict=True)
    ]
    least = float("inf")
    for bound in (float("inf"), *sorted(set(sizes) - {0}, reverse=True)):
        rows, decision = make([size >= bound for size in sizes])
        least = estimate(rows, decision, axes, state_bytes)["total"]
        if least <= budget:
            return rows, decision
    shown = ", ".join(f"{axis}={size}" for axis, size in axes.items())
    raise ValueError(
        f"The budget of {budget / 1e6:,.4g} MB for each device is too small: with everything split "
        f"over the mesh {shown}, parameters, gradients, optimizer state and activations take about "
        f"{least / 1e6:,.4g} MB. Use more devices, a larger `fsdp` or `model`, or a smaller batch."
    )
