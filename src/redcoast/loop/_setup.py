"""The set-up of a run before its first step."""

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Literal

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jaxtyping import PRNGKeyArray, PyTree

from ..checkpoint._checkpointer import Checkpointer
from ..checkpoint._policy import Checkpoints
from ..core._axis_types import with_auto_axes
from ..core._errors import check_kind, noting, several, wrong_type
from ..core._frames import warn
from ..core._pytree import ARRAYS, leaf_paths
from ..core._read_json import JSONObject
from ..core._trainable import abstract_trainable
from ..data._batches import Batches, batches
from ..data._collate import CollateFn
from ..data._loading import OwnBatches
from ..distributed._kv_store import is_main
from ..distributed._mesh import ambient_or_default
from ..sharding import Plan, with_auto_plan
from ..train._loss import LossFn
from ..train._microbatches import refuse_per_batch
from ..train._optimizer import constant_hyperparameters, initial_hyperparameters
from ..train._plan_checks import check_step
from ..train._plan_step import plan_training
from ..train._start import is_init_fn
from ..train._state import TrainState, split_key_of_run
from ._evaluation import KIND, CompiledEvaluation, Evaluation, check_mean, compile_evaluation
from ._printing import Printer, nothing_left
from ._run_settings import FUNCTIONS, SETTINGS, RunSettings

logger = logging.getLogger("redcoast")


def mesh_of_run(mesh: Mesh | Literal["auto"] | None, plan: Plan | str | None) -> Mesh:
    """Returns the mesh of `plan`, if it is a plan, or else `mesh`; by default and for `"auto"`, the
    ambient mesh or all devices."""
    if not isinstance(plan, Plan):
        if not (plan is None or (isinstance(plan, str) and plan == "verify")):
            words = 'a `redcoast.Plan`, from `plan_step` or `load_plan`, or "verify"'
            raise wrong_type("plan", plan, words)
        if isinstance(mesh, str) and mesh == "auto":
            mesh = None
        return ambient_or_default(mesh)
    if not isinstance(plan.mesh, Mesh):
        raise ValueError(
            "`plan` is for an abstract mesh. Load it over devices: `load_plan(path, state, mesh)`."
        )
    if mesh is not None and mesh != plan.mesh:
        raise ValueError(f"`plan` is for {plan.mesh}, and `mesh` is another one; leave `mesh` out.")
    return plan.mesh


def batches_of_run(settings: RunSettings, examples: object, key: PRNGKeyArray) -> Batches:
    """The batches of a run.

    Raises `TypeError` if the run has checkpoints, and its data cannot be resumed.
    """
    data = batches(
        examples,
        settings.collate_fn,
        batch_size=settings.batch_size,
        epochs=settings.epochs,
        steps=settings.steps,
        key=key,
        mesh=with_auto_axes(settings.mesh),
        workers=settings.threads.workers,
        ahead=settings.threads.ahead,
    )
    checkpoints = settings.checkpoints
    if checkpoints is not None and checkpoints.resume and not data.resumes:
        raise TypeError(
            "`examples` is an iterator without a state, which a run cannot resume from a "
            "checkpoint. Pass a function that returns a new iterator, such as a generator function "
            "itself; an iterable; or a source with `state_dict` and `load_state_dict`. "
            "`Checkpoints(..., resume=False)` saves without ever resuming."
        )
    return data


