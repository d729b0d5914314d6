"""How much memory a plan takes on each device, by a rough count, and how to stay in a budget."""

from collections.abc import Callable, Mapping, Sequence

from ..overrides import spec_parts
from ..rows import Row
from .dataflow import Decision, Program, saved_bytes

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
