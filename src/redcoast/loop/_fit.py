"""The training loop, to be read, copied and changed."""

import contextlib
import dataclasses
import functools as ft
import logging
import math
from collections.abc import Callable, Sequence
from os import PathLike
from typing import Any, Literal

import equinox as eqx
import jax
import optax
from jax.sharding import Mesh
from jaxtyping import PRNGKeyArray, PyTree

from ..checkpoint._checkpointer import Checkpointer
from ..checkpoint._policy import Checkpoints, as_checkpoints, newest_checkpoint
from ..core._axis_types import auto_ambient_mesh, on_auto_axes, on_mesh, with_auto_axes
from ..core._errors import check_functions, check_optimizer, noting
from ..core._frames import hide_frames, warn
from ..core._output import forgiving_output
from ..data._batches import Batch, Batches, batches
from ..data._collate import CollateFn, check_batching
from ..data._loading import checked_threads
from ..distributed._heartbeat import watching
from ..distributed._kv_store import is_main
from ..sharding import Plan, with_auto_plan
from ..tracking._loggers import all_loggers, shows_progress
from ..tracking._metrics import Log, MetricsReader, metrics_reader, pack_metrics
from ..train._compile import CompiledStep, compile_reusable_step
from ..train._loss import LossFn
from ..train._microbatches import by_microbatches
from ..train._plan_step import verify_step
from ..train._precision import as_compute_dtype
from ..train._start import starting_state
from ..train._step import TrainState, train_step
from ._consistency import check_agreement
from ._early_stopping import SAVED, BestSoFar, EarlyStopping, complete_early_stopping
from ._error_notes import explained_memory, noted_checkpoint, rescued
from ._evaluation import CompiledEvaluation, Evaluation
from ._nonfinite import explain_batch, explain_step, warn_of_clamped_indices
from ._printing import announce, conclude, describe_run, introduce, nothing_left
from ._run_config import run_of_fit
from ._setup import (
    best_mesh,
    complete_evaluation,
    mesh_of_run,
    plan_run,
    prepare_evaluation,
    refuse_split,
    refuse_traced,
    refuse_unresumable,
    warn_of_restored,
)
from ._steps import Step, training_steps
from ._stop import (
    ASKED,
    GO_ON,
    StopRequest,
    end_after_signal,
    refuse_after_signal,
    stop_request,
)

logger = logging.getLogger("redcoast")


