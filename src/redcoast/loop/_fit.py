"""The training loop, to be read, copied and changed."""

import contextlib
from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any, Literal

import equinox as eqx
import jax
import optax
from jax.sharding import Mesh
from jaxtyping import PRNGKeyArray, PyTree

from ..checkpoint._checkpointer import Checkpointer
from ..checkpoint._policy import Checkpoints, as_checkpoints, newest_checkpoint
from ..core._axis_types import auto_ambient_mesh, on_auto_axes, on_mesh
from ..core._errors import check_integer
from ..core._frames import hide_frames
from ..core._output import forgiving_output
from ..core._tracing import refuse_traced
from ..data._collate import CollateFn, check_batching
from ..data._loading import checked_threads
from ..distributed._arrays import allowed_transfers
from ..distributed._heartbeat import watching
from ..sharding import Plan
from ..tracking._metrics import Log, metrics_reader
from ..train._loss import LossFn
from ..train._plan_checks import verify_step
from ..train._start import starting_state
from ..train._state import TrainState
from ..train._training import by_microbatches, make_training
from ._calls import plan_calls
from ._consistency import check_agreement
from ._early_stopping import EarlyStopping, best_so_far, complete_early_stopping, reason_of_end
from ._error_notes import explained_memory, noted_checkpoint
from ._evaluation import Evaluation
from ._printing import Printer
from ._run_config import run_of_fit
from ._run_settings import RunSettings, plain_number
from ._setup import (
    batches_of_run,
    complete_evaluation,
    mesh_of_run,
    place_data,
    plan_run,
    prepare_evaluation,
    restore_or_create,
    warn_of_resumption,
    warn_of_settings,
)
from ._stop import ASKED, GO_ON, end_after_signal, refuse_after_signal, stop_request
from ._training_loop import TrainingLoop

