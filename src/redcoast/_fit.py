"""The training loop, to be read, copied and changed."""

import contextlib
import functools as ft
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import equinox as eqx
import jax
import optax
from jax.sharding import Mesh
from jaxtyping import Array, PRNGKeyArray, PyTree

from ._compile import compile_step
from ._course import Course, check_end, course_batches, plan_course
from ._data import Batch, CollateFn, with_last
from ._evaluate import OutputFn, check_batch_size
from ._loss import LossFn
from ._mesh import ambient_or_default, batch_shards
from ._planning import first_batch, plan_run, starting_state, verify_run
from ._predict import PredictFn
from ._progress import Progress
from ._progress import progress as show_progress
from ._reading import Log, MetricsReader
from ._retention import Checkpoints, Saver, restore_newest, saved_steps
from ._sharding import Plan
from ._signals import stop_signals
from ._tracking import RunInfo, code_version, say, start_loggers
from ._train import TrainState, train_step
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
    mesh: Mesh | None = None,
    epochs: int | None = None,
    steps: int | None = None,
    key: PRNGKeyArray | None = None,
    predict_fn: PredictFn | None = None,
    output_fn: OutputFn | None = None,
    metric_fn: MetricFn | None = None,
    eval_examples: Any = None,
    eval_every: int | None = None,
    checkpoints: Checkpoints | None = None,
    log: Log | None = None,
    accumulate: int = 1,
    compute_dtype: Any = None,
    trainable: PyTree = eqx.is_inexact_array,
    overrides: Sequence[tuple[str, Any]] = (),
    progress: bool | None = None,
    verify: bool = False,
) -> TrainState:
    """Trains a model on raw examples, split over the devices of a mesh.

    The data is a function of the key and the step: each epoch has an order of its own, batches run
    on across the ends of epochs, and only the last batch of a run may be short. A run that is
    stopped and started again goes on where it was, bit by bit. SIGTERM and SIGINT end it after the
    step under way, with a checkpoint; a second signal stops at once.

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
    - `log`: a callable `(metrics, step)`, such as [`redcoast.wandb_logger`][] gives. It gets
        `loss`, `grad_norm`, `skipped`, `learning_rate` and aux at each step, `eval/...` at
        evaluations.
    - `accumulate`, `compute_dtype`, `trainable`: as for [`redcoast.train_step`][].
    - `overrides`: as for [`redcoast.infer_shardings`][].
    - `progress`: `True` shows a bar anywhere, `False` prints nothing; by default there is a bar on
        a terminal and a line now and then elsewhere.
    - `verify`: compares loss and gradients of the planned program with one device's on a few
        examples before the first step; the model has to fit on one device.

    **Returns:**

    The [`redcoast.TrainState`][] at the end. Its `model` is the trained model.

    **Raises:**

    `ValueError` or `TypeError` before the first step, in a full sentence, if an argument or what
    one of the functions returns cannot work. `FloatingPointError` if loss or gradient stay without
    a finite value for 20 steps in a row.

    !!! Example

        ```python
        state = rc.fit(
            model, optax.adamw(3e-4), examples,
            collate_fn=collate_fn, loss_fn=loss_fn, batch_size=32, epochs=3,
        )
        ```
    """
    check_batch_size(batch_size)
    mesh = ambient_or_default(mesh)
    quiet = progress is False or jax.process_index() != 0
    abstract, make = starting_state(model_or_state, optimizer, key, mesh, trainable)
    draw = ft.partial(first_batch, examples, collate_fn, batch_size)
    given = {"compute_dtype": compute_dtype, "trainable": trainable}
    options = {"loss_fn": loss_fn, "accumulate": accumulate, "overrides": overrides, **given}
    plan = plan_run(abstract, draw, mesh, **options)
    restored = restore_newest(checkpoints, abstract, plan.shardings) if checkpoints else None
    state, saved = restored or (make(plan.shardings), {})
    course = plan_course(examples, state, saved, batch_size, epochs, steps)
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
    _check_eval_every(eval_every, validation)
    if not quiet:
        _announce(plan, course, restored is not None, batch_size)
    _rehearse(validation, state, checkpoints)
    if verify:
        verify_run(plan, state, draw, loss_fn=loss_fn, compute_dtype=compute_dtype)
    planned = plan.constrain(loss_fn)
    step = ft.partial(train_step, loss_fn=planned, optimizer=optimizer, **given)
    with contextlib.ExitStack() as stack:
        run = _run_info(checkpoints, restored is not None, plan, batch_size)
        bar = show_progress(course.last_step, start=course.step, enabled=not quiet and progress)
        logs = start_loggers(log, run, stack)
        reader = MetricsReader(logs, stack.enter_context(bar), ft.partial(_where, checkpoints))
        return _loop(
            state,
            course_batches(examples, collate_fn, state, saved, course, batch_size, mesh),
            _compiled_steps(step, reader, plan, batch_size, accumulate),
            course=course,
            reader=reader,
            bar=bar,
            validation=validation,
            eval_every=eval_every,
            saver=stack.enter_context(Saver(checkpoints)) if checkpoints else None,
            stopping=stack.enter_context(stop_signals()),
            mesh=dict(mesh.shape),
        )