@hide_frames
def fit(
    model_or_state: PyTree,
    optimizer: optax.GradientTransformation,
    examples: Any,
    *,
    collate_fn: CollateFn | None = None,
    loss_fn: LossFn,
    batch_size: int | None,
    mesh: Mesh | Literal["auto"] | None = None,
    epochs: int | None = None,
    steps: int | None = None,
    key: PRNGKeyArray | None = None,
    evaluation: Evaluation | None = None,
    early_stopping: EarlyStopping | None = None,
    checkpoints: Checkpoints | str | PathLike[str] | None = None,
    log: Log | Sequence[Log] | Literal[False] | None = None,
    accumulate: int = 1,
    compute_dtype: Any = None,
    trainable: PyTree = eqx.is_inexact_array,
    average: int | float | None = None,
    overrides: Sequence[tuple[str, Any]] = (),
    plan: Plan | Literal["verify"] | None = None,
    workers: int = 2,
    ahead: int = 4,
) -> TrainState:
    """Trains a model on raw examples, sharded over the devices of a mesh.

    Each epoch has its own order of the examples, determined by `key`. Batches span epochs, so only
    the last batch of a run may be short. A run that is started again resumes from its newest
    checkpoint, bit for bit. A signal stops it after the current step, with a checkpoint: after
    SIGTERM, SIGUSR1 and SIGHUP, `fit` returns, and after Ctrl-C it raises `KeyboardInterrupt`. A
    second signal ends the process. To limit the time of a run, or to handle signals yourself, call
    `fit` inside [`redcoast.stop_on_signal`][].

    **Arguments:**

    - `model_or_state`: a model (any PyTree), which is copied; a function `init_fn(key) -> model`,
        whose arrays are created sharded, so that the model may be larger than the memory of a
        device; or a [`redcoast.TrainState`][] to train further, which is donated.
    - `optimizer`: an optax optimizer. With `optax.inject_hyperparams`, its learning rate is logged.
    - `examples`: an object with a length and an index (a list, a memory map, a dataset), which is
        shuffled in each epoch; a tuple of arrays with equal first dimensions, such as `(x, y)`,
        whose rows are the examples; an iterable, which is read in its own order in each epoch; a
        function that returns one of these, such as a generator function, and is called with the
        epoch if it takes an argument; or an iterator, which is read once. An iterator without a
        state cannot be resumed, so it raises an error together with `checkpoints`.
    - `collate_fn`: `collate_fn(examples)` converts a list of raw examples to a PyTree of NumPy
        arrays, batch dimension first. It may be called in threads. If it has a parameter `rngs`, it
        gets one NumPy `Generator` for each example, for augmentation (`None` in evaluation). By
        default, examples are PyTrees of arrays and numbers, and are stacked leaf by leaf.
    - `loss_fn`: `loss_fn(model, batch, key)`, as for [`redcoast.train_step`][].
    - `batch_size`: the number of examples in a step, over all devices; `None` if the items of
        `examples` are batches already, as in a PyTorch `DataLoader`. A `collate_fn` is then called
        with a batch; without one, batches are used as they are.
    - `mesh`: from [`redcoast.make_mesh`][]; by default the ambient mesh, or all devices as `data`.
        `"auto"` compares all meshes and uses the best one, as [`redcoast.suggest_mesh`][] does,
        which compiles the step three times.
    - `epochs`, `steps`: the total length of the run, including steps before it was resumed. Pass
        one of them. With neither, an iterator is read to its end.
    - `key`: a JAX key that determines the order of the data and the random numbers of the loss;
        `jax.random.key(0)` by default.
    - `evaluation`: a [`redcoast.Evaluation`][]: the validation examples, and metrics of
        predictions.
    - `early_stopping`: a [`redcoast.EarlyStopping`][]: stops when a metric of the evaluation no
        longer improves, and returns the best state.
    - `checkpoints`: a [`redcoast.Checkpoints`][], or the path of its directory; without it, nothing
        is saved.
    - `log`: a callable `(metrics, step)`, such as [`redcoast.wandb_logger`][] returns, or a list of
        callables. They are called with `loss`, `grad_norm`, `skipped`, `learning_rate` and `aux`
        after each step, and with `eval/...` after evaluations. A callable with a parameter `state`
        also gets the state after the step, in each process. If one returns [`redcoast.STOP`][], the
        run stops. A [`redcoast.progress_logger`][] is added if there is none. `None` prints the
        progress and the evaluations, and `False` prints nothing.
    - `accumulate`, `compute_dtype`, `trainable`: as for [`redcoast.train_step`][].
    - `average`: the decay of an exponential average of the weights, such as 0.999. The averaged
        model is used in evaluations, and is `averaged_model` of the returned state. It needs as
        much memory as the trainable leaves in float32.
    - `overrides`: as for [`redcoast.infer_shardings`][].
    - `plan`: a plan of the state, from [`redcoast.plan_step`][] or [`redcoast.load_plan`][]; by
        default, the step is planned. `"verify"` also compares loss and gradients with a program for
        one device, on a few examples; the model must fit on one device.
    - `workers`, `ahead`: as for [`redcoast.batches`][].

    **Returns:**

    The [`redcoast.TrainState`][] at the end, or, with `early_stopping`, at the best evaluation. Its
    `model` is the trained model. If a signal stopped the run, its `step` is less than `steps`, and
    further calls to `fit`, [`redcoast.evaluate`][] and [`redcoast.predict_examples`][] in this
    process raise a `RuntimeError`.

    **Raises:**

    `ValueError` or `TypeError` before the first step, if an argument or the result of a function is
    invalid. `FloatingPointError` if the loss or the gradient is NaN or infinite for 20 steps in a
    row; it names the gradients and the examples. Errors in your functions get notes that name the
    function, the step, the examples and the last checkpoint. [`redcoast.CheckpointNotSaved`][] if
    the final state could not be saved; a failure to save an earlier state is a warning.
    `KeyboardInterrupt` after Ctrl-C, once the state has been saved. `RuntimeError` if a signal
    stopped an earlier run of this process.

    !!! Example

        ```python
        state = rc.fit(
            model, optax.adamw(3e-4), examples,
            collate_fn=collate_fn, loss_fn=loss_fn, batch_size=32, epochs=3,
        )
        ```
    """
    refuse_after_signal("fit", trains=True)
    refuse_traced((model_or_state, key))
    check_optimizer(optimizer)
    check_functions(loss_fn=loss_fn)
    collate_fn = check_batching(collate_fn, batch_size)
    quiet = not (is_main() and shows_progress(all_loggers(log)))
    compute_dtype = as_compute_dtype(compute_dtype)
    evaluation = complete_evaluation(evaluation, collate_fn, loss_fn, batch_size)
    early_stopping, checkpoints = complete_early_stopping(
        early_stopping, evaluation, as_checkpoints(checkpoints)
    )
    best = BestSoFar(early_stopping, checkpoints) if early_stopping else None
    length = {"batch_size": batch_size, "epochs": epochs, "steps": steps}
    given = {"compute_dtype": compute_dtype, "trainable": trainable}
    options = {"loss_fn": loss_fn, "accumulate": accumulate, **given}
    saver, chosen = Checkpointer(checkpoints), mesh_of_run(mesh, plan)
    introduce(saver.directory, quiet=quiet)
    model_or_state, key = on_auto_axes((model_or_state, key))
    plan = with_auto_plan(plan) if isinstance(plan, Plan) else plan
    with (
        forgiving_output(),
        auto_ambient_mesh(),
        watching(),
        saver.locked(),
        contextlib.ExitStack() as stack,
    ):
        abstract, key, create = starting_state(
            model_or_state, optimizer, key, average=average, caller="fit", **given
        )
        of_mesh = with_auto_axes(chosen)
        threads = checked_threads(workers, ahead)
        data = batches(examples, collate_fn, key=key, mesh=of_mesh, **length, **threads._asdict())
        refuse_unresumable(data, checkpoints)
        plans = not isinstance(plan, Plan)
        describe_run(abstract, data, evaluation, compute_dtype, plans=plans, quiet=quiet)
        if mesh == "auto":
            refuse_split(data)
            data.mesh = best_mesh(abstract, optimizer, data, overrides, quiet=quiet, **options)
        found = plan_run(plan, abstract, data, overrides, **options)
        planned_loss = found.constrain(loss_fn)

        @ft.cache
        def compiled(count: int) -> CompiledStep:
            of_step = {"loss_fn": planned_loss, "optimizer": optimizer, "accumulate": count}
            step = ft.partial(train_step, **of_step, **given)
            return compile_reusable_step(pack_metrics(step), found.shardings, loss_fn)

        values = {"accumulate": accumulate, "average": average, "checkpoints": str(checkpoints)}
        values |= length | {"early_stopping": str(early_stopping)}
        of_step = (abstract, lambda: compiled(accumulate))
        of_data = (data, collate_fn, loss_fn, evaluation, key)
        check_agreement(found, model_or_state, *of_step, *of_data, **values)
        stack.enter_context(noted_checkpoint(checkpoints))
        stack.enter_context(explained_memory(found))
        restored = saver.restore(abstract, found.shardings)
        state = restored.state if restored else create(found.shardings)
        saved = restored.data if restored else {}
        data.set_state({"step": int(state.step), **saved}, key=state.key)
        if checkpoints is not None:
            data.recognise_examples(saved)
        if restored is None and (nothing := nothing_left(data, has_directory=False)):
            warn(nothing)  # also if nothing is printed
        if restored is not None:
            warn_of_restored(model_or_state, abstract, state, data, optimizer, trainable, quiet)
        if best is not None and restored:
            best.restore(saved.get(SAVED))
        about = {"resumed": restored is not None, "epochs": epochs, **options}
        info = run_of_fit(found, data, abstract, saver.directory, **about)
        over = best is not None and best.is_over
        if over:
            info = dataclasses.replace(info, steps=info.step)
        announce(found, data, resumed=info.resumed, over=over, quiet=quiet)
        needed = {"EarlyStopping(metric=...)": early_stopping and early_stopping.metric}
        needed["Checkpoints(best=...)"] = checkpoints and checkpoints.best and checkpoints.metric
        measure = prepare_evaluation(
            evaluation, found, state, data, needed, loss_fn, compute_dtype, threads
        )
        if plan == "verify":
            verify_step(found, state, data.peek(), loss_fn=loss_fn, compute_dtype=compute_dtype)
        step = by_microbatches(compiled, data.batch_size, accumulate)
        explain = ft.partial(explain_step, found, data, checkpoints, **options)
        of_loss = {"loss_fn": loss_fn, "compute_dtype": compute_dtype}
        inspect = ft.partial(warn_of_clamped_indices, data, **of_loss)
        stopping = stack.enter_context(stop_request(mesh=data.mesh))
        reader = stack.enter_context(metrics_reader(log, info))
        saver, due = stack.enter_context(saver), bool(saved.get("due"))
        if not over:
            rest = (reader, explain, inspect, measure, best, due, saver)
            state = _loop(state, data, step, stopping, *rest)
    last = int(state.step)
    finished = last == data.steps or (best is not None and best.is_over)
    ended = stopping.level == GO_ON or (stopping.level == ASKED and finished)
    reason = stopping.reason if stopping.level == ASKED else ""
    if best is not None and ended:
        reason = best.describe(last)
    conclude(state, data.steps, saver.directory, reason, ended=ended, quiet=quiet)
    end_after_signal(stopping, last, data.steps, saved=newest_checkpoint(checkpoints))
    if best is not None and ended:
        state = best.state(state, last, found.shardings)
    return on_mesh(state, chosen)


