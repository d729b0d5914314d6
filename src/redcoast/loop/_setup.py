"""What a run does before its first step."""

import functools as ft
import inspect
import logging
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import optax
from jaxtyping import PRNGKeyArray, PyTree

from ..checkpoint._policy import Checkpoints
from ..core._donation import refuse_deleted
from ..core._errors import noting
from ..core._pytree import partition_trainable
from ..data._batches import Batches
from ..distributed._arrays import place_tree, put
from ..distributed._kv_store import is_main
from ..distributed._mesh import batch_shards
from ..sharding import Plan
from ..tracking._run import RunInfo, code_version, say
from ..train._optimizer import refuse_optimizer_states, refuse_per_example
from ..train._step import TrainState, create_split, init_state, state_of
from ._validation import Validation

logger = logging.getLogger("redcoast")


def starting_state(
    model_or_state: PyTree,
    optimizer: optax.GradientTransformation,
    key: PRNGKeyArray | None,
    trainable: PyTree,
) -> tuple[TrainState, PRNGKeyArray, Callable[[PyTree], TrainState]]:
    """The abstract state of the run, its key, and a function that makes it with given shardings."""
    if is_init_fn(model_or_state):
        key = jax.random.key(0) if key is None else key
        create = ft.partial(init_state, model_or_state, optimizer, key=key, trainable=trainable)
        return eqx.filter_eval_shape(create), key, lambda shardings: create(shardings=shardings)
    if isinstance(model_or_state, TrainState):
        if key is not None:
            raise ValueError("The `TrainState` that `fit` was given has a `key`; leave `key` out.")
        refuse_deleted(
            model_or_state,
            "The `TrainState` that `fit` was given",
            "Pass the state that the last step, or `fit`, returned.",
        )
        refuse_per_example(model_or_state.opt_state)
        refuse_optimizer_states(partition_trainable(model_or_state.model, trainable)[0], TrainState)
        place = lambda shardings: place_tree(model_or_state, shardings)
        return model_or_state, model_or_state.key, place
    refuse_deleted(
        model_or_state,
        "The model that `fit` was given",
        "Pass the model of the state that the last step returned, `state.model`.",
    )
    key = jax.random.key(0) if key is None else key
    create = lambda m, k: state_of(m, optimizer, key=k, trainable=trainable)

    def make(shardings: PyTree) -> TrainState:
        # A copy: training donates its state, and the caller's model stays theirs.
        model = place_tree(model_or_state, shardings.model, copy=True)
        return create_split(create, model, put(key, shardings.key), shardings=shardings)

    return eqx.filter_eval_shape(create, model_or_state, key), key, make


def is_init_fn(model: Any) -> bool:
    """Whether a model is given as a function of a key; modules can be called, too, and are not."""
    plain = inspect.isfunction(model) or inspect.ismethod(model)
    return plain or (isinstance(model, ft.partial) and not isinstance(model, jax.tree_util.Partial))


def check_eval_every(eval_every: int | None, validation: Validation | None) -> None:
    if eval_every is not None and validation is None:
        raise ValueError("`eval_every` needs something to evaluate on; pass `eval_examples` too.")
    if eval_every is not None and eval_every < 1:
        raise ValueError(f"`eval_every` is {eval_every}. Evaluate every step at the most.")


def rehearse(
    validation: Validation | None, state: TrainState, checkpoints: Checkpoints | None
) -> None:
    """Evaluates one batch, so that a mistake there shows before an epoch is spent."""
    names = []
    if validation is not None:
        with noting("Raised in the evaluation of one batch before the first step."):
            metrics = validation(state.model, state.key, rehearsal=True)
        names = [name.removeprefix("eval/") for name in metrics]
    if checkpoints and checkpoints.best is not None and checkpoints.metric not in names:
        raise ValueError(
            f"`Checkpoints(best={checkpoints.best!r})` is no metric of the evaluation, which has "
            f"{', '.join(names) or 'none, for want of `eval_examples`'}."
        )


def warn_of_repeats(data: Batches) -> None:
    """Warns of batches that must hold some examples several times."""
    if data.length is None or data.rows_left is None or not is_main():
        return
    if min(data.batch_size, data.rows_left) > data.length:
        logger.warning(
            "`batch_size=%d` is more than the %d examples that there are: a batch spans epochs, "
            "and holds examples several times. Pass at most %d, or more examples.",
            *(data.batch_size, data.length, data.length),
        )


def announce(plan: Plan, data: Batches, *, resumed: bool) -> None:
    """Prints how the model is sharded, and what a user should know about the run."""
    say(str(plan))
    shards, batch_size, rows = batch_shards(plan.mesh), data.batch_size, data.rows_left or 0
    if resumed:
        say(f"Resumed at step {data.step}.")
    if data.steps is not None and data.step >= data.steps:
        say(f"Nothing is left to train: {data.step} of {data.steps} steps are done.")
    if rows % batch_size % shards and batch_size % shards == 0:
        say(
            f"The last batch, of {rows % batch_size}, does not divide over data x fsdp = {shards} "
            "devices, so that each computes all of it."
        )
    if batch_size % shards:
        say(
            f"A batch of {batch_size} does not divide over data x fsdp = {shards} devices, so that "
            f"each computes all of it. A multiple of {shards} would be split."
        )


def run_info(
    checkpoints: Checkpoints | None, plan: Plan, data: Batches, *, resumed: bool
) -> RunInfo:
    """What loggers are told about the run before its first step."""
    directory = checkpoints.path.parent if checkpoints else None
    config = {
        "batch_size": data.batch_size,
        "mesh": dict(plan.mesh.shape),
        "versions": code_version(),
    }
    return RunInfo(
        directory=directory,
        resumed=resumed,
        plan=str(plan),
        config=config,
        step=data.step,
        steps=data.steps,
    )
