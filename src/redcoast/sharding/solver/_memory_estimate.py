"""Estimates of memory and arithmetic per device, and the search for a plan within a budget."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import permutations
from math import ceil, prod

from .._mesh_axes import parts
from ..program._graph import Dims, Value
from ..program._program import Program
from ..tree._overrides import spec_parts
from ._buffers import ModelArray, Part, bytes_of_parts
from ._figures import Arithmetic, Memory
from ._layout import StorageLayout
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
    on_device = decision.of_stage
    shared, each = sharing(on_device), 0.0
    for work in on_device.program.graph.works:
        each += work.flops / shared(work.dims)
    return Arithmetic(float(total), each)


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


def estimate_memory(layout: StorageLayout, state_bytes: int) -> Memory:
    """Bytes per device of arrays, gradients, optimizer state, activations and constants.

    `state_bytes` is the size of the entire optimizer state, which is sharded like the trained
    parameters. Arrays that the function closes over are replicated.
    """
    decision, program = layout.decision, layout.decision.program
    arrays = gradients = trained = batch = 0.0
    # Gradients and optimizer state are stored as the array is.
    for spec, value in zip(layout.specs, program.parameters, strict=True):
        share = spec_parts(spec, decision.sizes)
        arrays += value.bytes / share
        gradients += value.grad * value.bytes / share
        trained += value.grad * value.bytes
    # The other arguments of the function.
    for var in program.scope.jaxpr.invars[program.traced.arrays :]:
        value = program.scope.values[var]
        batch += value.bytes / decision.batch.parts(value.dims[:1])
    return Memory(
        arrays=round(arrays),
        gradients=round(gradients),
        optimizer_state=round(state_bytes * gradients / max(1, trained)),
        activations=round(bytes_of_parts(activation_parts(layout))),
        closed_over=sum(constant.bytes for constant in program.constants),  # on every device
        batch=round(batch),
    )


def activation_parts(layout: StorageLayout) -> tuple[Part, ...]:
    """Bytes per device of intermediate values at the peak, and the operation of each."""
    decision = layout.decision
    program, sizes, compiler = decision.program, decision.sizes, decision.hardware.compiler
    if staged := program.staged:
        # The microbatches of a pipeline are not followed one by one.
        on_device, saved, held = decision.of_stage, 0.0, 0.0
        for dims, size in on_device.program.graph.saved.items():
            saved += size / _devices(on_device, dims)
        # While a stage runs, its layers and their gradients are whole, but for tensor parallelism.
        for place in staged.layered:
            value = program.parameters[place]
            whole = value.bytes / staged.stages
            if decision.computed[place] is not None:
                whole /= decision.n
            own = value.bytes / spec_parts(layout.specs[place], sizes)
            held += (1 + value.grad) * (whole - own)
        # The microbatches that enter and leave.
        carried = staged.carried / decision.batch.count
        held += 2 * carried * staged.ticks / staged.microbatches
        return (saved, ()), (held, ())
    shares: dict[tuple[Dims, bool], int | float] = {}  # of an array, that each device has

    def size_of(value: Value, *, of_product: bool = False) -> int | float:
        key = value.dims, of_product
        if key not in shares:
            shares[key] = 1 / _devices(decision, value.dims, of_product=of_product)
            if compiler == "tpu":
                local: list[int] = []
                for size, axes in zip(value.shape, decision.axes_of(value.dims), strict=True):
                    local.append(max(1, size // parts(axes or (), sizes)))
                shares[key] *= padding(local)
        return value.bytes * shares[key]

    arrays: list[ModelArray] = []
    gradients = 0.0
    for spec, value, d in zip(layout.specs, program.parameters, decision.computed, strict=True):
        share, split = spec_parts(spec, sizes), 1
        if d is not None:
            split = decision.n
        whole = value.bytes / split  # as it is computed with
        gradient = value.grad * value.bytes / share
        gradients += gradient
        arrays.append(
            ModelArray(
                gathered=whole * (share > split),  # 0 if it is stored as it is used
                gradient=gradient,
                local=value.grad * whole * (decision.batch.count > 1),  # before it is summed
                first_use=program.graph.first_use.get(value.dims, ()),
            )
        )
    peak = find_peak(
        program.scope,
        size_of,
        arrays,
        compiler=compiler,
        trains=program.traced.trains,
        gathered_size_of=partial(size_of, of_product=True),
    )
    # Gradients are counted by themselves. Those that come later leave their memory until then.
    scale = max(0.0, peak.bytes - gradients) / max(1.0, peak.temporaries)
    return tuple((size * scale, source) for size, source in peak.parts)


def excess_bytes(layout: StorageLayout, memory: int | float, state_bytes: int) -> int | float:
    """Bytes per device by which a layout does not fit into memory."""
    return max(0, estimate_memory(layout, state_bytes).total - FILLED * memory)


def _devices(decision: Decision, dims: Dims, *, of_product: bool = False) -> int:
    """The number of devices that share an array with these dimensions.

    An operand or a result of a product (`of_product`) is not split along the sequence.
    """
    count = spec_parts(decision.axes_of(dims), decision.sizes)
    if decision.is_sequence(dims) and not of_product and not decision.is_parallel(dims):
        count *= decision.n
    return count


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
        # An array that is split is gathered where it is used, which the budget leaves out.
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
