"""Estimates of memory and arithmetic per device, and the search for a plan within a budget."""

from collections.abc import Callable, Mapping, Sequence
from math import prod

from ..program._graph import Dims, Graph, Value
from ..tree._leaf_plans import LeafPlan
from ..tree._overrides import spec_parts
from ._buffers import ModelArray, Part
from ._classes import Classes
from ._figures import Arithmetic, Memory
from ._peak import find_peak
from ._strategy import (
    Decision,
    Program,
    any_tensor_parallel,
    batch_of,
    parts,
    saved_bytes,
    staged_sum,
)


def arithmetic(decision: Decision, axes: Mapping[str, int]) -> Arithmetic:
    """Floating point operations of a step's contractions, in total and on one device.

    Gradients and rematerialisation are included. A `while` loop counts with the number of
    iterations that the planner assumes.
    """
    total = sum(work.flops for work in decision.program.graph.works)

    def of_device(one: Decision) -> int | float:
        shared = sharing(one, axes)
        return sum(work.flops / shared(work.dims) for work in one.program.graph.works)

    return Arithmetic(float(total), float(staged_sum(decision, of_device)))


def sharing(decision: Decision, axes: Mapping[str, int]) -> Callable[[Sequence[int]], int]:
    """Returns a function that gives the number of devices that share the work over dimensions."""
    classes, strategy = decision.classes, decision.strategy
    batch = batch_of(decision, axes)
    asked = asked_axes(decision.program.graph)

    def shared(dims: Sequence[int]) -> int:
        rows = [d for d in dims if batch.has(d)]
        split = [d for d in dims if classes.divides(d) and classes[d] in decision.chosen]
        taken = {*(strategy.batch if rows else ()), *(strategy.model if split else ())}
        # The program's own constraints shard other dimensions over the remaining axes.
        own = {axis for d in {*dims} - {*rows, *split} for axis in asked.get(d, ())} - taken
        count = batch.parts(dims) * (parts(strategy.model, axes) if split else 1)
        return count * prod(axes.get(axis, 1) for axis in own)

    return shared


def asked_axes(graph: Graph) -> dict[int, tuple[str, ...]]:
    """The axes of the program's own constraints, for each node that is linked to a constraint."""
    asked = {node: names for node, names in graph.constrained.items() if names}
    if not asked:
        return {}
    classes = Classes(graph, 1, least=2)
    named = {classes[node]: names for node, names in asked.items()}
    return {n: named[classes[n]] for n in range(len(graph.sizes)) if classes[n] in named}


# The part of the memory that an estimate may use: it does not include the compiler's temporaries.
FILLED = 0.85
DEFAULT_MEMORY = 80e9  # of an A100, for devices that do not report their memory


def estimate_memory(
    plans: Sequence[LeafPlan], decision: Decision, axes: Mapping[str, int], state_bytes: int
) -> Memory:
    """Bytes per device of arrays, gradients, optimizer state, activations and constants.

    `state_bytes` is the size of the entire optimizer state, which is sharded like the trained
    parameters. Arrays that the function closes over are replicated.
    """
    arrays = gradients = trained = 0.0
    for row, value in zip(plans, decision.program.parameters, strict=True):
        share = spec_parts(row.spec, axes)
        arrays += value.bytes / share
        gradients += value.grad * value.bytes / share
        trained += value.grad * value.bytes
    sizes = (
        arrays,
        gradients,
        state_bytes * gradients / max(1, trained),
        sum(size for size, _ in activation_parts(plans, decision, axes)),
        sum(one.bytes for one in decision.program.constants),
        _batch_bytes(decision, axes),
    )
    rounded = [round(size) for size in sizes]
    return Memory(*rounded, total=sum(rounded))


def activation_parts(
    plans: Sequence[LeafPlan], decision: Decision, axes: Mapping[str, int]
) -> tuple[Part, ...]:
    """Bytes per device of intermediate values at the peak, and the operation of each."""
    if decision.program.staged is not None:
        # The microbatches of a pipeline are not followed one by one.
        saved = (saved_bytes(decision, axes), ())
        return (saved, (_held_by_stage(plans, decision, axes), ()))
    return _peak_parts([spec_parts(row.spec, axes) for row in plans], decision, axes)


def peak_bytes(decision: Decision, axes: Mapping[str, int], sharded: Sequence[bool]) -> int | float:
    """Bytes per device of activations and the batch, if `sharded` arrays use all devices."""
    if decision.program.staged is not None:
        return saved_bytes(decision, axes)
    devices = axes["fsdp"] * axes["model"]
    n = parts(decision.strategy.model, axes)
    shares = []
    for is_sharded, d in zip(sharded, decision.computed, strict=True):
        shares.append(devices if is_sharded else n if d is not None else 1)
    activations = sum(size for size, _ in _peak_parts(shares, decision, axes))
    return activations + _batch_bytes(decision, axes)