_TRIED = "Raised in the evaluation of one batch after the first step."


def _loop(
    state: TrainState,
    data: Batches,
    step: Callable[..., Any],
    stopping: StopRequest,
    reader: MetricsReader,
    explain: Callable[[Step, bool], str],
    inspect: Callable[[Batch, TrainState], None],
    measure: CompiledEvaluation | None,
    best: BestSoFar | None,
    due: bool,
    saver: Checkpointer,
) -> TrainState:
    every = measure.evaluation.every if measure else None
    first = data.step
    done: Step | None = None
    looks_for_labels = True

    def evaluate() -> dict[str, float]:
        nonlocal looks_for_labels
        number, at = (done.number, done.state) if done else (first, state)
        note = f"Raised in the evaluation after step {number}."
        assert measure is not None
        with reader.paused(measure.batches) as advance, noting(note), rescue(doubtful=()):
            metrics = measure(evaluated_model(at), at.key, advance=advance)
            if looks_for_labels and math.isnan(metrics.get("loss", 0.0)):
                looks_for_labels = False
                measure.explain_nan(evaluated_model(at))
        if best is not None:
            best.see(metrics, number, at)
        named = {f"eval/{name}": value for name, value in metrics.items()}
        reader.write(named, number, state=at)
        return metrics

    def save(metrics: dict[str, float]) -> None:
        if done is not None:
            reader.flush()
            place = data.gather_state(done.batch.state)
            counters = {} if best is None else {SAVED: best.saved}
            saver.save(done.number, done.state, {**place, "due": due, **counters}, metrics)

    def asked_to_stop() -> bool:
        """Whether a logger asked for it, and there are no other processes to agree with."""
        if reader.stop_reason is not None:
            stopping.ask(reader.stop_reason)
        return reader.stop_reason is not None and jax.process_count() == 1

    rescue = ft.partial(rescued, reader, lambda: done and done.state, save)
    with contextlib.closing(data), rescue():
        if due and measure:
            evaluate()
            if (best is not None and best.is_over) or (asked_to_stop() and stopping()):
                return state
        for done in training_steps(state, data, step):
            batch, number = done.batch, done.number
            due = batch.last or (number % every == 0 if every else batch.epoch_end)
            look = ft.partial(explain_batch, data, batch)
            reader.push(
                number,
                done.metrics,
                explain=ft.partial(explain, done),
                inspect=look,
                state=done.state,
            )
            if number == first + 1:
                inspect(batch, done.state)  # while the step is taken
            asked_to_stop()
            stop = stopping() and not batch.last
            # After a signal, a run does not wait for an evaluation, which is computed when it is
            # resumed.
            later = stop and stopping.level > ASKED and not saver.keeps_best
            metrics = evaluate() if measure and due and not later else {}
            over = best is not None and best.is_over
            if (asked_to_stop() or over) and not batch.last:
                stop = stop or over or stopping()
            if measure and number == first + 1 and not (due or stop):
                with noting(_TRIED), rescue(doubtful=()):
                    tried = evaluated_model(done.state)
                    measure.try_loss(tried, done.state.key)  # while the step is taken
            due = bool(due and later)
            if batch.last or stop or saver.wants(number, metrics, epoch_end=batch.epoch_end):
                save(metrics)
            if stop and stopping.level > ASKED:
                of_steps = "" if data.steps is None else f" of {data.steps}"
                logger.warning(
                    "Training stopped after step %d%s: %s.", *(number, of_steps, stopping.reason)
                )
            if stop:
                break
        reader.flush()
    return done.state if done else state
