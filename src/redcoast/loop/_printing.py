"""The output of a run before its first step and at its end."""

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import jax

from ..core._jaxpr import is_inexact
from ..core._output import say
from ..core._versions import own_version
from ..data._batches import Batches
from ..data._loading import count_in_epoch
from ..distributed._kv_store import is_main
from ..distributed._mesh import batch_shards
from ..sharding import Plan
from ..tracking._loggers import all_loggers, say_once, shows_progress
from ..tracking._metrics import Log
from ..tracking._terminal import show_directory
from ..train._compiler_options import show_options
from ..train._precision import ComputeDtype
from ..train._state import TrainState
from ..train._training import Training
from ._evaluation import Evaluation


class Printer:
    """Prints what a user should know of a run, unless its loggers show no progress."""

    def __init__(self, log: Log | Sequence[Log] | Literal[False] | None, directory: Path | None):
        # One process prints for all.
        self.quiet = not (is_main() and shows_progress(all_loggers(log)))
        self._directory = directory

    def introduce(self) -> None:
        """Prints versions, devices and the run's directory, before anything that takes time."""
        if self.quiet:
            return
        count, kind = jax.device_count(), jax.devices()[0].device_kind
        if kind == "cpu":
            kind = "CPU"
        devices = f"{count} {kind} {_counted(count, 'device')}"
        if jax.process_count() > 1:
            devices += f" in {jax.process_count()} processes"
        say_once(f"redcoast {own_version()}, jax {jax.__version__}, {devices}")
        if self._directory is not None:
            say_once(f"Run directory: {show_directory(self._directory)}")

    def describe_run(
        self,
        state: TrainState,
        data: Batches,
        evaluation: Evaluation | None,
        compute_dtype: ComputeDtype,
        *,
        plans: bool,
    ) -> None:
        """Prints what is trained on, for how long, in which precision, and what is next."""
        if self.quiet:
            return
        parts = _data_parts(data)
        if evaluation is not None and (count := count_in_epoch(evaluation.examples)):
            parts.append(f"{count:,} to evaluate")
        say(_wrapped("Data", ", ".join(parts)))
        precision = precision_of(state, compute_dtype)
        say(_wrapped("Precision", precision))
        kind = data.mesh.devices.flat[0].device_kind
        if cost := cost_of_float32(kind, precision):
            say(_wrapped("", cost))
        if plans:
            say("Planning ...")

    def announce(
        self,
        plan: Plan,
        training: Training,
        state: TrainState,
        data: Batches,
        *,
        resumed: bool,
        over: bool,
    ) -> None:
        """Prints how the model is sharded and compiled, and what is next."""
        if self.quiet:
            return
        # The caller of `fit` has no `plan`; the run's directory has it as text.
        source = "rc.plan_step(...).table()"
        if self._directory is not None:
            source = "plan.txt in the run directory"
        say(str(plan).replace("plan.table(), plan.report", source))
        # How layers run matters only on accelerators, and finding out takes a trace of the loss.
        on_cpu = data.mesh.devices.flat[0].platform == "cpu"
        if not on_cpu and (how := training.layers(state.model, data.spec, data.mesh)):
            say(_wrapped("Layers", how))
        if options := training.options_for(data.mesh):
            say(_wrapped("Compiler", show_options(options)))
        if resumed:
            say(f"Resumed at step {data.step}.")
            # Of a run that is not resumed, it is a warning.
            if nothing := nothing_left(data, has_directory=True):
                say(nothing)
        if undivided := _undivided_batch(data, plan):
            say(undivided)
        if over:
            say("Nothing is left to train: early stopping ended the run.")
        elif data.steps is None or data.step < data.steps:
            say("Compiling ...")

    def conclude(self, state: TrainState, steps: int | None, reason: str, *, ended: bool) -> None:
        """Prints why a run ended, where its last checkpoint is, and how to resume a run that was
        stopped.

        `reason` is why it ended, if no signal stopped it; `ended`, whether it is not to be resumed.
        """
        if self.quiet:
            return
        step = int(state.step)
        # Of a source of unknown length, nobody can say that steps are missing.
        stopped = steps is not None and step < steps and not ended
        if reason:
            if not ended:
                reason = f"Training stopped after step {step:,}: {reason}."
            say(reason)
        directory = self._directory
        if directory is None:
            if stopped:
                say("Nothing was saved, because `fit` was called without `checkpoints`.")
            return
        checkpoint = directory / "checkpoints" / str(step)
        if checkpoint.is_dir():
            say(f"Checkpoint: {show_directory(checkpoint)}")
            if stopped:
                say(f"The same call, with this directory, continues after step {step:,}.")


