"""The training loop, to be read, copied and changed."""

import contextlib
import functools as ft
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import equinox as eqx
import optax
from jax.sharding import Mesh
from jaxtyping import PRNGKeyArray, PyTree

from ..checkpoint._policy import Checkpoints, restore_newest
from ..checkpoint._run_lock import lock_run
from ..checkpoint._saver import Saver
from ..core._errors import (
    check_functions,
    check_integer,
    check_key,
    check_kind,
    check_optimizer,
    noting,
)
from ..data._batches import Batch, CollateFn, with_last
from ..data._position import Course, check_end, course_batches, plan_course
from ..distributed._heartbeat import watching
from ..distributed._kv_store import is_main
from ..distributed._mesh import ambient_or_default, make_mesh
from ..tracking._metrics_reader import Log, MetricsReader
from ..tracking._progress import Progress
from ..tracking._progress import progress as show_progress
from ..tracking._run import listed_loggers, start_loggers
from ..train._compile import compiled_steps, microbatches
from ..train._loss import LossFn
from ..train._plan import check_coupling, first_batch, plan_run, starting_state, verify_run
from ..train._predict import PredictFn
from ..train._step import TrainState, train_step
from ._consistency import check_agreement
from ._errors import explained_memory, noted_checkpoint, rescued
from ._evaluate import OutputFn, check_batch_size
from ._nonfinite import check_finite
from ._setup import announce, check_eval_every, rehearse, run_info, warn_of_repeats
from ._stop import Votes, check_max_seconds, stop_signals
from ._validation import MetricFn, Validation, make_validation

logger = logging.getLogger("redcoast")