def plan_run(settings: RunSettings, state: TrainState, data: Batches, printer: Printer) -> Plan:
    """Returns the given plan, after a check that it fits the state, or else plans the step.

    Before that, it prints what is trained on which data, and searches the best mesh if the settings
    ask for it. The data moves to the mesh of the plan.
    """
    training, plan = settings.training, settings.plan
    is_given = isinstance(plan, Plan)
    printer.describe_run(
        state, data, settings.evaluation, training.compute_dtype, plans=not is_given
    )
    if settings.chooses_mesh:
        # Imported where it is used, so that importing redcoast stays fast.
        from ..dryrun._job import Job
        from ..dryrun._mesh_search import auto_mesh

        if data.is_split:
            raise ValueError(
                "With `split_by_host`, the mesh determines which examples each process reads. "
                'Pass a mesh instead of "auto".'
            )
        # The search needs the shapes of a batch, so the data has the default mesh until here.
        job = Job(state, data.spec, training, settings.overrides, settings.memory)
        data.mesh = auto_mesh(job, quiet=printer.quiet)
    if training.accumulate > 1 and data.per_batch:
        refuse_per_batch(training.accumulate)
    if is_given:
        if settings.overrides:
            raise ValueError("`plan` already contains its overrides; leave `overrides` out.")
        if settings.memory not in (None, "auto"):
            raise ValueError(
                "`plan` already says what is recomputed; leave `memory` out, or pass it to "
                "`plan_step`."
            )
        plan = with_auto_plan(plan)
        # A plan of a file may be of another model.
        check_plan_fits(plan, state)
        return plan
    note = "Raised while the step was planned, before the first step."
    with noting(note):
        is_flat = data.has_single_integers
    if is_flat:
        note += (
            " Each example is a single integer. Of a flat array of tokens, pass windows: "
            "`redcoast.token_windows(tokens, length)`."
        )
    with noting(note):
        planned = plan_training(
            training,
            state,
            data.spec,
            data.mesh,
            overrides=settings.overrides,
            memory=settings.memory,
        )
        check_step(planned, training, state, data.spec)
    return planned


def check_plan_fits(plan: Plan, state: TrainState) -> None:
    """Raises `ValueError` unless a plan is for a tree like the state."""
    # By path, since a plan of a file has a tree of its own.
    planned, arrays = leaf_paths(plan.shardings, NamedSharding), leaf_paths(state, ARRAYS)
    if other := sorted(set(planned) ^ set(arrays)):
        raise ValueError(
            f"`plan` is not for this state: only one of them has {several(other, 3)}. Plan the "
            "`TrainState` of this model and optimizer, as `plan_step` does."
        )
    for path, x in arrays.items():
        try:
            planned[path].shard_shape(x.shape)
        except ValueError as error:
            raise ValueError(f"`plan` does not fit {path}, of shape {x.shape}: {error}") from error


def complete_evaluation(
    evaluation: Evaluation | None,
    collate_fn: CollateFn | None,
    loss_fn: LossFn,
    batch_size: int | None,
) -> Evaluation | None:
    """Fills in the missing functions of an evaluation with the functions of the training."""
    if evaluation is None:
        return None
    check_kind("evaluation", evaluation, Evaluation, KIND)
    examples = evaluation.examples
    if batch_size is None and evaluation.batch_size is None:
        examples = OwnBatches(examples)
    return replace(
        evaluation,
        examples=examples,
        collate_fn=evaluation.collate_fn or collate_fn,
        loss_fn=evaluation.loss_fn or loss_fn,
        batch_size=evaluation.batch_size or batch_size,
    )


def restore_or_create(
    checkpointer: Checkpointer,
    plan: Plan,
    abstract: TrainState,
    create: Callable[[PyTree], TrainState],
) -> tuple[TrainState, JSONObject | None]:
    """The state of the newest checkpoint, and what was saved with it; or a new one, and `None`."""
    restored = checkpointer.restore(abstract, plan.shardings)
    if restored is None:
        return create(plan.shardings), None
    return restored.state, restored.data


def place_data(
    data: Batches,
    state: TrainState,
    saved: JSONObject | None,
    checkpoints: Checkpoints | None,
) -> None:
    """Continues the data where the state does; `saved` is what a checkpoint has of it."""
    # A state that is passed on has seen examples, which are not read again.
    data.set_state({"step": int(state.step), **(saved or {})}, key=state.key)
    if saved is None and (nothing := nothing_left(data, has_directory=False)):
        warn(nothing)  # also if nothing is printed
    if checkpoints is not None:
        data.recognise_examples(saved or {})


