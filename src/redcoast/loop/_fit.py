"""The training loop, to be read, copied and changed."""

import contextlib
import functools as ft
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

import equinox as eqx
import optax
from jax.sharding import Mesh
from jaxtyping import PRNGKeyArray, PyTree

from ..checkpoint._checkpointer import Checkpointer
from ..checkpoint._policy import Checkpoints
from ..core._errors import (
    check_functions,
    check_integer,
    check_key,
    check_number,
    check_optimizer,
    noting,
)
from ..data._batches import Batches, batches
from ..data._collate import CollateFn
from ..distributed._heartbeat import watching
from ..distributed._kv_store import is_main
from ..tracking._metrics import Log, MetricsReader
from ..tracking._progress import progress_logger
from ..tracking._run import listed_loggers, start_loggers
from ..train._compile import compile_microbatched
from ..train._loss import LossFn
from ..train._plan import check_coupling, plan_step, verify_step
from ..train._predict import PredictFn
from ..train._step import TrainState, train_step
from ._consistency import check_agreement
from ._errors import explained_memory, noted_checkpoint, rescued
from ._evaluate import OutputFn, check_batch_size
from ._nonfinite import check_finite, diagnose_step
from ._setup import (
    announce,
    check_eval_every,
    is_init_fn,
    rehearse,
    run_info,
    starting_state,
    warn_of_repeats,
)
from ._steps import Step, training_steps
from ._stop import stop_on_signal
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

    - `model_or_state`: a model, any PyTree, of which a copy is trained; a function
        `init_fn(key) -> model`, whose arrays are created sharded, so that the model may be larger
        than a device; or a [`redcoast.TrainState`][], which is donated and trained further.
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
        callables. Each gets `loss`, `grad_norm`, `skipped`, `learning_rate` and aux at each step,
        `eval/...` at evaluations.
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
    check_integer("max_skipped", max_skipped)
    check_optimizer(optimizer)
    check_functions(collate_fn=collate_fn, loss_fn=loss_fn)
    listed_loggers(log)
    if max_seconds is not None:
        check_number("max_seconds", max_seconds, above=0)
    if key is not None:
        check_key(key)
    quiet = progress is False or not is_main()
    saver = Checkpointer(checkpoints)
    with watching(), saver.locked():
        abstract, key, make = starting_state(model_or_state, optimizer, key, trainable)
        chosen = None if mesh == "auto" else mesh
        options = {"batch_size": batch_size, "epochs": epochs, "steps": steps}
        data = batches(examples, collate_fn, key=key, mesh=chosen, **options)
        given = {"compute_dtype": compute_dtype, "trainable": trainable}
        planned = {"accumulate": accumulate, "overrides": overrides, **given}
        if mesh == "auto":
            # Imported where it is used, so that importing redcoast stays fast.
            from ..dryrun._auto_mesh import auto_mesh

            data.mesh = auto_mesh(
                abstract, optimizer, data.spec, loss_fn=loss_fn, quiet=quiet, **planned
            )
        with noting("Raised while the step was planned, before the first step."):
            plan = plan_step(abstract, loss_fn, data.spec, data.mesh, **planned)
            check_coupling(
                plan,
                abstract,
                data.spec,
                accumulate=accumulate,
                loss_fn=loss_fn,
                compute_dtype=compute_dtype,
                eval_examples=eval_examples,
            )
        check_agreement(
            plan,
            model_or_state,
            {
                "init_fn": model_or_state if is_init_fn(model_or_state) else None,
                "collate_fn": collate_fn,
                "loss_fn": loss_fn,
                "predict_fn": predict_fn,
                "output_fn": output_fn,
                "metric_fn": metric_fn,
            },
            {"examples": examples, "eval_examples": eval_examples},
            data.spec,
            mesh=dict(data.mesh.shape),
            accumulate=accumulate,
            eval_every=eval_every,
            checkpoints=str(checkpoints),
            **options,
        )
        with explained_memory(plan):
            restored = saver.restore(abstract, plan.shardings)
            state = restored.state if restored else make(plan.shardings)
        saved = restored.data if restored else {}
        data.set_state({"step": int(state.step), **saved}, key=state.key)
        warn_of_repeats(data)
        validation = make_validation(
            eval_examples,
            collate_fn=collate_fn,
            loss_fn=loss_fn,
            predict_fn=predict_fn,
            output_fn=output_fn,
            metric_fn=metric_fn,
            batch_size=batch_size,
            plan=plan,
            mesh=data.mesh,
            compute_dtype=compute_dtype,
        )
        check_eval_every(eval_every, validation)
        if not quiet:
            announce(plan, data, resumed=restored is not None)
        with explained_memory(plan):
            rehearse(validation, state, checkpoints)
        if verify:
            verify_step(plan, state, data.peek(), loss_fn=loss_fn, compute_dtype=compute_dtype)
        constrained = plan.constrain(loss_fn)
        step = compile_microbatched(
            ft.partial(train_step, loss_fn=constrained, optimizer=optimizer, **given),
            plan.shardings,
            batch_size=batch_size,
            accumulate=accumulate,
        )
        with noted_checkpoint(checkpoints), explained_memory(plan), contextlib.ExitStack() as stack:
            stopping = stack.enter_context(stop_on_signal(max_seconds, mesh=data.mesh, since=begin))
            run = run_info(checkpoints, plan, data, resumed=restored is not None)
            bar = progress_logger(False if quiet else progress)
            logs = start_loggers(log, run, stack, progress=bar) if is_main() else []
            reader = MetricsReader(logs, max_skipped=max_skipped)
            stack.callback(data.close)
            return _loop(
                state,
                data,
                step,
                reader=reader,
                check=ft.partial(
                    check_finite,
                    reader=reader,
                    data=data,
                    diagnose=ft.partial(
                        diagnose_step,
                        loss_fn=constrained,
                        plan=plan,
                        batch_size=batch_size,
                        accumulate=accumulate,
                        **given,
                    ),
                    checkpoints=checkpoints,
                ),
                validation=validation,
                eval_every=eval_every,
                due=bool(saved.get("due")),
                saver=stack.enter_context(saver),
                stopping=stopping,
            )


