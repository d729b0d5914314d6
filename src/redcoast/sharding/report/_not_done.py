"""What a mesh asks for and a plan does not do, with the reason."""

from math import prod

from ...distributed._mesh import BATCH_AXES
from ._data import NotDone, PlannedArray, PlanReport


def find_not_done(report: PlanReport) -> tuple[NotDone, ...]:
    """At most one entry for each of `model`, `fsdp` and the batch."""
    if (nothing := _too_small(report)) is not None:
        return (nothing,)
    found = _tensor_parallelism(report), _fsdp(report), _batch(report)
    return tuple(one for one in found if one is not None)


def parameters_of(report: PlanReport) -> list[PlannedArray]:
    """The parameters, the largest first."""
    arrays = [array for array in report.arrays if array.role == "parameter"]
    return sorted(arrays, key=lambda array: -array.size)


def is_tensor_parallel(array: PlannedArray) -> bool:
    """Whether an array is computed with in parts; an override with `model` makes it so."""
    override = array.reason.kind == "override" and "model" in array.axes
    return (override and array.parts > 1) or array.reason.kind == "tensor-parallel"


def _too_small(report: PlanReport) -> NotDone | None:
    """The entry for a step that every device computes, although its batch would divide."""
    count, program = prod(report.mesh.values()), report.program_or_none
    if count == 1 or program is None or not program.batch_sizes:
        return None
    flops = program.arithmetic.flops
    overridden = any(array.reason.kind == "override" for array in report.arrays)
    rows_divide = all(size % count == 0 for size in program.batch_sizes)
    if overridden or not rows_divide or program.arithmetic.per_device < flops:
        return None
    why = (
        f"it is too small: communication would take longer than {flops:,.3g} floating point "
        "operations on one device"
    )
    return NotDone(f"dividing the step over {count} devices", why, "")


def _tensor_parallelism(report: PlanReport) -> NotDone | None:
    count, parameters, program = report.mesh["model"], parameters_of(report), report.program_or_none
    over = [array for array in parameters if "model" in array.axes]
    if count == 1 or any(map(is_tensor_parallel, over)):
        return None
    why = _why(parameters)
    if program is not None and "model" in program.batch_axes:
        instead = "FSDP" if over else "data parallelism"
        why = f"{instead} over the same devices is estimated to cost less"
    return _entry(f"tensor parallelism over model={count}", why, "model", report)


def _fsdp(report: PlanReport) -> NotDone | None:
    count, parameters, program = report.mesh["fsdp"], parameters_of(report), report.program_or_none
    asked = f"FSDP over fsdp={count}"
    if count == 1:
        return None
    if program is not None and "fsdp" in program.model_axes:
        why = "tensor parallelism over the same devices is estimated to cost less"
        rows_divide = all(size % (report.mesh["data"] * count) == 0 for size in program.batch_sizes)
        if program.memory.gradients and rows_divide:
            why = "tensor parallelism over the same devices needs less memory"
        return _entry(asked, why, "model", report)
    if any("fsdp" in array.axes for array in parameters):
        return None
    why = _why([array for array in parameters if array.parts == 1])
    if any(map(is_tensor_parallel, parameters)):
        why = "no other dimension of the tensor-parallel arrays divides or is large enough"
    return _entry(asked, why, "fsdp", report)


def _entry(asked: str, why: str, axis: str, report: PlanReport) -> NotDone | None:
    """The entry, if there is a reason; any size that divides over `axis` can be forced."""
    sizes = {size for array in parameters_of(report) for size in array.shape if size}
    count = report.mesh[axis]
    fits = count > 1 and any(size % count == 0 for size in sizes)
    forced_by = f"An override with `{axis}` in its spec forces it." if fits else ""
    return NotDone(asked, why, forced_by) if why else None


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
    asked = [a for a in BATCH_AXES if report.mesh[a] > 1 and a not in program.model_axes]
    if all(axis in program.batch_axes for axis in asked):
        return None
    sizes = " and ".join(map(str, program.batch_sizes))
    rows = f"a batch of {sizes}" if sizes else "the batch"
    over = " x ".join(f"{axis}={report.mesh[axis]}" for axis in asked)
    return NotDone(f"a batch split over {over}", f"{rows} does not divide", "")