def _peak_parts(
    shares: Sequence[int], decision: Decision, axes: Mapping[str, int]
) -> tuple[Part, ...]:
    """What is in memory at the peak beside gradients; `shares` are the parts of each array."""
    batch, n = batch_of(decision, axes), parts(decision.strategy.model, axes)
    known: dict[Dims, int] = {}

    def size_of(value: Value) -> int | float:
        if value.dims not in known:
            split = n if any_tensor_parallel(decision, value.dims) else 1
            known[value.dims] = batch.parts(value.dims) * split
        return value.bytes / known[value.dims]

    program = decision.program
    arrays = []
    for share, value, d in zip(shares, program.parameters, decision.computed, strict=True):
        split = 1 if d is None else n
        whole = value.bytes / split
        arrays.append(
            ModelArray(
                gathered=whole * (share > split),
                gradient=value.grad * value.bytes / share,
                local=value.grad * whole * (batch.count > 1),
                first_use=program.graph.first_use.get(value.dims, ()),
            )
        )
    peak = find_peak(program.scope, size_of, arrays, trains=program.traced.trains)
    # Gradients are counted by themselves. Those that come later leave their memory until then.
    needed = max(0.0, peak.bytes - sum(one.gradient for one in arrays))
    scale = needed / max(1.0, peak.temporaries)
    return tuple((size * scale, source) for size, source in peak.parts)


def _batch_bytes(decision: Decision, axes: Mapping[str, int]) -> int | float:
    """Bytes per device of the arguments that are not the model."""
    batch, program = batch_of(decision, axes), decision.program
    arguments = program.scope.jaxpr.invars[program.traced.arrays :]
    values = [program.scope.values[var] for var in arguments]
    return sum(value.bytes / batch.parts(value.dims[:1]) for value in values)


def _held_by_stage(
    plans: Sequence[LeafPlan], decision: Decision, axes: Mapping[str, int]
) -> int | float:
    """Bytes per device that a stage of a pipeline needs beside what is saved for its gradient.

    These are its layers, all-gathered, with their gradients, and the microbatches that enter and
    leave.
    """
    if (staged := decision.program.staged) is None:
        return 0.0
    held = 0.0
    for place in staged.layered:
        row, value = plans[place], decision.program.parameters[place]
        split = parts(decision.strategy.model, axes) if decision.computed[place] is not None else 1
        alone = value.bytes / staged.stages / split
        held += (1 + value.grad) * (alone - value.bytes / spec_parts(row.spec, axes))
    carried = staged.carried / batch_of(decision, axes).count
    return held + 2 * carried * staged.ticks / staged.microbatches


def room_for_activations(
    program: Program,
    axes: Mapping[str, int],
    sharded: Sequence[bool],
    memory: int | float,
    state_bytes: int,
) -> int | float:
    """Bytes per device that are left for activations if `sharded` arrays use all devices."""
    devices = axes["fsdp"] * axes["model"]
    held = sum(one.bytes for one in program.constants)
    grads = trained = 0.0
    layered = frozenset() if program.staged is None else program.staged.layered
    for place, (value, is_sharded) in enumerate(zip(program.parameters, sharded, strict=True)):
        part = value.bytes / (devices if is_sharded else 1)
        part /= axes["pipe"] if place in layered else 1
        held += part
        grads += value.grad * part
        trained += value.grad * value.bytes
    return FILLED * memory - held - grads - state_bytes * grads / max(1, trained)


def fit_budget(
    make: Callable[[Sequence[bool]], tuple[list[LeafPlan], Decision]],
    large: Sequence[bool],
    program: Program,
    axes: Mapping[str, int],
    budget: int,
    state_bytes: int,
) -> tuple[list[LeafPlan], Decision]:
    """The plan within the budget that shards the fewest arrays, the largest first."""
    pairs = zip(program.parameters, large, strict=True)
    sizes = [value.bytes if big else 0 for value, big in pairs]
    least = activations = float("inf")
    for bound in (float("inf"), *sorted(set(sizes) - {0}, reverse=True)):
        plans, decision = make([size >= bound for size in sizes])
        memory = estimate_memory(plans, decision, axes, state_bytes)
        # An array that is split is gathered where it is used, which the budget leaves out.
        activations = min(activations, memory.activations)
        least = memory.total - memory.activations + activations
        if least <= budget:
            return plans, decision
    shown = ", ".join(f"{axis}={size}" for axis, size in axes.items())
    raise ValueError(
        f"The budget of {budget / 1e6:,.4g} MB for each device is too small. With all large arrays "
        f"sharded over the mesh {shown}, parameters, gradients, optimizer state and activations "
        f"take about {least / 1e6:,.4g} MB. Use more devices, a larger `fsdp` or `model`, or a "
        "smaller batch."
    )
