"""What is left of a run that ends with an error: its last checkpoint, named, or a new one."""

import contextlib
import logging
from collections.abc import Callable, Iterator

import equinox as eqx
import jax
from jaxtyping import PyTree

from ..checkpoint._policy import Checkpoints, newest_checkpoint
from ..sharding import Plan
from ..tracking._metrics import MetricsReader


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


logger = logging.getLogger("redcoast")
# After these the state may be wrong, or there is no memory to save it with.
DOUBTFUL = (jax.errors.JaxRuntimeError, FloatingPointError, MemoryError)


@contextlib.contextmanager
def noted_checkpoint(checkpoints: Checkpoints | None) -> Iterator[None]:
    """Notes in an error where the last checkpoint is."""
    try:
        yield
    except BaseException as error:
        if checkpoints and "checkpoint" not in str(error):
            error.add_note(newest_checkpoint(checkpoints))
        raise


@contextlib.contextmanager
def rescued(
    reader: MetricsReader,
    state: Callable[[], PyTree | None],
    save: Callable[[dict[str, float]], None],
    *,
    doubtful: tuple[type[Exception], ...] = DOUBTFUL,
) -> Iterator[None]:
    """Saves the state if an error comes from the user's functions, and the state is whole: not
    `None`, as before the first step, and after no error that is `doubtful`."""
    try:
        yield
    except Exception as error:
        # Processes save together, and the others may be in the middle of the next step.
        alone = jax.process_count() == 1
        found = state()
        trusted = alone and found is not None and not isinstance(error, doubtful)
        if trusted and _is_whole(reader, found):
            _try(save)
        raise


def _try(save: Callable[[dict[str, float]], None]) -> None:
    try:
        save({})
    except Exception as error:  # the first one is the one to tell of
        logger.warning("The state could not be saved after an error: %s", error)


def _is_whole(reader: MetricsReader, state: PyTree) -> bool:
    try:
        reader.flush()
    except DOUBTFUL:
        return False
    except Exception:  # `log` fails again
        pass
    arrays = jax.tree.leaves(eqx.filter(state, eqx.is_array))
    return not any(x.is_deleted() for x in arrays if isinstance(x, jax.Array))