_TRAIN_SEVERAL = (
    "It is a loop over compiled steps. To train several models at once, pass `fit` one model with "
    "all of them, `eqx.filter_vmap(init_fn)(keys)`, and take the mean of their losses."
)


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
    steps_per_call: int | None = None,
    memory: int | float | Literal["auto"] | None = "auto",
    compiler_options: Mapping[str, bool | int | float | str] | None = None,
) -> TrainState:
    """Trains a model on raw examples, sharded over the devices of a mesh.

    Each epoch has its own order of the examples, determined by `key`. Batches span epochs, so only
    the last batch of a run may be short. A run that is started again resumes from its newest
    checkpoint, bit for bit where the kernels of the device are deterministic. A signal stops it
    after the current step, with a checkpoint: after SIGTERM, SIGUSR1 and SIGHUP, `fit` returns, and
    after Ctrl-C it raises `KeyboardInterrupt`. A second signal ends the process. To limit the time
    of a run, or to handle signals yourself, call `fit` inside [`redcoast.stop_on_signal`][].

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
    - `steps_per_call`: the number of steps in one call of a compiled program. By default, for
        small models, one call takes as many steps as fit into 5 milliseconds, at most 32; for other
        models, it takes one. The results are the same bit for bit, and each step is logged, but a
        signal stops the run after the call. With 1, each call takes one step. Pass a larger number
        for other models with short steps; it needs memory for as many batches and for two copies
        of the state.
    - `memory`: the bytes of each device that a step may take. If the plan takes more, the backward
        pass recomputes values, with the least additional arithmetic by an estimate
        (`plan.report.program.recomputed`). If that does not suffice, GPUs and TPUs keep the
        optimizer's state in the memory of the host. `"auto"` is 85 % of the memory that the devices
        report; CPUs report none. `None` recomputes nothing.
    - `compiler_options`: as for [`redcoast.compile_step`][], for the programs of training steps.

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
    # What the arguments mean.
    refuse_after_signal("fit", trains=True)
    refuse_traced((model_or_state, key), "fit", _TRAIN_SEVERAL)
    training = make_training(
        loss_fn, optimizer, accumulate, compute_dtype, trainable, compiler_options
    )
    collate_fn = check_batching(collate_fn, batch_size)
    if steps_per_call is not None:
        check_integer("steps_per_call", steps_per_call)
    evaluation = complete_evaluation(evaluation, collate_fn, loss_fn, batch_size)
    early_stopping, checkpoints = complete_early_stopping(
        early_stopping, evaluation, as_checkpoints(checkpoints)
    )
    settings = RunSettings(
        training=training,
        average=plain_number(average),
        collate_fn=collate_fn,
        batch_size=plain_number(batch_size),
        epochs=plain_number(epochs),
        steps=plain_number(steps),
        threads=checked_threads(workers, ahead),
        mesh=mesh_of_run(mesh, plan),
        chooses_mesh=mesh == "auto",
        plan=plan,
        overrides=overrides,
        memory=memory,
        evaluation=evaluation,
        early_stopping=early_stopping,
        checkpoints=checkpoints,
    )
    checkpointer = Checkpointer(checkpoints)
    printer = Printer(log, checkpointer.directory)
    # A warning that output is closed may itself go to a closed stream.
    with forgiving_output():
        printer.introduce()
    model_or_state, key = on_auto_axes((model_or_state, key))
    with (
        forgiving_output(),
        allowed_transfers(),
        auto_ambient_mesh(),
        watching(),
        checkpointer.locked(),
        contextlib.ExitStack() as stack,
    ):
        # The shapes of the state, the data, and the plan; nothing is on the devices yet.
        abstract, run_key, create = starting_state(
            model_or_state, training, key, average=average, caller="fit"
        )
        data = batches_of_run(settings, examples, run_key)
        run_plan = plan_run(settings, abstract, data, printer)
        compiled = training.compiled_by(run_plan)
        check_agreement(settings, run_plan, model_or_state, abstract, compiled, data, run_key)
        # From here on, an error says what was saved, and what the plan expected.
        stack.enter_context(noted_checkpoint(checkpoints))
        stack.enter_context(explained_memory(run_plan))

        # The state, created or restored, and the evaluation.
        state, saved = restore_or_create(checkpointer, run_plan, abstract, create)
        place_data(data, state, saved, checkpoints)
        best = best_so_far(early_stopping, checkpoints, saved)
        # What they hold, such as a counter, may change in the loop.
        functions = settings.functions_of_results(state.model)
        if saved is not None:
            quiet = printer.quiet
            warn_of_settings(settings, functions, saved, state)
            warn_of_resumption(settings, model_or_state, key, abstract, state, data, quiet=quiet)
        is_over = best is not None and best.is_over
        run = run_of_fit(training, run_plan, data, abstract, checkpointer.directory, saved, is_over)
        printer.announce(run_plan, training, abstract, data, resumed=run.resumed, over=is_over)
        compiled_evaluation = prepare_evaluation(settings, run_plan, state, data)
        if plan == "verify":
            verify_step(run_plan, training, state, data.peek())

        # The loop.
        alone = by_microbatches(compiled, data.batch_size, training.accumulate)
        calls = plan_calls(steps_per_call, training, run_plan, state, data, alone, log)
        stopping = stack.enter_context(stop_request(mesh=data.mesh))
        reader = stack.enter_context(metrics_reader(log, run))
        stack.enter_context(checkpointer)
        loop = TrainingLoop(
            settings,
            run_plan,
            data,
            calls,
            compiled_evaluation,
            best,
            checkpointer,
            reader,
            stopping,
            functions,
            is_due=bool(saved and saved.get("due")),
        )
        # A run that early stopping ended stays ended when it is resumed.
        if not is_over:
            state = loop.run(state)

    # How it ended.
    last = int(jax.device_get(state.step))  # waits for the devices
    # A stop that arrives with the last step changes nothing.
    is_complete = last == data.steps or (best is not None and best.is_over)
    ended = stopping.level == GO_ON or (stopping.level == ASKED and is_complete)
    reason = reason_of_end(stopping, best, last, ended=ended)
    printer.conclude(state, data.steps, reason, ended=ended)
    end_after_signal(stopping, last, data.steps, saved=newest_checkpoint(checkpoints))
    if best is not None and ended:
        state = best.state(state, last, run_plan.shardings)
    # With the axis types of the user's mesh, which training replaced by automatic ones.
    return on_mesh(state, settings.mesh)