def fit(
    model_or_state: PyTree,
    optimizer: optax.GradientTransformation,
    examples: Any,
    *,
    collate_fn: CollateFn,
    loss_fn: LossFn,
    batch_size: int,
    mesh: Mesh | Literal["auto"] | None = None,
    epochs: int | None = None,
    steps: int | None = None,
    key: PRNGKeyArray | None = None,
    predict_fn: PredictFn | None = None,
    output_fn: OutputFn | None = None,
    metric_fn: MetricFn | None = None,
    eval_examples: Any = None,
    eval_every: int | None = None,
    checkpoints: Checkpoints | None = None,
    log: Log | Sequence[Log] | None = None,
    accumulate: int = 1,
    compute_dtype: Any = None,
    trainable: PyTree = eqx.is_inexact_array,
    overrides: Sequence[tuple[str, Any]] = (),
    progress: bool | None = None,
    verify: bool = False,
    max_seconds: int | float | None = None,
    max_skipped: int = 20,
) -> TrainState:
    """Trains a model on raw examples, split over the devices of a mesh.

    The data is a function of the key and the step: each epoch has an order of its own, batches run
    on across the ends of epochs, and only the last batch of a run may be short. A run that is
    stopped and started again goes on where it was, bit by bit. SIGTERM, SIGINT, SIGUSR1 and the end
    of `max_seconds` end it after the step under way, with a checkpoint; a second signal stops at
    once.

    **Arguments:**

    - `model_or_state`: a model, any PyTree, of which a copy is trained; or a
        [`redcoast.TrainState`][], which is donated and goes on from its step.
    - `optimizer`: an optax optimizer. With `optax.inject_hyperparams`, its learning rate is logged.
    - `examples`: anything with a length and an index (a list, a memory map, a dataset); a function
        from the epoch to such a thing; or a stream: an iterator with `get_state` and `set_state`,
        as Grain's are.
    - `collate_fn`: `collate_fn(examples)` turns a list of raw examples into a PyTree of NumPy
        arrays, batch dimension first. It is called in threads. If it has a parameter `rngs`, it is
        given one NumPy `Generator` for each example, for augmentation (`None` in evaluation).
    - `loss_fn`: `loss_fn(model, batch, key)`, as for [`redcoast.train_step`][].
    - `batch_size`: how many examples a step takes, over all devices.
    - `mesh`: from [`redcoast.make_mesh`][]; by default the ambient one, or all devices as `data`.
        `"auto"` compares all meshes of the devices and takes the best, as
        [`redcoast.suggest_mesh`][] does, which takes the time to compile the step thrice.
    - `epochs`, `steps`: how long to train, counted from the beginning of the run: one of the two.
        A stream may have neither, and trains until it ends.
    - `key`: a JAX key, which decides the order of the data and all that the loss draws;
        `jax.random.key(0)` by default.
    - `predict_fn`, `output_fn`, `metric_fn`: `predict_fn(model, batch, key)` and `output_fn` as for
        [`redcoast.predict_examples`][]; `metric_fn(examples, outputs)` returns a dict of numbers.
    - `eval_examples`: held-out examples, on which the loss and these metrics are evaluated.
    - `eval_every`: after how many steps; by default at the end of each epoch. The end of training
        is always evaluated.
    - `checkpoints`: a [`redcoast.Checkpoints`][]; without, nothing is saved.
    - `log`: a callable `(metrics, step)`, such as [`redcoast.wandb_logger`][] gives, or a list of
        such. It gets
        `loss`, `grad_norm`, `skipped`, `learning_rate` and aux at each step, `eval/...` at
        evaluations.
    - `accumulate`, `compute_dtype`, `trainable`: as for [`redcoast.train_step`][].
    - `overrides`: as for [`redcoast.infer_shardings`][].
    - `progress`: `True` shows a bar anywhere, `False` prints nothing; by default there is a bar on
        a terminal and a line now and then elsewhere.
    - `verify`: compares loss and gradients of the planned program with one device's on a few
        examples before the first step; the model has to fit on one device.
    - `max_seconds`: how many seconds the run may take from the call on. What is under way then (a
        step, an evaluation) and the last checkpoint come on top.
    - `max_skipped`: after how many steps in a row without a finite loss and gradient the run ends.

    **Returns:**

    The [`redcoast.TrainState`][] at the end. Its `model` is the trained model. Of a run that was
    stopped, its `step` is below `steps`.

    **Raises:**

    `ValueError` or `TypeError` before the first step, in a full sentence, if an argument or what
    one of the functions returns cannot work. `FloatingPointError` if loss or gradient stay without
    a finite value for `max_skipped` steps in a row: it names the gradients, and the examples. What
    one of the functions raises comes out with notes that say which, at which step, for which
    examples, and where the last checkpoint is. [`redcoast.CheckpointNotSaved`][] if the last state
    could not be saved; that an earlier one could not is a warning.

    !!! Example

        ```python
        state = rc.fit(
            model, optax.adamw(3e-4), examples,
            collate_fn=collate_fn, loss_fn=loss_fn, batch_size=32, epochs=3,
        )
        ```
    """
    begin = time.monotonic()
    check_batch_size(batch_size)
    check_max_seconds(max_seconds)
    check_integer("max_skipped", max_skipped)
    check_optimizer(optimizer)
    check_functions(collate_fn=collate_fn, loss_fn=loss_fn)
    listed_loggers(log)
    if key is not None:
        check_key(key)
    if checkpoints is not None:
        check_kind("checkpoints", checkpoints, Checkpoints, "a `redcoast.Checkpoints`")
    auto = mesh == "auto"
    mesh = make_mesh() if mesh == "auto" else ambient_or_default(mesh)
    quiet = progress is False or not is_main()
    with watching(), lock_run(checkpoints.path.parent if checkpoints else None):
        abstract, make = starting_state(model_or_state, optimizer, key, mesh, trainable)
        draw = ft.partial(first_batch, examples, collate_fn, batch_size, mesh)
        given = {"compute_dtype": compute_dtype, "trainable": trainable}
        options = {"loss_fn": loss_fn, "accumulate": accumulate, "overrides": overrides, **given}
        if auto:
            # Imported where a program is compiled, so that importing redcoast stays cheap.
            from ..dryrun._auto_mesh import auto_mesh

            mesh = auto_mesh(abstract, optimizer, draw, batch_size, quiet=quiet, **options)
            draw = ft.partial(first_batch, examples, collate_fn, batch_size, mesh)
        plan = plan_run(abstract, draw, mesh, batch_size=batch_size, **options)
        check_coupling(
            plan,
            abstract,
            draw,
            batch_size=batch_size,
            accumulate=accumulate,
            loss_fn=loss_fn,
            compute_dtype=compute_dtype,
            eval_examples=eval_examples,
        )
        functions = {"collate_fn": collate_fn, "loss_fn": loss_fn, "predict_fn": predict_fn}
        check_agreement(
            plan,
            model_or_state,
            functions | {"output_fn": output_fn, "metric_fn": metric_fn},
            {"examples": examples, "eval_examples": eval_examples},
            draw,
            mesh=dict(mesh.shape),
            batch_size=batch_size,
            accumulate=accumulate,
            epochs=epochs,
            steps=steps,
            eval_every=eval_every,
            checkpoints=str(checkpoints),
        )
        with explained_memory(plan):
            places = plan.shardings
            restored = restore_newest(checkpoints, abstract, places) if checkpoints else None
            state, saved = restored or (make(places), {})
        course = plan_course(examples, int(state.step), saved, batch_size, epochs, steps)
        warn_of_repeats(course, batch_size)
        validation = make_validation(
            eval_examples,
            collate_fn=collate_fn,
            loss_fn=loss_fn,
            predict_fn=predict_fn,
            output_fn=output_fn,
            metric_fn=metric_fn,
            batch_size=batch_size,
            plan=plan,
            mesh=mesh,
            compute_dtype=compute_dtype,
        )
        check_eval_every(eval_every, validation)
        if not quiet:
            announce(plan, course, restored is not None, batch_size)
        with explained_memory(plan):
            rehearse(validation, state, checkpoints)
        if verify:
            verify_run(plan, state, draw, loss_fn=loss_fn, compute_dtype=compute_dtype)
        planned = plan.constrain(loss_fn)
        step = ft.partial(train_step, loss_fn=planned, optimizer=optimizer, **given)
        with noted_checkpoint(checkpoints), explained_memory(plan), contextlib.ExitStack() as stack:
            stopping = stack.enter_context(stop_signals(max_seconds, since=begin))
            run = run_info(checkpoints, restored is not None, plan, batch_size)
            bar = show_progress(course.last_step, start=course.step, enabled=not quiet and progress)
            logs = start_loggers(log, run, stack) if is_main() else []
            votes = Votes(mesh, stopping)
            reader = MetricsReader(logs, stack.enter_context(bar), max_skipped=max_skipped)
            batches = course_batches(
                examples, collate_fn, state.key, saved, course, batch_size, mesh
            )
            split = ft.partial(microbatches, batch_size=batch_size, accumulate=accumulate)
            return _loop(
                state,
                stack.enter_context(contextlib.closing(batches)),
                compiled_steps(step, reader.pack, plan, split),
                ft.partial(check_finite, reader, plan, course, checkpoints, split, loss_fn, given),
                course=course,
                reader=reader,
                bar=bar,
                validation=validation,
                eval_every=eval_every,
                saver=stack.enter_context(Saver(checkpoints)) if checkpoints else None,
                votes=votes,
                mesh=dict(mesh.shape),
            )


