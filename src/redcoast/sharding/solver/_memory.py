"""Estimates of memory and arithmetic per device, and the search for a plan within a budget."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import permutations
from math import ceil, prod

from .._mesh_axes import parts
from ..program._graph import Dims, Value
from ..program._program import Program
from ..tree._leaf_plans import LeafPlan
from ..tree._overrides import spec_parts
from ._buffers import ModelArray, Part
from ._figures import Arithmetic, Memory
from ._peak import find_peak
from ._strategy import Decision

# The part of the memory that an estimate may use: it does not include the compiler's temporaries.
FILLED = 0.85
DEFAULT_MEMORY = 80e9  # of an A100, for devices that do not report their memory


def arithmetic(decision: Decision) -> Arithmetic:
    """Floating point operations of a step's contractions, in total and on one device.

    Gradients and rematerialisation are included. A `while` loop counts with the number of
    iterations that the planner assumes.
    """
    total = sum(work.flops for work in decision.program.graph.works)

    def of_device(decision: Decision) -> int | float:
        shared = sharing(decision)
        return sum(work.flops / shared(work.dims) for work in decision.program.graph.works)

    return Arithmetic(float(total), float(_staged_sum(decision, of_device)))


def sharing(decision: Decision) -> Callable[[Sequence[int]], int]:
    """Returns a function that gives the number of devices that share the work over dimensions."""
    batch, sizes = decision.batch, decision.sizes
    asked = decision.program.asked_axes

    def shared(dims: Sequence[int]) -> int:
        count, taken = batch.parts(dims), set[str]()
        if any(map(batch.has, dims)):
            taken.update(decision.batch_axes)
        if decision.is_parallel(dims):
            taken.update(decision.model_axes)
            count *= decision.n
        # The program's own constraints shard other dimensions over the remaining axes.
        own: set[str] = set()
        for node in dims:
            if not batch.has(node) and not decision.is_chosen(node):
                own.update(asked.get(node, ()))
        return count * prod(sizes.get(axis, 1) for axis in own - taken)

    return shared


def _staged_sum(decision: Decision, measure: Callable[[Decision], int | float]) -> int | float:
    """A sum over the operations of a program, for one stage if it runs as a pipeline."""
    total, staged = measure(decision), decision.program.staged
    if staged is None:
        return total
    outside = measure(replace(decision, program=staged.outside))
    return outside + (total - outside) * staged.share


def estimate_memory(plans: Sequence[LeafPlan], decision: Decision, state_bytes: int) -> Memory:
    """Bytes per device of arrays, gradients, optimizer state, activations and constants.

    `state_bytes` is the size of the entire optimizer state, which is sharded like the trained
    parameters. Arrays that the function closes over are replicated.
    """
    arrays = gradients = trained = 0.0
    for row, value in zip(plans, decision.program.parameters, strict=True):
        share = spec_parts(row.spec, decision.sizes)
        arrays += value.bytes / share
        gradients += value.grad * value.bytes / share
        trained += value.grad * value.bytes
    sizes = (
        arrays,
        gradients,
        state_bytes * gradients / max(1, trained),
        sum(size for size, _ in activation_parts(plans, decision)),
        sum(constant.bytes for constant in decision.program.constants),
        _batch_bytes(decision),
    )
    rounded = list(map(round, sizes))
    return Memory(*rounded, total=sum(rounded))


def activation_parts(plans: Sequence[LeafPlan], decision: Decision) -> tuple[Part, ...]:
    """Bytes per device of intermediate values at the peak, and the operation of each."""
    if decision.program.staged is not None:
        # The microbatches of a pipeline are not followed one by one.
        return (_saved_bytes(decision), ()), (_held_by_stage(plans, decision), ())
    return _peak_parts([spec_parts(row.spec, decision.sizes) for row in plans], decision)


def peak_bytes(decision: Decision, sharded: Sequence[bool]) -> int | float:
    """Bytes per device of activations and the batch, if `sharded` arrays use all devices."""
    if decision.program.staged is not None:
        return _saved_bytes(decision)
    shares: list[int] = []
    for is_sharded, d in zip(sharded, decision.computed, strict=True):
        share = 1
        if is_sharded:
            share = parts(("fsdp", "model"), decision.sizes)
        elif d is not None:
            share = decision.n
        shares.append(share)
    activations = sum(size for size, _ in _peak_parts(shares, decision))
    return activations + _batch_bytes(decision)


def _saved_bytes(decision: Decision) -> int | float:
    """Bytes per device that are saved for the backward pass."""

    def of_program(decision: Decision) -> int | float:
        total = 0.0
        for (dims, _), size in decision.program.graph.saved.items():
            total += size / _devices(decision, dims)
        return total

    return _staged_sum(decision, of_program)


def _devices(decision: Decision, dims: Dims) -> int:
    """The number of devices that share an array with these dimensions."""
    count = decision.batch.parts(dims)
    if decision.is_parallel(dims):
        count *= decision.n
    return count


def _peak_parts(shares: Sequence[int], decision: Decision) -> tuple[Part, ...]:
    """What is in memory at the peak beside gradients; `shares` are the parts of each array."""
    compiler, trains = decision.hardware.compiler, decision.program.traced.trains
    known: dict[Dims, int | float] = {}

    def size_of(value: Value) -> int | float:
        if value.dims not in known:
            known[value.dims] = 1 / _devices(decision, value.dims)
            if compiler == "tpu":
                known[value.dims] *= padding(_local_shape(value, decision))
        return value.bytes * known[value.dims]

    program = decision.program
    arrays: list[ModelArray] = []
    gradients = 0.0
    for share, value, d in zip(shares, program.parameters, decision.computed, strict=True):
        split = 1
        if d is not None:
            split = decision.n
        whole = value.bytes / split
        gradients += value.grad * value.bytes / share
        arrays.append(
            ModelArray(
                gathered=whole * (share > split),
                gradient=value.grad * value.bytes / share,
                local=value.grad * whole * (decision.batch.count > 1),
                first_use=program.graph.first_use.get(value.dims, ()),
            )
        )
    peak = find_peak(program.scope, size_of, arrays, compiler=compiler, trains=trains)
    # Gradients are counted by themselves. Those that come later leave their memory until then.
    scale = max(0.0, peak.bytes - gradients) / max(1.0, peak.temporaries)
    return tuple((size * scale, source) for size, source in peak.parts)


def _local_shape(value: Value, decision: Decision) -> tuple[int, ...]:
    """The shape of an array on each device."""
    batch = decision.batch
    shape: list[int] = []
    for place, node in enumerate(value.dims):
        before = value.dims[:place]
        # A dimension is not split over axes that an earlier one is split over.
        size = value.shape[place] * batch.parts(before) // batch.parts((*before, node))
        if decision.is_parallel((node,)) and not decision.is_parallel(before):
            size //= decision.n
        shape.append(max(1, size))
    return tuple(shape)


# The rows and columns of a tile of a TPU's memory.
_TILE = 8, 128


def padding(shape: Sequence[int]) -> float:
    """How much larger an array is in the memory of a TPU, which has tiles of 8 x 128 elements.

    The compiler chooses the two dimensions of tiles; those that need least are assumed.
    """
    least = 1.0 if len(shape) < 2 else float("inf")
    for row, column in permutations(range(len(shape)), 2):
        rows = ceil(shape[row] / _TILE[0]) * _TILE[0]
        columns = ceil(shape[column] / _TILE[1]) * _TILE[1]
        least = min(least, rows * columns / (shape[row] * shape[column]))
    return least


def _batch_bytes(decision: Decision) -> int | float:
    """Bytes per device of the arguments that are not the model."""
    program, total = decision.program, 0.0
    for var in program.scope.jaxpr.invars[program.traced.arrays :]:
        value = program.scope.values[var]
        total += value.bytes / decision.batch.parts(value.dims[:1])
    return total


def _held_by_stage(plans: Sequence[LeafPlan], decision: Decision) -> int | float:
    """Bytes per device that a stage of a pipeline needs beside what is saved for its gradient.

    These are its layers, all-gathered, with their gradients, and the microbatches that enter and
    leave.
    """
    staged = decision.program.staged
    assert staged is not None
    held = 0.0
    # While a stage runs, its layers and their gradients are whole, but for tensor parallelism.
    for place in staged.layered:
        value = decision.program.parameters[place]
        whole = value.bytes / staged.stages
        if decision.computed[place] is not None:
            whole /= decision.n
        own = value.bytes / spec_parts(plans[place].spec, decision.sizes)
        held += (1 + value.grad) * (whole - own)
    carried = staged.carried / decision.batch.count
    return held + 2 * carried * staged.ticks / staged.microbatches


def room_for_activations(
    program: Program,
    axes: Mapping[str, int],
    sharded: Sequence[bool],
    memory: int | float,
    state_bytes: int,
) -> int | float:
    """Bytes per device that are left for activations if `sharded` arrays use all devices."""
    held = sum(constant.bytes for constant in program.constants)
    # The optimizer's state is sharded like the gradients of trained arrays.
    grads = trained = 0.0
    layered = frozenset[int]()
    if program.staged is not None:
        layered = program.staged.layered
    for place, (value, is_sharded) in enumerate(zip(program.parameters, sharded, strict=True)):
        part = float(value.bytes)
        if is_sharded:
            part /= parts(("fsdp", "model"), axes)
        if place in layered:
            part /= axes["pipe"]
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
    sizes: list[int] = []
    for value, is_large in zip(program.parameters, large, strict=True):
        sizes.append(value.bytes * is_large)
    least = activations = float("inf")
    # From no array to all large ones: the first plan that fits shards the fewest bytes.
    for bound in (float("inf"), *sorted(set(sizes) - {0}, reverse=True)):
        plans, decision = make([size >= bound for size in sizes])
        memory = estimate_memory(plans, decision, state_bytes)
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
