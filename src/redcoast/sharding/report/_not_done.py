"""What a mesh asks for and a plan does not do, with the reason."""

from collections.abc import Iterable
from math import prod

from ...distributed._mesh import BATCH_AXES
from ._data import NotDone, PlannedArray, PlanReport, ProgramReport


def find_not_done(report: PlanReport) -> tuple[NotDone, ...]:
    """At most one entry for each of `model`, `fsdp` and the batch."""
    too_small = _too_small(report)
    if too_small is not None:
        return (too_small,)
    entries = _tensor_parallelism(report), _fsdp(report), _batch(report)
    return tuple(filter(None, entries))


def parameters_of(report: PlanReport) -> list[PlannedArray]:
    """The parameters, the largest first."""
    parameters: list[PlannedArray] = []
    for array in report.arrays:
        if array.role == "parameter":
            parameters.append(array)
    return sorted(parameters, key=lambda array: -array.size)


def sharded_over(arrays: Iterable[PlannedArray], axis: str) -> list[PlannedArray]:
    """The arrays that are sharded over an axis."""
    return [array for array in arrays if axis in array.axes]


def is_tensor_parallel(array: PlannedArray) -> bool:
    """Whether an array is computed with in parts; an override with `model` makes it so."""
    if array.reason.kind == "override":
        return "model" in array.axes and array.parts > 1
    return array.reason.kind == "tensor-parallel"


def _too_small(report: PlanReport) -> NotDone | None:
    """The entry for a step that every device computes, although its batch would divide."""
    count = prod(report.mesh.values())
    program = report.program_or_none
    if count == 1 or program is None or not program.batch_sizes:
        return None
    flops = program.arithmetic.flops
    is_divided = program.arithmetic.per_device < flops
    # If the batch is split, devices repeat what is not linked to it, which is reported as such.
    if is_divided or program.batch_axes or not _rows_divide(program, count):
        return None
    for array in report.arrays:
        if array.reason.kind == "override":
            return None  # a user's decision is not commented on
    why = (
        f"it is too small: communication would take longer than {flops:,.3g} floating point "
        "operations on one device"
    )
    return NotDone(f"dividing the step over {count} devices", why, "")


def _rows_divide(program: ProgramReport, count: int) -> bool:
    return all(size % count == 0 for size in program.batch_sizes)


def _tensor_parallelism(report: PlanReport) -> NotDone | None:
    count = report.mesh["model"]
    parameters = parameters_of(report)
    program = report.program_or_none
    sharded = sharded_over(parameters, "model")
    if count == 1 or any(map(is_tensor_parallel, sharded)):
        return None
    why = _why(parameters)
    if program is not None and "model" in program.batch_axes:
        instead = "data parallelism"
        if sharded:
            instead = "FSDP"
        why = f"{instead} over the same devices is estimated to cost less"
        if program.axes_for_memory:
            why = f"by estimate, a step fits into memory only with {instead} over the same devices"
    return _entry(f"tensor parallelism over model={count}", why, "model", report)


def _fsdp(report: PlanReport) -> NotDone | None:
    count = report.mesh["fsdp"]
    parameters = parameters_of(report)
    program = report.program_or_none
    what = f"FSDP over fsdp={count}"
    if count == 1:
        return None
    if program is not None and "fsdp" in program.model_axes:
        why = "tensor parallelism over the same devices is estimated to cost less"
        rows_divide = _rows_divide(program, report.mesh["data"] * count)
        # The rows would divide and the function trains, so that only memory can rule FSDP out.
        if program.memory.gradients and rows_divide:
            why = "tensor parallelism over the same devices needs less memory"
        return _entry(what, why, "model", report)
    if sharded_over(parameters, "fsdp"):
        return None
    why = _why([array for array in parameters if array.parts == 1])  # of the replicated ones
    if any(map(is_tensor_parallel, parameters)):
        why = "no other dimension of the tensor-parallel arrays divides or is large enough"
    return _entry(what, why, "fsdp", report)


def _entry(what: str, why: str, axis: str, report: PlanReport) -> NotDone | None:
    """The entry, if there is a reason; any size that divides over `axis` can be forced."""
    # All is decided by overrides.
    if not why:
        return None
    count = report.mesh[axis]
    forced_by = ""
    for array in parameters_of(report):
        for size in array.shape:
            # A spec is refused if a size does not divide; one device needs no override.
            if count > 1 and size > 0 and size % count == 0:
                forced_by = f"An override with `{axis}` in its spec forces it."
    return NotDone(what, why, forced_by)


def _why(parameters: list[PlannedArray]) -> str:
    """Names the largest parameter that was not decided by an override, with its reason."""
    for array in parameters:
        if array.reason.kind != "override":
            example = f"{array.path or 'the array'} ({array.reason.text})"
            return f"it is not possible or not worth its cost, as for {example}"
    return ""


def _batch(report: PlanReport) -> NotDone | None:
    program = report.program_or_none
    if program is None or not program.batch:
        return None
    # Axes that are used for tensor parallelism do not divide the batch, and need not.
    axes: list[str] = []
    for axis in BATCH_AXES:
        if report.mesh[axis] > 1 and axis not in program.model_axes:
            axes.append(axis)
    if set(axes).issubset(program.batch_axes):
        return None
    rows = "the batch"
    if program.batch_sizes:
        sizes = " and ".join(map(str, program.batch_sizes))
        rows = f"a batch of {sizes}"
    over = " x ".join(f"{axis}={report.mesh[axis]}" for axis in axes)
    return NotDone(f"a batch split over {over}", f"{rows} does not divide", "")
