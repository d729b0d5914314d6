"""The information about a run that loggers receive before its first step."""

import dataclasses
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from types import NoneType

import equinox as eqx
import jax
from jax.sharding import Mesh
from jaxtyping import PyTree

from ..core._errors import check_kind, local_path
from ..core._read_json import JSONObject
from ..core._tracing import abstract_key, trace_for
from ..data._batches import Batches
from ..sharding import Plan
from ..tracking._loggers import RunInfo, code_version
from ..train._show_state import optimizer_name
from ..train._state import TrainState
from ..train._training import Training
from ._printing import precision_of


def run_of_fit(
    training: Training,
    plan: Plan,
    data: Batches,
    state: TrainState,
    directory: Path | None,
    saved: JSONObject | None,
    is_over: bool,
) -> RunInfo:
    """The run of a call of `fit`, with all of its settings.

    `saved` is what a checkpoint has of the data, if there is one, and `is_over` whether no step is
    left.
    """
    average = None
    if state.average is not None:
        average = state.average.decay
    settings = {
        "optimizer": optimizer_name(state.opt_state),
        "precision": precision_of(state, training.compute_dtype),
        "accumulate": training.accumulate,
        "average": average,
        "epochs": data.given_epochs,
        "compiler_options": dict(training.options_for(data.mesh)),
        "seconds_at_peak": seconds_at_peak(training, state, data.spec, data.mesh),
    }
    resumed = saved is not None
    run = run_info(plan, data, directory=directory, resumed=resumed, settings=settings)
    # Loggers show no bar for steps that are not taken.
    if is_over:
        return dataclasses.replace(run, steps=run.step)
    return run


def run_info(
    plan: Plan,
    data: Batches,
    *,
    directory: str | PathLike[str] | None = None,
    resumed: bool = False,
    settings: Mapping[str, object] | None = None,
) -> RunInfo:
    """Describes a training run, for its loggers.

    **Arguments:**

    - `plan`: the plan of the step.
    - `data`: the batches, positioned at the next step.
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
    check_kind("plan", plan, Plan, "a `redcoast.Plan`")
    check_kind("data", data, Batches, "the batches, from `redcoast.batches`")
    words = "a mapping of names to values"
    check_kind("settings", settings, (Mapping, NoneType), words)
    if directory is not None:
        directory = local_path("directory", directory)
    examples = data.length
    if data.is_endless:
        examples = None
    config = {
        "batch_size": data.batch_size,
        "examples": examples,
        "steps": data.steps,
        "parameters": sum(x.size for x in plan.report.arrays if x.role == "parameter"),
        "mesh": dict(plan.mesh.shape),
        "devices": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
        **(settings or {}),
        "versions": code_version(),
    }
    return RunInfo(
        directory=directory,
        resumed=resumed,
        plan=f"{plan}\n\n{plan.table()}",
        config=config,
        step=data.step,
        steps=data.steps,
        rows=tuple(
            {
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
            for array in plan.report.arrays
        ),
    )


def seconds_at_peak(
    training: Training, state: TrainState, batch: PyTree, mesh: Mesh
) -> float | None:
    """Seconds of a training step in which all devices compute at their peak rate.

    `None` if that rate is unknown, as for CPUs, or if only a part of the model is trained. The
    backward pass counts as twice the forward pass, and rematerialisation is not counted, as usual
    for model FLOPs utilisation (arXiv:2204.02311).
    """
    # Imported where it is used, so that importing redcoast stays fast.
    from ..dryrun._chips import published_chip
    from ..dryrun._flops import contractions

    chip = published_chip(mesh.devices.flat[0].device_kind)
    # With frozen leaves, the backward pass has fewer products than that.
    if chip is None or training.trainable is not eqx.is_inexact_array:
        return None

    def trace() -> PyTree:
        return eqx.filter_make_jaxpr(training.loss)(state.model, batch, abstract_key())

    jaxpr, _, _ = trace_for(mesh, trace)
    flops = contractions(jaxpr).flops
    # Without a rate for each dtype, a time would be too short.
    if not flops or not flops.keys() <= chip.flops.keys():
        return None
    # The backward pass has two products for each of the forward pass: for the inputs, and for the
    # weights.
    return sum(3 * count / chip.flops[dtype] for dtype, count in flops.items()) / mesh.size