def warn_of_resumption(
    settings: RunSettings,
    model_or_state: PyTree,
    key: PRNGKeyArray | None,
    abstract: TrainState,
    restored: TrainState,
    data: Batches,
    *,
    quiet: bool,
) -> None:
    """Warns if a run that is resumed has no steps left, or if its call has other hyperparameters or
    another key than its checkpoint.

    `abstract` is the state that a new run would have begun with.
    """
    nothing = nothing_left(data, has_directory=True)
    if nothing and quiet and is_main():  # otherwise it is printed
        logger.warning("%s", nothing)
    # Hyperparameters are a part of the optimizer's state, so a checkpoint brings its own.
    before = constant_hyperparameters(restored.opt_state)
    if before:
        if isinstance(model_or_state, TrainState):
            now = constant_hyperparameters(model_or_state.opt_state)
        else:
            trained = abstract_trainable(abstract.model, settings.training.trainable)
            now = initial_hyperparameters(settings.training.optimizer, trained)
        changed = [name for name in before if now.get(name, before[name]) != before[name]]
        if changed and is_main():
            logger.warning(
                "The run goes on with %s, from its checkpoint, and not with %s: the values of "
                "`optax.inject_hyperparams` are saved with the state. Choose another directory for "
                "a new run. To go on with other values, load the state, change them with "
                "`eqx.tree_at`, and pass the state to `fit` with another directory.",
                several([f"{name}={before[name]:g}" for name in changed]),
                several([f"{now[name]:g}" for name in changed]),
            )
    if key is None:
        return
    if is_init_fn(model_or_state):
        _, key = split_key_of_run(key)
    same = np.array_equal(jax.random.key_data(key), jax.random.key_data(restored.key))
    if not same and is_main():
        logger.warning(
            "The run goes on with the key of its checkpoint, and not with `key`, so the order of "
            "the examples and the random numbers are those that it began with. Choose another "
            "directory for a run with another key."
        )


def warn_of_settings(
    settings: RunSettings, functions: dict[str, str], saved: JSONObject, restored: TrainState
) -> None:
    """Warns if a run that is resumed has other settings or functions than those that its checkpoint
    was saved with, so that its results are not those of an uninterrupted run.

    `functions` are the checksums of functions at the start of this run.
    """
    now = settings.of_results
    before = saved.get(SETTINGS, now)  # checkpoints of version 0.1.0 have none
    changed = [name for name in now if name in before and before[name] != now[name]]
    if changed and is_main():
        logger.warning(
            "The run has %s, and had %s up to step %d, where it is resumed. It goes on with the "
            "next examples, but its results are not those of a run without an interruption. "
            "Choose another directory for a new run.",
            several([f"{name}={now[name]}" for name in changed]),
            several([f"{name}={before.get(name)}" for name in changed]),
            int(restored.step),
        )
    before = saved.get(FUNCTIONS, functions)
    others = [f"`{name}`" for name in functions if before.get(name) != functions[name]]
    if others and is_main():
        logger.warning(
            "The run goes on with another %s than up to step %d, where it is resumed: functions, "
            "numbers, such as a learning rate, or the versions of libraries have changed. "
            "Its results are not those of a run without an interruption. Choose another directory "
            "for a new run.",
            *(several(others), int(restored.step)),
        )


def prepare_evaluation(
    settings: RunSettings, plan: Plan, state: TrainState, data: Batches
) -> CompiledEvaluation | None:
    """The compiled evaluation of a run, after one batch was evaluated.

    So a mistake in it shows before an epoch is spent. Raises `ValueError` if a metric that decides
    something is none of the evaluation's.
    """
    evaluation, training = settings.evaluation, settings.training
    if evaluation is None:
        check_named_metrics(settings, [])
        return None
    compiled = compile_evaluation(evaluation, plan, compute_dtype=training.compute_dtype)
    # With the threads of the run, whose own loading pauses while it is evaluated.
    compiled = replace(compiled, threads=settings.threads)
    with noting("Raised in the evaluation of one batch before the first step."):
        check_mean(evaluation, training, plan, state.model, data)
        # Mistakes in `metric_fn` show now, and not after the first epoch.
        names = compiled.rehearse(state.model, state.key)
    check_named_metrics(settings, names)
    return compiled


def check_named_metrics(settings: RunSettings, names: list[str]) -> None:
    """Raises `ValueError` if a metric that decides something is none of the evaluation's."""
    early_stopping, checkpoints = settings.early_stopping, settings.checkpoints
    needed: dict[str, str | None] = {}
    if early_stopping is not None:
        needed["EarlyStopping(metric=...)"] = early_stopping.metric
    if checkpoints is not None and checkpoints.best:
        needed["Checkpoints(best=...)"] = checkpoints.metric
    have = ", ".join(names) or "none, because there is no `evaluation`"
    for argument, metric in needed.items():
        if metric is not None and metric not in names:
            raise ValueError(
                f"`{argument.replace('...', repr(metric))}` is not a metric of the evaluation, "
                f"which has {have}."
            )
