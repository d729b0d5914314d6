"""The output of a run before its first step and at its end."""

import textwrap
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax

from ..core._jaxpr import is_inexact
from ..core._output import say
from ..data._batches import Batches
from ..data._loading import count_in_epoch
from ..distributed._mesh import batch_shards
from ..sharding import Plan
from ..tracking._loggers import say_once
from ..tracking._terminal import show_directory
from ..train._step import TrainState
from ._evaluation import Evaluation


def introduce(directory: Path | None, *, quiet: bool = False) -> None:
    """Prints versions, devices and the run's directory, before anything that takes time."""
    if quiet:
        return
    count, kind = jax.device_count(), jax.devices()[0].device_kind
    devices = f"{count} {kind if kind != 'cpu' else 'CPU'} device{'s' if count > 1 else ''}"
    if jax.process_count() > 1:
        devices += f" in {jax.process_count()} processes"
    say_once(f"redcoast {version('redcoast')}, jax {jax.__version__}, {devices}")
    if directory is not None:
        say_once(f"Run directory: {show_directory(directory)}")


def describe_run(
    state: TrainState,
    data: Batches,
    evaluation: Evaluation | None,
    compute_dtype: Any,
    *,
    plans: bool,
    quiet: bool,
) -> None:
    """Prints what is trained on, for how long, in which precision, and whether it plans next."""
    if quiet:
        return
    parts = [] if data.length is None else [f"{data.length:,} examples"]
    if data.is_endless:
        parts = ["an endless source"]
    of_batches = f"of {data.batch_size:,}" + " examples" * (data.length is None)
    if data.makes_batches:
        of_batches += ", as the source makes them"
    if data.steps is not None:
        parts.append(f"{data.steps:,} step{'s' * (data.steps != 1)} {of_batches}")
        if data.epochs is not None and not data.is_endless:
            # The last batch of whole epochs may be short, so steps times batch size is too many.
            parts[-1] += f" ({data.epochs:.3g} epoch{'s' * (data.epochs != 1)})"
    elif data.stream_epochs is not None:
        epochs = data.stream_epochs
        whole = f"{epochs:,} epoch{'s' * (epochs != 1)} of unknown length"
        parts.append(f"{whole} (each until `examples` ends)")
        parts.append(f"batches {of_batches}")
    else:
        parts.append(f"batches {of_batches}")
    if data.length is None:
        parts.append("in the order of the source")
    if evaluation is not None and (count := count_in_epoch(evaluation.examples)):
        parts.append(f"{count:,} to evaluate")
    say(_wrapped("Data", ", ".join(parts)))
    say(_wrapped("Precision", precision_of(state, compute_dtype)))
    kind = data.mesh.devices.flat[0].device_kind
    if cost := cost_of_float32(kind, precision_of(state, compute_dtype)):
        say(_wrapped("", cost))
    if plans:
        say("Planning ...")


def precision_of(state: TrainState, compute_dtype: Any) -> str:
    """The dtypes of the parameters, and the dtype of the computation if it differs."""
    names = sorted({str(x.dtype) for x in jax.tree.leaves(state.model) if is_inexact(x)})
    computed = None if compute_dtype is None else str(jax.numpy.dtype(compute_dtype))
    if computed is None or names == [computed]:
        return " and ".join(names)
    return f"{' and '.join(names)} parameters, {computed} computation"


def cost_of_float32(device_kind: str, precision: str) -> str:
    """A sentence about the cost of float32 on a device with bfloat16 units; empty on other
    devices."""
    # Imported where it is used, so that importing redcoast stays fast.
    from ..dryrun._chips import CHIPS

    chip = next((x for x in CHIPS.values() if x.device_kind == device_kind), None)
    if chip is None or chip.kind == "cpu" or precision != "float32":
        return ""
    faster = chip.flops["bfloat16"] / chip.flops["float32"]
    products = f"compute products up to {faster:.2g} times as fast and " if faster > 1.05 else ""
    return f'compute_dtype="bf16" would {products}halve the memory of activations'


def _wrapped(label: str, text: str) -> str:
    """A line of the summary, aligned with the summary of the plan."""
    return textwrap.fill(f"{label:<15}{text}", width=79, subsequent_indent=" " * 15)


def announce(
    plan: Plan, data: Batches, *, resumed: bool, over: bool | None = False, quiet: bool
) -> None:
    """Prints how the model is sharded, notes about the run, and that the step is compiled."""
    if quiet:
        return
    say(str(plan))
    shards, batch_size, rows = batch_shards(plan.mesh), data.batch_size, data.rows_left or 0
    if resumed:
        say(f"Resumed at step {data.step}.")
    # If the run was not resumed, it is a warning instead.
    if resumed and (nothing := nothing_left(data, has_directory=True)):
        say(nothing)
    if rows % batch_size % shards and batch_size % shards == 0:
        say(
            f"The last batch, of {rows % batch_size}, does not divide over data x fsdp = {shards} "
            "devices, so each of them computes all of it."
        )
    if batch_size % shards:
        say(
            f"A batch of {batch_size} does not divide over data x fsdp = {shards} devices, so each "
            f"of them computes all of it. A multiple of {shards} would be sharded."
        )
    if over:
        say("Nothing is left to train: early stopping ended the run.")
    elif data.steps is None or data.step < data.steps:
        say("Compiling ...")


def nothing_left(data: Batches, *, has_directory: bool) -> str:
    """A sentence about a run whose steps are all done, with the argument that continues it."""
    if data.steps is None or data.step < data.steps:
        return ""
    done, steps = data.step, f"{data.steps:,} step{'s' * (data.steps != 1)}"
    more = f"steps={done + data.steps}"
    if data.given_epochs is not None:
        more = f"epochs={(data.epochs_done or 0) + data.given_epochs}"
    new = ", or choose another directory for a new run" if has_directory else ""
    return (
        f"Nothing is left to train: {done:,} of {steps} are done. `epochs` and `steps` count from "
        f"the first step of the state. To train as long again, pass `{more}`{new}."
    )


def conclude(
    state: TrainState,
    steps: int | None,
    directory: Path | None,
    reason: str = "",
    *,
    ended: bool = False,
    quiet: bool,
) -> None:
    """Prints why a run ended, where its last checkpoint is, and how to resume a run that was
    stopped.

    `reason` is why it ended, if no signal stopped it. `ended` is whether it is complete.
    """
    if quiet:
        return
    step = int(state.step)
    stopped = steps is not None and step < steps and not ended
    if reason:
        say(reason if ended else f"Training stopped after step {step:,}: {reason}.")
    if directory is not None and (saved := directory / "checkpoints" / str(step)).is_dir():
        say(f"Checkpoint: {show_directory(saved)}")
        if stopped:
            say(f"The same call, with this directory, continues after step {step:,}.")
    elif stopped and directory is None:
        say("Nothing was saved, because `fit` was called without `checkpoints`.")
