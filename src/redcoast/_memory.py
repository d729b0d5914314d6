"""What to say when a device runs out of memory."""

import contextlib
from collections.abc import Iterator

import jax

from ._sharding import Plan


@contextlib.contextmanager
def explained_memory(plan: Plan) -> Iterator[None]:
    """Says of an error for want of memory what the plan puts on a device, and what would help."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise jax.errors.JaxRuntimeError(_explanation(plan)) from error


def _explanation(plan: Plan) -> str:
    totals = plan.report["totals"]
    parts = [
        f"{_size(totals[role]['bytes_per_device'])} of {name}"
        for role, name in (("parameter", "parameters"), ("optimizer state", "optimizer state"))
    ]
    axes = " x ".join(f"{axis} {size}" for axis, size in plan.mesh.shape.items())
    return (
        f"RESOURCE_EXHAUSTED: a device ran out of memory. On the mesh {axes} the plan puts "
        f"{_size(totals['all']['bytes_per_device'])} on each device, {' and '.join(parts)}, "
        f"and {_rest(plan)} come on top. What helps, in this order: more devices on `fsdp` "
        "(parameters and optimizer state are stored split) or on `model`; `accumulate`, or a "
        "smaller `batch_size` (activations); `jax.checkpoint` around each layer; "
        "`compute_dtype=jnp.bfloat16`."
    )


def _rest(plan: Plan) -> str:
    memory = plan.report.get("memory")
    if memory is None:
        return "gradients and activations"
    return (
        f"gradients (about {_size(memory['gradients'])}) and activations (about "
        f"{_size(memory['activations'])})"
    )


def _size(count: int | float) -> str:
    for unit in ("bytes", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.4g} GB"