def _loop(
    state: TrainState,
    batches: Iterator[Batch],
    step_of: Callable[[int], Any],
    *,
    course: Course,
    reader: MetricsReader,
    bar: Progress,
    validation: Validation | None,
    eval_every: int | None,
    saver: Saver | None,
    stopping: Callable[[], bool],
    mesh: dict[str, int],
) -> TrainState:
    step, position, stream = course.step, course.position, None

    def evaluate() -> dict[str, float]:
        reader.flush()
        bar.pause()
        metrics = validation(state.model, state.key) if validation else {}
        bar.resume()
        reader.write(metrics, step)
        return {name.removeprefix("eval/"): value for name, value in metrics.items()}

    def save(metrics: dict[str, float]) -> None:
        if saver:
            reader.flush()
            data = {"position": position, "length": course.length, "stream": stream}
            metadata = {"step": step, "data": data, "metrics": metrics, "mesh": mesh}
            saver.save(step, state, metadata)

    for batch, last in with_last(batches):
        state, metrics = step_of(batch.rows)(state, batch.arrays)
        step += 1
        reader.push(step, metrics, batch.rows)
        stop = stopping()
        epoch_ended = last or course.ends_epoch(position, batch.position)
        position, stream = batch.position, batch.stream
        due = last or (step % eval_every == 0 if eval_every else epoch_ended)
        evaluated = evaluate() if validation and due else {}
        if saver and (last or stop or saver.wants(step, evaluated, epoch_ended=epoch_ended)):
            save(evaluated)
        if stop:
            logger.warning("A signal came: training stops after step %d.", step)
            break
    else:
        check_end(course, step)
    reader.flush()
    return state


def _compiled_steps(
    step: Callable[..., Any], reader: MetricsReader, plan: Plan, batch_size: int, accumulate: int
) -> Callable[[int], Any]:
    """The compiled step for a number of examples."""

    @ft.cache
    def compiled(count: int) -> Any:
        def packed(state: TrainState, batch: PyTree) -> tuple[TrainState, Array]:
            state, metrics = step(state, batch, accumulate=count)
            return state, reader.pack(metrics)

        return compile_step(packed, plan.shardings)

    def of(rows: int) -> Any:
        if rows == batch_size:
            return compiled(accumulate)
        # A short last batch: microbatches no larger than those before, and, as all that a step
        # draws depends on them, as many on every mesh.
        least = -(-rows * accumulate // batch_size)
        return compiled(next(k for k in range(least, rows + 1) if rows % k == 0))

    return of


def _rehearse(
    validation: Validation | None, state: TrainState, checkpoints: Checkpoints | None
) -> None:
    """Evaluates one batch, so that a mistake there shows before an epoch is spent."""
    names = []
    if validation is not None:
        metrics = validation(state.model, state.key, batches=1)
        names = [name.removeprefix("eval/") for name in metrics]
    if checkpoints and checkpoints.best is not None and checkpoints.metric not in names:
        raise ValueError(
            f"`Checkpoints(best={checkpoints.best!r})` is no metric of the evaluation, which has "
            f"{', '.join(names) or 'none, for want of `eval_examples`'}."
        )


def _check_eval_every(eval_every: int | None, validation: Validation | None) -> None:
    if eval_every is not None and validation is None:
        raise ValueError("`eval_every` needs something to evaluate on; pass `eval_examples` too.")
    if eval_every is not None and eval_every < 1:
        raise ValueError(f"`eval_every` is {eval_every}. Evaluate every step at the most.")


def _announce(plan: Plan, course: Course, resumed: bool, batch_size: int) -> None:
    """Prints how the model is split, and what a user should know of the run."""
    say(str(plan))
    shards = batch_shards(plan.mesh)
    if resumed:
        say(f"Resumed at step {course.step}.")
    if course.last_step is not None and course.step >= course.last_step:
        say(f"Nothing is left to train: {course.step} of {course.last_step} steps are done.")
    if course.length is not None and course.length < batch_size:
        say(f"{course.length} examples are fewer than a batch of {batch_size}: it spans epochs.")
    rest = (course.last_position or 0) - course.position
    if rest > 0 and rest % batch_size % shards and batch_size % shards == 0:
        say(
            f"The last batch, of {rest % batch_size}, does not divide over data x fsdp = {shards} "
            "devices, so that each computes all of it."
        )
    if batch_size % shards:
        say(
            f"A batch of {batch_size} does not divide over data x fsdp = {shards} devices, so that "
            f"each computes all of it. A multiple of {shards} would be split."
        )


def _where(checkpoints: Checkpoints | None) -> str:
    steps = saved_steps(checkpoints) if checkpoints else []
    if not steps or not checkpoints:
        return "There is no checkpoint."
    return f"The last good checkpoint is {checkpoints.path / str(steps[-1])}."


def _run_info(
    checkpoints: Checkpoints | None, resumed: bool, plan: Plan, batch_size: int
) -> RunInfo:
    directory = checkpoints.path.parent if checkpoints else None
    config = {
        "batch_size": batch_size,
        "mesh": dict(plan.mesh.shape),
        "versions": code_version(),
    }
    return RunInfo(directory=directory, resumed=resumed, plan=str(plan), config=config)