def _loop(
    state: TrainState,
    data: Batches,
    step: Callable[..., Any],
    *,
    reader: MetricsReader,
    check: Callable[..., None],
    validation: Validation | None,
    eval_every: int | None,
    due: bool,
    saver: Checkpointer,
    stopping: Callable[[], bool],
) -> TrainState:
    first = data.step
    done: Step | None = None

    def evaluate() -> dict[str, float]:
        reader.flush()
        reader.pause()
        number, at = (done.number, done.state) if done else (first, state)
        with noting(f"Raised in the evaluation after step {number}."), rescue(doubtful=()):
            metrics = validation(at.model, at.key) if validation else {}
        reader.resume()
        reader.write(metrics, number)
        return {name.removeprefix("eval/"): value for name, value in metrics.items()}

    def save(metrics: dict[str, float]) -> None:
        if done is not None:
            reader.flush()
            saver.save(done.number, done.state, {**done.batch.state, "due": due}, metrics)

    rescue = ft.partial(rescued, reader, lambda: done and done.state, save)
    with rescue():
        if due and validation:
            evaluate()
        for done in training_steps(state, data, step):
            batch, number = done.batch, done.number
            due = batch.last or (number % eval_every == 0 if eval_every else batch.epoch_end)
            reader.push(number, done.metrics)
            check(done, trained=number - reader.skipped > first)
            stop = stopping() and not batch.last
            # A run that is stopped does not wait for an evaluation; it follows on resumption.
            later = stop and not saver.keeps_best
            metrics = evaluate() if validation and due and not later else {}
            due = bool(due and later)
            if batch.last or stop or saver.wants(number, metrics, epoch_end=batch.epoch_end):
                save(metrics)
            if stop:
                logger.warning("Training stopped after step %d.", number)
                break
        reader.flush()
    return done.state if done else state
