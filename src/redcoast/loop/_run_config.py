"""What loggers get to know of a run before its first step."""

from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import jax
from jaxtyping import PyTree

from ..data._batches import Batches
from ..sharding import Plan
from ..sharding.report._data import PlannedArray
from ..tracking._loggers import RunInfo, code_version
from ..train._loss import LossFn
from ..train._step import TrainState
from ._printing import precision_of
from ._utilisation import seconds_at_peak


def run_of_fit(
    plan: Plan,
    data: Batches,
    state: TrainState,
    directory: Path | None,
    *,
    resumed: bool,
    epochs: int | None,
    loss_fn: LossFn,
    accumulate: int,
    compute_dtype: Any,
    trainable: PyTree,
) -> RunInfo:
    """The run of a call of `fit`, with all of its settings."""
    given = {"compute_dtype": compute_dtype, "trainable": trainable}
    settings = {
        "optimizer": optimizer_name(state),
        "precision": precision_of(state, compute_dtype),
        "accumulate": accumulate,
        "epochs": epochs,
        "seconds_at_peak": seconds_at_peak(state, loss_fn, data.spec, data.mesh, **given),
    }
    return run_info(plan, data, directory=directory, resumed=resumed, settings=settings)


def run_info(
    plan: Plan,
    data: Batches,
    *,
    directory: str | PathLike[str] | None = None,
    resumed: bool = False,
    settings: Mapping[str, Any] | None = None,
) -> RunInfo:
    """Describes a training run to loggers.

    **Arguments:**

    - `plan`: the plan of the step.
    - `data`: the batches, at the first step that is to be taken.
    - `directory`: the directory of the run, for `metrics.jsonl`.
    - `resumed`: whether the state was restored from a checkpoint.
    - `settings`: other settings to record, such as the optimizer.

    **Returns:**

    A [`redcoast.RunInfo`][], for [`redcoast.metrics_reader`][].

    !!! Example

        ```python
        info = rc.run_info(plan, data, directory="runs/loop")
        ```
    """
    config = {
        "batch_size": data.batch_size,
        "examples": data.length,
        "steps": data.steps,
        "parameters": sum(x.size for x in plan.report.arrays if x.role == "parameter"),
        "mesh": dict(plan.mesh.shape),
        "devices": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
        **(settings or {}),
        "versions": code_version(),
    }
    return RunInfo(
        directory=None if directory is None else Path(directory).expanduser().absolute(),
        resumed=resumed,
        plan=f"{plan}\n\n{plan.table()}",
        config=config,
        step=data.step,
        steps=data.steps,
        rows=tuple(map(plan_row, plan.report.arrays)),
    )


def plan_row(array: PlannedArray) -> dict[str, Any]:
    """A row of the plan as a table."""
    return {
        "array": array.path,
        "shape": " x ".join(map(str, array.shape)),
        "dtype": array.dtype,
        "role": array.role,
        "sharding": str(tuple(array.spec)),
        "kind": array.reason.kind,
        "reason": array.reason.text,
        "MB": array.bytes / 1e6,
        "MB per device": array.bytes_per_device / 1e6,
    }


def optimizer_name(state: TrainState) -> str:
    """The transformations of an optimizer that have a state, such as `ScaleByAdam`."""
    names: dict[str, None] = {}

    def collect(node: Any) -> None:
        if isinstance(node, tuple | list):
            if hasattr(node, "_fields"):
                names[type(node).__name__.removesuffix("State")] = None
            for part in node:
                collect(part)

    collect(state.opt_state)
    return ", ".join(name for name in names if name != "Empty")
