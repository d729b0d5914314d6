"""Checks that all processes run the same program on the same data."""

from collections.abc import Callable
from dataclasses import fields

import jax
from jaxtyping import PRNGKeyArray, PyTree

from ..core._program_lines import describe_array
from ..data._batches import Batches
from ..data._collate import describe_batch
from ..data._loading import count_in_epoch
from ..distributed._agreement import agree, checksum, program_listing, tree_listing
from ..sharding import Plan
from ..tracking._loggers import code_version
from ..train._compile import CompiledStep
from ..train._start import is_init_fn
from ..train._state import TrainState
from ._first_examples import first_examples, first_training_examples
from ._function_checksums import code_checksum
from ._run_settings import RunSettings

# JAX's settings that change a program, or how it runs.
_SETTINGS = (
    "jax_debug_infs",
    "jax_debug_nans",
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_disable_jit",
    "jax_enable_x64",
    "jax_threefry_partitionable",
)


def check_agreement(
    settings: RunSettings,
    plan: Plan,
    model: PyTree,
    state: TrainState,
    step: Callable[[int], CompiledStep],
    data: Batches,
    key: PRNGKeyArray,
) -> None:
    """Raises `ValueError` on all processes if they are about to run different programs or data.

    The error names what differs, and the value in each process.

    The plan, the initial model and key, the code of all functions and the program of the step are
    compared; of the data, the number of examples, the shapes of a batch and some collated examples.
    `step` is a function that returns the compiled step for a number of microbatches.
    """
    if jax.process_count() == 1:
        return
    training, evaluation = settings.training, settings.evaluation
    compared: dict[str, PyTree] = {}  # values of types that JSON supports
    for name, text in code_version().items():
        compared[f"the version of {name}"] = text
    for name in _SETTINGS:
        compared[f"JAX's setting {name}"] = str(getattr(jax.config, name, ""))
    # The order of the devices is a part of a mesh, and its text does not show it.
    devices = str([device.id for device in data.mesh.devices.flat])
    compared |= {
        "`accumulate`": training.accumulate,
        "`checkpoints`": str(settings.checkpoints),
        "`early_stopping`": str(settings.early_stopping),
        "`batch_size`": settings.batch_size,
        "`epochs`": settings.epochs,
        "`steps`": settings.steps,
        "`average`": settings.average,
        "`mesh`": dict(data.mesh.shape),
        "the number of `examples`": data.length,
        "`key`": describe_array(key),
        "the devices of `mesh`": checksum(devices.encode()),
        "what `collate_fn` returns": describe_batch(data.spec),
        "the code of `collate_fn`": code_checksum(data.collate_fn),
        "the code of `loss_fn`": code_checksum(training.loss_fn),
        "the plan of the model": checksum(plan.table().encode()),
    }
    # Processes that create other models would train their average.
    if is_init_fn(model):
        compared["the code of `init_fn`"] = code_checksum(model)
    listings = {"the values of the initial model": tree_listing(model)}
    # With `split_by_host`, each process is meant to read other examples.
    if not data.is_split:
        listings["the first examples"] = first_training_examples(data)
    if evaluation is not None:
        for field in fields(evaluation):
            value, name = getattr(evaluation, field.name), f"`Evaluation.{field.name}`"
            if field.name == "examples":
                compared[f"the number of {name}"] = count_in_epoch(value)
            elif field.name.endswith("_fn"):
                compared[f"the code of {name}"] = code_checksum(value)
            else:
                compared[name] = value
        listings["the first examples of the evaluation"] = first_examples(
            evaluation.examples,
            evaluation.collate_fn,
            batch_size=evaluation.batch_size,
            mesh=data.mesh,
            name="Evaluation.examples",
        )
    # The program of a short first batch is another one, which the step itself compares.
    is_first_full = data.rows_left is None or data.rows_left >= data.batch_size
    if is_first_full:
        traced = step(training.accumulate).trace(state, data.spec)
        listings["the program of the step"] = program_listing(traced.jaxpr)
    agree(compared, listings)
