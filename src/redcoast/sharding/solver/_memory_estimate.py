"""Estimates of memory and arithmetic per device, and the search for a plan within a budget."""

from collections.abc import Callable, Mapping, Sequence
from math import prod

from ..program._program import Program
from ..tree._overrides import spec_parts
from ._buffers import bytes_of_parts
from ._figures import Arithmetic, Memory
from ._hardware import FILLED
from ._layout import StorageLayout
from ._strategy import Decision


def arithmetic(decision: Decision) -> Arithmetic:
    """Floating point operations of a step's contractions, in total and on one device.

    Gradients and rematerialisation are included. A `while` loop counts with the number of
    iterations that the planner assumes.
    """
    total = sum(work.flops for work in decision.program.graph.works)
    on_device = decision.of_stage
    count_devices, each = sharing(on_device), 0.0
    for work in on_device.program.graph.works:
        each += work.flops / count_devices(work.nodes)
    return Arithmetic(float(total), each)


def sharing(decision: Decision) -> Callable[[Sequence[int]], int]:
    """Returns a function that gives the number of devices that share the work over dimensions."""
    batch, sizes = decision.batch, decision.sizes
    constrained = decision.program.constraint_axes

    def count_devices(dims: Sequence[int]) -> int:
        count, used = batch.parts(dims), set[str]()
        if any(map(batch.has, dims)):
            used.update(decision.batch_axes)
        if decision.is_parallel(dims):
            used.update(decision.model_axes)
            count *= decision.n
        # The program's own constraints shard other dimensions over the remaining axes.
        own: set[str] = set()
        for node in dims:
            if not batch.has(node) and not decision.is_chosen(node):
                own.update(constrained.get(node, ()))
        return count * prod(sizes.get(axis, 1) for axis in own - used)

    return count_devices


def estimate_memory(layout: StorageLayout, state_bytes: int) -> Memory:
    """Bytes per device of arrays, gradients, optimizer state, activations and constants.

    `state_bytes` is the size of the entire optimizer state, which is sharded like the trained
    parameters, but for what is updated in parts. Arrays that the function closes over are
    replicated.
    """
    decision, program = layout.decision, layout.decision.program
    arrays = trained = trained_in_all = batch = 0.0
    for spec, value in zip(layout.specs, program.parameters, strict=True):
        share = spec_parts(spec, decision.sizes)
        arrays += value.bytes / share
        trained += value.grad * value.bytes / share
        trained_in_all += value.grad * value.bytes
    in_parts = sum(map(layout.updated.__getitem__, layout.update_specs))
    # The optimizer's state is stored as the arrays are.
    states = (state_bytes - in_parts) * trained / max(1, trained_in_all)
    for place, spec in layout.update_specs.items():
        states += layout.updated[place] / spec_parts(spec, decision.sizes)
    # The other arguments of the function.
    for var in program.scope.jaxpr.invars[program.traced.arrays :]:
        value = program.scope.values[var]
        batch += value.bytes / decision.batch.parts(value.nodes[:1])
    return Memory(
        arrays=round(arrays),
        gradients=round(layout.summed_gradients),
        optimizer_state=round(states),
        activations=round(bytes_of_parts(layout.activation_parts)),
        closed_over=sum(constant.bytes for constant in program.constants),  # on every device
        batch=round(batch),
    )


def excess_bytes(layout: StorageLayout, memory: int | float, state_bytes: int) -> int | float:
    """Bytes per device by which a layout does not fit into memory."""
    return max(0, estimate_memory(layout, state_bytes).total - FILLED * memory)


def fit_budget(
    make: Callable[[Sequence[bool]], StorageLayout],
    large: Sequence[bool],
    program: Program,
    axes: Mapping[str, int],
    budget: int,
    state_bytes: int,
) -> StorageLayout:
    """The layout within the budget that shards the fewest arrays, the largest first."""
    sizes: list[int] = []
    for value, is_large in zip(program.parameters, large, strict=True):
        sizes.append(value.bytes * is_large)
    # Both for the message, if nothing fits.
    least = activations = float("inf")
    # From no array to all large ones: the first plan that fits shards the fewest bytes.
    for bound in (float("inf"), *sorted(set(sizes) - {0}, reverse=True)):
        layout = make([size >= bound for size in sizes])
        memory = estimate_memory(layout, state_bytes)
        # Arrays that are sharded in storage are gathered where they are used. The budget leaves
        # this out: activations count as in the layout in which they take least.
        activations = min(activations, memory.activations)
        least = memory.total - memory.activations + activations
        if least <= budget:
            return layout
    shown = ", ".join(f"{axis}={size}" for axis, size in axes.items())
    raise ValueError(
        f"The budget of {budget / 1e6:,.4g} MB for each device is too small. With all large arrays "
        f"sharded over the mesh {shown}, parameters, gradients, optimizer state and activations "
        f"take about {least / 1e6:,.4g} MB. Use more devices, a larger `fsdp` or `model`, or a "
        "smaller batch."
    )
