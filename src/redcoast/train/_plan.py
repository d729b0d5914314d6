"""What a run starts from, and the plan of it."""

from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import numpy as np
import optax
from jax.sharding import Mesh
from jaxtyping import PRNGKeyArray, PyTree

from ..core._donation import refuse_deleted
from ..core._pytree import partition_trainable
from ..core._tracing import abstract_key
from ..data._batches import CollateFn, by_epoch, collate, count_examples, fetch, is_stream
from ..data._permutation import example_generators
from ..distributed._arrays import own_rows, place_tree, put
from ..distributed._mesh import batch_shards
from ..sharding import Hardware, Plan, plan_shardings
from ._coupled import find_coupled, warn_of_batches, warn_of_microbatches
from ._loss import LossFn, evaluate_loss
from ._optimizer import refuse_optimizer_states, refuse_per_example
from ._step import TrainState, create_split, state_of


def starting_state(
    model_or_state: PyTree,
    optimizer: optax.GradientTransformation,
    key: PRNGKeyArray | None,
    mesh: Mesh,
    trainable: PyTree,
) -> tuple[TrainState, Callable[[PyTree], TrainState]]:
    """The abstract state of the run, and how to make it, split as given shardings say."""
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
        return model_or_state, lambda shardings: place_tree(model_or_state, shardings)
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

    return eqx.filter_eval_shape(create, model_or_state, key), make


def first_batch(examples: Any, collate_fn: CollateFn, batch_size: int, mesh: Mesh) -> PyTree:
    """What this process holds of a batch of the run, on the host; a stream is left as it was."""
    own = own_rows(mesh, batch_size)
    if is_stream(examples):
        state = examples.get_state()
        found = [x for _, x in zip(range(batch_size), examples, strict=False)]
        examples.set_state(state)
        if not found:
            raise ValueError(
                "`examples` is a stream that gave no example. Pass one at its beginning."
            )
        found = [found[i % len(found)] for i in own]
    else:
        of_epoch, length = by_epoch(examples)
        found = fetch(of_epoch(0), [i % length for i in own])
    indices = own
    rngs = lambda: example_generators([0] * len(found), indices, np.zeros(2, np.uint64))
    return collate(collate_fn, found, indices, rngs)


def _microbatch(own: PyTree, batch_size: int, accumulate: int) -> PyTree:
    """The shapes of one of `accumulate` parts of a batch; of the batch, if it does not divide."""
    rows = batch_size // (1 if accumulate < 1 or batch_size % accumulate else accumulate)

    def part(x: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((rows, *x.shape[1:]), jax.dtypes.canonicalize_dtype(x.dtype))

    return jax.tree.map(part, own)


def plan_run(
    abstract: TrainState,
    draw: Callable[[], PyTree],
    mesh: Mesh,
    *,
    batch_size: int,
    accumulate: int,
    loss_fn: LossFn,
    compute_dtype: Any,
    trainable: PyTree,
    overrides: Sequence[tuple[str, Any]],
    hardware: Hardware | None = None,
) -> Plan:
    """The plan of a run's state, read off its loss on batches like those that `draw` makes."""
    if mesh.size == 1:
        return plan_shardings(abstract, mesh, overrides=overrides)
    batch = _microbatch(draw(), batch_size, accumulate)
    return plan_shardings(
        abstract,
        mesh,
        fn=_loss(loss_fn, compute_dtype),
        args=(batch, abstract_key()),
        trainable=trainable,
        overrides=overrides,
        hardware=hardware,
    )


def check_coupling(
    plan: Plan,
    state: TrainState,
    draw: Callable[[], PyTree],
    *,
    batch_size: int,
    accumulate: int,
    loss_fn: LossFn,
    compute_dtype: Any,
    eval_examples: Any,
) -> None:
    """Warns if examples that depend on each other are taken in parts."""
    several = (count_examples(eval_examples, "eval_examples") or 0) > batch_size
    parts = max(accumulate, 1)  # less is refused by the step
    if parts == 1 and not several:
        return
    # The plan was read off one microbatch, and a single example depends on no other.
    if plan.report.get("coupled") == [] and batch_size // parts > 1:
        return
    assert isinstance(plan.mesh, Mesh)
    batch = _microbatch(draw(), batch_size, 1)
    given = (loss_fn, state.model, batch, plan.mesh, compute_dtype)
    coupled = find_coupled(*given, training=True)
    if parts > 1:
        warn_of_microbatches(coupled, batch_size, accumulate)
    if several and coupled:
        warn_of_batches(find_coupled(*given, training=False), batch_size)


def verify_run(
    plan: Plan,
    state: TrainState,
    draw: Callable[[], PyTree],
    *,
    loss_fn: LossFn,
    compute_dtype: Any,
) -> None:
    """Compares the planned program with one device's on as few examples as are split."""
    if jax.process_count() > 1:
        raise ValueError(
            "`verify` compares with one device in one process. Verify the mesh there, with as many "
            "emulated devices (`emulate_devices`), and leave `verify` out here."
        )
    rows = batch_shards(plan.mesh) * plan.mesh.shape["model"]
    few = jax.tree.map(lambda x: x[:rows], draw())
    low = compute_dtype is not None and jax.numpy.finfo(compute_dtype).bits < 32
    plan.verify(
        _loss(loss_fn, compute_dtype), state.model, few, state.key, tolerance=0.05 if low else 1e-3
    )


def _loss(loss_fn: LossFn, compute_dtype: Any) -> Callable[..., Any]:
    return lambda model, batch, key: evaluate_loss(loss_fn, model, batch, key, compute_dtype).loss
