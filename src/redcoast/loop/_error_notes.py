"""Notes on the errors of a run, about device memory and the last checkpoint."""

import contextlib
import logging
from collections.abc import Callable, Iterator

import equinox as eqx
import jax
from jaxtyping import PyTree

from ..checkpoint._policy import NO_CHECKPOINT, Checkpoints, newest_checkpoint
from ..sharding import Plan
from ..sharding.report._text import scaled
from ..tracking._metrics import MetricsReader

logger = logging.getLogger("redcoast")
# After these the state may be wrong, or there is no memory to save it with.
DOUBTFUL = (jax.errors.JaxRuntimeError, FloatingPointError, MemoryError)


@contextlib.contextmanager
def explained_memory(plan: Plan) -> Iterator[None]:
    """Adds the planned memory of a device, and remedies, to an out-of-memory error."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        # JAX has one class for all errors of its devices.
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise jax.errors.JaxRuntimeError(_explanation(plan)) from error


def _explanation(plan: Plan) -> str:
    totals, program = plan.report.totals, plan.report.program_or_none
    rest = "gradients and activations"
    if program is not None:
        rest = (
            f"gradients (about {scaled(program.memory.gradients)}) and activations (about "
            f"{scaled(program.memory.activations)})"
        )
    axes = " x ".join(f"{axis} {size}" for axis, size in plan.mesh.shape.items())
    return (
        f"RESOURCE_EXHAUSTED: a device ran out of memory. On the mesh {axes} the plan puts "
        f"{scaled(totals.all.bytes_per_device)} on each device, "
        f"{scaled(totals.parameters.bytes_per_device)} of parameters and "
        f"{scaled(totals.optimizer_state.bytes_per_device)} of optimizer state, plus {rest}. "
        "What helps, in this order: more devices on `fsdp` (which shards parameters and optimizer "
        "state) or on `model`; `accumulate`, or a smaller `batch_size` (activations); "
        "`jax.checkpoint` around each layer; `compute_dtype=jnp.bfloat16`."
    )


@contextlib.contextmanager
def noted_checkpoint(checkpoints: Checkpoints | None) -> Iterator[None]:
    """Adds a note to an error that says where the newest checkpoint is."""
    try:
        yield
    except BaseException as error:
        note = newest_checkpoint(checkpoints)
        # An error of a checkpoint names its path already.
        if note != NO_CHECKPOINT and "checkpoint" not in str(error):
            error.add_note(note)
        raise


@contextlib.contextmanager
def rescued(
    reader: MetricsReader,
    state: Callable[[], PyTree | None],
    save: Callable[[dict[str, float]], None],
    *,
    doubtful: tuple[type[Exception], ...],
) -> Iterator[None]:
    """Saves the state if one of the user's functions raises.

    Nothing is saved before the first step (`state()` is `None`), after an error that is
    `doubtful`, or if an array of the state is gone.
    """
    try:
        yield
    except (Exception, SystemExit) as error:
        # Processes save together, and the others may be in the middle of the next step.
        alone = jax.process_count() == 1
        # None before the first step, which has nothing to save.
        last = state()
        trusted = alone and last is not None and not isinstance(error, doubtful)
        if trusted and _is_intact(reader, last):
            try:
                save({})
            except Exception as second:  # the first error is the one to raise
                logger.warning("The state could not be saved after an error: %s", second)
        raise


def _is_intact(reader: MetricsReader, state: PyTree) -> bool:
    try:
        # Metrics that are still on the devices would show an error of a step after the state.
        reader.flush()
    except DOUBTFUL:
        return False
    except Exception:  # `log` fails again
        pass
    arrays = jax.tree.leaves(eqx.filter(state, eqx.is_array))
    # The arrays of a state are gone while its next step is being dispatched.
    return not any(x.is_deleted() for x in arrays if isinstance(x, jax.Array))