def _loop(
    state: TrainState,
    batches: Iterator[Batch],
    step_of: Callable[[int], Any],
    check: Callable[[TrainState, Batch, int], None],
    *,
    course: Course,
    reader: MetricsReader,
    bar: Progress,
    validation: Validation | None,
    eval_every: int | None,
    saver: Saver | None,
    votes: Votes,
    mesh: dict[str, int],
) -> TrainState:
    step, position, stream, due = course.step, course.position, None, course.due

    def evaluate() -> dict[str, float]:
        reader.flush()
        bar.pause()
        with noting(f"Raised in the evaluation after step {step}."), rescue(doubtful=()):
            metrics = validation(state.model, state.key) if validation else {}
        bar.resume()
        reader.write(metrics, step)
        return {name.removeprefix("eval/"): value for name, value in metrics.items()}

    def save(metrics: dict[str, float]) -> None:
        if saver:
            reader.flush()
            data = {"position": position, "length": course.length, "stream": stream, "due": due}
            metadata = {"step": step, "data": data, "metrics": metrics, "mesh": mesh}
            saver.save(step, state, metadata)

    rescue = ft.partial(rescued, lambda: step > course.step, reader, lambda: state, save)
    with rescue():
        if due and validation:
            evaluate()
        for batch, last in with_last(batches):
            with noting(f"Raised by step {step + 1}."):
                state, metrics = step_of(batch.rows)(state, batch.arrays, votes.cast())
            step += 1
            epoch_ended = last or course.ends_epoch(position, batch.position)
            position, stream = batch.position, batch.stream
            due = last or (step % eval_every == 0 if eval_every else epoch_ended)
            reader.push(step, metrics, batch.rows)
            check(state, batch, step)
            stop = votes.stop(reader.votes)
            # Who stops a run may not wait for an evaluation; it comes when the run goes on.
            later = stop and not last and saver and not saver.keeps_best
            evaluated = evaluate() if validation and due and not later else {}
            due = bool(due and later)
            if saver and (last or stop or saver.wants(step, evaluated, epoch_ended=epoch_ended)):
                save(evaluated)
            if stop and not last:
                logger.warning("Training stopped after step %d.", step)
                break
        else:
            check_end(course, step)
        reader.flush()
    return state