def _data_parts(data: Batches) -> list[str]:
    """How many examples, steps, batches and epochs a run has, as far as they are known."""
    of_batches = f"of {data.batch_size:,}"
    if data.length is None:
        of_batches += " examples"
    if data.makes_batches:
        of_batches += ", as the source makes them"
    parts: list[str] = []
    if data.is_endless:
        parts.append("an endless source")
    elif data.length is not None:
        parts.append(f"{data.length:,} examples")
    if data.steps is not None:
        steps = f"{data.steps:,} {_counted(data.steps, 'step')} {of_batches}"
        if data.epochs is not None and not data.is_endless:
            # The last batch of whole epochs may be short, so steps times batch size is too many.
            steps += f" ({data.epochs:.3g} {_counted(data.epochs, 'epoch')})"
        parts.append(steps)
    else:
        epochs = data.given_epochs
        if epochs is not None:
            counted = f"{epochs:,} {_counted(epochs, 'epoch')} of unknown length"
            parts.append(f"{counted} (each until `examples` ends)")
        parts.append(f"batches {of_batches}")
    if data.length is None:
        parts.append("in the order of the source")
    return parts


def _counted(count: int | float, noun: str) -> str:
    """A noun after a number, such as `steps`."""
    if count == 1:
        return noun
    return f"{noun}s"


def _undivided_batch(data: Batches, plan: Plan) -> str:
    """A sentence about a batch that does not divide over the devices; empty if all do."""
    shards = batch_shards(plan.mesh)
    last_rows = (data.rows_left or 0) % data.batch_size
    does_not_divide = f"does not divide over data x fsdp = {shards} devices, so"
    if data.batch_size % shards == 0:
        if last_rows % shards == 0:
            return ""
        return f"The last batch, of {last_rows}, {does_not_divide} each of them computes all of it."
    batch = f"A batch of {data.batch_size} {does_not_divide}"
    if not plan.compute.splits_examples:
        return f"{batch} each of them computes all of it. A multiple of {shards} would be sharded."
    sentence = f"{batch} its examples are split over them."
    if jax.process_count() > 1:
        sentence += (
            " Every process reads complete examples, unless `collate_fn` returns arrays that are "
            "split over the devices."
        )
    return sentence


def precision_of(state: TrainState, compute_dtype: ComputeDtype) -> str:
    """The dtypes of the parameters, and the dtype of the computation if it differs."""
    names = sorted({str(x.dtype) for x in jax.tree.leaves(state.model) if is_inexact(x)})
    computed = None
    if compute_dtype is not None:
        computed = str(jax.numpy.dtype(compute_dtype))
    if computed is None or names == [computed]:
        return " and ".join(names)
    return f"{' and '.join(names)} parameters, {computed} computation"


def cost_of_float32(device_kind: str, precision: str) -> str:
    """A sentence about the cost of float32 on a device with bfloat16 units; empty on other
    devices."""
    # Imported where it is used, so that importing redcoast stays fast.
    from ..dryrun._chips import published_chip

    chip = published_chip(device_kind)
    if chip is None or precision != "float32":
        return ""
    # Some chips compute float32 products in bfloat16 anyway, and save only memory.
    faster = chip.flops["bfloat16"] / chip.flops["float32"]
    products = ""
    if faster > 1.05:
        products = f"compute products up to {faster:.2g} times as fast and "
    return f'compute_dtype="bf16" would {products}halve the memory of activations'


def _wrapped(label: str, text: str) -> str:
    """A line of the summary, aligned with the summary of the plan."""
    return textwrap.fill(f"{label:<15}{text}", width=79, subsequent_indent=" " * 15)


def nothing_left(data: Batches, *, has_directory: bool) -> str:
    """A sentence about a run whose steps are all done, with the argument that continues it."""
    if data.steps is None or data.step < data.steps:
        return ""
    done, steps = data.step, f"{data.steps:,} {_counted(data.steps, 'step')}"
    more = f"steps={done + data.steps}"
    if data.given_epochs is not None:
        # The user gave epochs, and so continues with epochs.
        more = f"epochs={(data.epochs_done or 0) + data.given_epochs}"
    new = ""
    if has_directory:
        new = ", or choose another directory for a new run"
    return (
        f"Nothing is left to train: {done:,} of {steps} are done. `epochs` and `steps` count from "
        f"the first step of the state. To train as long again, pass `{more}`{new}."
    )
