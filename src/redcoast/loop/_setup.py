"""The set-up of a run before its first step."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import optax
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding
from jaxtyping import PyTree

from ..checkpoint._policy import Checkpoints
from ..core._errors import check_kind, noting, several
from ..core._pytree import ARRAYS, leaf_paths
from ..core._trainable import partition_trainable
from ..data._batches import Batches
from ..data._collate import CollateFn
from ..data._loading import OwnBatches, Threads
from ..distributed._kv_store import is_main
from ..distributed._mesh import ambient_or_default
from ..sharding import Plan
from ..train._loss import LossFn
from ..train._plan_step import check_coupling, check_faults, plan_step
from ..train._step import (
    TrainState,
    refuse_per_batch,
)
from ._evaluation import KIND, CompiledEvaluation, Evaluation, compile_evaluation, warn_if_not_mean
from ._printing import nothing_left

logger = logging.getLogger("redcoast")


def mesh_of_run(mesh: Mesh | str | None, plan: Plan | str | None) -> Mesh:
    """Returns the mesh of `plan`, if it is a plan, or else `mesh`; by default and for `"auto"`, the
    ambient mesh or all devices."""
    if not isinstance(plan, Plan):
        if plan not in (None, "verify"):
            raise TypeError(
                f"`plan` is of type {type(plan).__name__}. It must be a `redcoast.Plan`, from "
                '`plan_step` or `load_plan`, or "verify".'
            )
        return ambient_or_default(None if mesh == "auto" else mesh)  # type: ignore[arg-type]
    if not isinstance(plan.mesh, Mesh):
        raise ValueError(
            "`plan` is for an abstract mesh. Load it over devices: `load_plan(path, state, mesh)`."
        )
    if mesh is not None and mesh != plan.mesh:
        raise ValueError(f"`plan` is for {plan.mesh}, and `mesh` is another one; leave `mesh` out.")
    return plan.mesh


def best_mesh(
    state: TrainState,
    optimizer: optax.GradientTransformation,
    data: Batches,
    overrides: Sequence[tuple[str, Any]],
    **options: Any,
) -> Mesh:
    """The best mesh of all devices for the step."""
    # Imported where it is used, so that importing redcoast stays fast.
    from ..dryrun._mesh_search import auto_mesh

    return auto_mesh(state, optimizer, data.spec, overrides=overrides, **options)


def plan_run(
    plan: Plan | str | None,
    state: TrainState,
    data: Batches,
    overrides: Sequence[tuple[str, Any]],
    *,
    loss_fn: LossFn,
    accumulate: int,
    compute_dtype: Any,
    trainable: PyTree,
) -> Plan:
    """Returns the given plan, after a check that it fits the state, or else plans the step."""
    if accumulate > 1 and data.per_batch:
        refuse_per_batch(accumulate)
    if isinstance(plan, Plan):
        if overrides:
            raise ValueError("`plan` already contains its overrides; leave `overrides` out.")
        check_plan_fits(plan, state)
        return plan
    step = {"accumulate": accumulate, "compute_dtype": compute_dtype}
    note = "Raised while the step was planned, before the first step."
    with noting(note):
        is_flat = data.has_single_integers
    if is_flat:
        note += (
            " Each example is a single integer. Of a flat array of tokens, pass windows: "
            "`redcoast.token_windows(tokens, length)`."
        )
    with noting(note):
        planned = {"trainable": trainable, "overrides": overrides, **step}
        found = plan_step(state, loss_fn, data.spec, data.mesh, **planned)
        check_coupling(found, state, data.spec, loss_fn=loss_fn, **step)
        check_faults(found, state, data.spec, loss_fn=loss_fn, **step)
    return found


def check_plan_fits(plan: Plan, state: TrainState) -> None:
    """Raises `ValueError` unless a plan is for a tree like the state."""
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


def refuse_traced(tree: PyTree) -> None:
    """Raises `TypeError` if arrays that a run starts from are tracers."""
    if any(isinstance(x, Tracer) for x in jax.tree.leaves(tree)):
        raise TypeError(
            "`fit` was called inside `jax.vmap`, `jax.jit` or `jax.grad`, but it is a loop over "
            "compiled steps. To train several models at once, pass `fit` one model with all "
            "of them, `eqx.filter_vmap(init_fn)(keys)`, and take the mean of their losses."
        )


def refuse_unresumable(data: Batches, checkpoints: Checkpoints | None) -> None:
    """Raises `TypeError` if a run with checkpoints has data that cannot be resumed."""
    if checkpoints is not None and checkpoints.resume and not data.resumes:
        raise TypeError(
            "`examples` is an iterator without a state, which a run cannot resume from a "
            "checkpoint. Pass a function that returns a new iterator, such as a generator function "
            "itself; an iterable; or a source with `state_dict` and `load_state_dict`. "
            "`Checkpoints(..., resume=False)` saves without ever resuming."
        )


def warn_of_restored(
    model_or_state: PyTree,
    new: TrainState,
    restored: TrainState,
    data: Batches,
    optimizer: optax.GradientTransformation,
    trainable: PyTree,
    quiet: bool,
) -> None:
    """Warns if a run that is resumed does nothing, or has other hyperparameters than its call.

    `new` is the abstract state that it would have begun with.
    """
    nothing = nothing_left(data, has_directory=True)
    if nothing and quiet and is_main():  # otherwise it is printed
        logger.warning("%s", nothing)
    before = constant_hyperparameters(restored.opt_state)
    if not before:
        return
    if isinstance(model_or_state, TrainState):
        now = constant_hyperparameters(model_or_state.opt_state)
    else:
        now = initial_hyperparameters(optimizer, partition_trainable(new.model, trainable)[0])
    changed = [name for name in before if now.get(name, before[name]) != before[name]]
    if changed and is_main():
        logger.warning(
            "The run goes on with %s, from its checkpoint, and not with %s: the values of "
            "`optax.inject_hyperparams` are saved with the state. Choose another directory for a "
            "new run. To go on with other values, load the state, change them with `eqx.tree_at`, "
            "and pass the state to `fit` with another directory.",
            several([f"{name}={before[name]:g}" for name in changed]),
            several([f"{now[name]:g}" for name in changed]),
        )


def refuse_split(data: Batches) -> None:
    """Raises `ValueError` if what each process reads depends on a mesh that is not yet chosen."""
    if data.is_split:
        raise ValueError(
            "With `split_by_host`, the mesh decides what each process reads. Pass a mesh instead "
            'of "auto".'
        )


def prepare_evaluation(
    evaluation: Evaluation | None,
    plan: Plan,
    state: TrainState,
    data: Batches,
    needed: Mapping[str, str | None],
    loss_fn: LossFn,
    compute_dtype: Any,
    threads: Threads,
) -> CompiledEvaluation | None:
    """Compiles the evaluation of a run, traces its loss and tries its metrics.

    So mistakes in it are found before the first epoch. `needed` are the metrics that arguments of
    the run refer to, by argument.
    """
    compiled, names = None, []
    if evaluation is not None:
        compiled = compile_evaluation(evaluation, plan, compute_dtype=compute_dtype)
        compiled = replace(compiled, threads=threads)
        with noting("Raised in the evaluation of one batch before the first step."):
            warn_if_not_mean(evaluation, plan, state.model, data, loss_fn, compute_dtype)
            names = compiled.rehearse(state.model, state.key)
    have = ", ".join(names) or "none, because there is no `evaluation`"
    for argument, metric in needed.items():
        if metric is not None and metric not in names:
            raise ValueError(
                f"`{argument.replace('...', repr(metric))}` is not a metric of the evaluation, "
                f"which has {have}."
            )
    return compiled
