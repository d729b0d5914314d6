"""Why a step was skipped: which gradients, parameters and examples are NaN or infinite.

It is found by computing the gradient again when a run stops for it, at no cost to training steps.
When a run goes on after its first skipped step, only the batch is looked at.
"""

import functools as ft
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import PyTree

from ..checkpoint._policy import Checkpoints, newest_checkpoint
from ..core._errors import listed, several
from ..core._pytree import ARRAYS, leaf_paths, partition_trainable, show_path
from ..data._batches import Batch, Batches
from ..sharding import Plan
from ..tracking._metrics import COMMON_CAUSES
from ..train._compile import compile_call, microbatches
from ..train._loss import LossFn
from ..train._step import TrainState, global_norm, loss_and_grads, loss_of_params
from ._first_nonfinite import find_first
from ._steps import Step

MOST = 5  # names in a sentence


def explain_step(
    plan: Plan,
    data: Batches,
    checkpoints: Checkpoints | None,
    done: Step,
    trained: bool,
    **options: Any,
) -> str:
    """Sentences about a skipped step: what is NaN or infinite, which examples, which checkpoint.

    `trained` is whether any step of the run changed the state; `options` are those of
    `find_nonfinite`.
    """
    indices, examples = data.examples_of(done.batch)
    try:
        found = find_nonfinite(done.state, done.batch, plan, data.batch_size, **options)
        first = None
        if not (found.state or found.batch):
            given = options["loss_fn"], options["compute_dtype"]
            first = find_first(done.state, done.batch, plan, indices, *given)
        why = sentences(found, indices, first, trained=trained)
    except Exception as error:  # there may be no memory for it
        why = f"(The cause could not be found: {type(error).__name__}.) {COMMON_CAUSES}"
    return f"{why} {examples} {newest_checkpoint(checkpoints)}"


def explain_batch(data: Batches, batch: Batch) -> str:
    """Sentences about the inputs of a skipped step, at the cost of looking at them once."""
    indices, examples = data.examples_of(batch)
    ranges = {path: x for path, x in leaf_paths(batch.arrays, ARRAYS).items() if _is_integer(x)}
    look = jax.jit(
        lambda floating, integers: (
            jax.tree.map(_rows, floating),
            jax.tree.map(lambda x: jnp.stack([jnp.min(x), jnp.max(x)]), integers),
        ),
        out_shardings=NamedSharding(data.mesh, P()),
    )
    try:
        rows, ranges = jax.device_get(look(_floating(batch.arrays), ranges))
    except Exception as error:  # training goes on
        return f"(Its inputs could not be read: {type(error).__name__}.) {examples}"
    if found := _inputs({path: x for path, x in rows.items() if np.any(x)}, indices):
        return " ".join(found)
    within = [f"{path or 'the batch'} from {low} to {high}" for path, (low, high) in ranges.items()]
    integers = f" The integers of the batch are {several(within, MOST)}." if within else ""
    return f"No input is NaN or infinite.{integers} {examples}"


class Nonfinite(NamedTuple):
    """What is NaN or infinite, by path."""

    state: dict[str, int]  # the number of such values in an array
    grads: dict[str, bool]  # whether the norm of a gradient is
    batch: dict[str, Any]  # which rows of an array have such values


def find_nonfinite(
    state: TrainState,
    batch: Batch,
    plan: Plan,
    batch_size: int,
    *,
    loss_fn: LossFn,
    accumulate: int,
    compute_dtype: Any,
    trainable: PyTree,
) -> Nonfinite:
    """Recomputes the gradient of a skipped step from the state after it, in the same parts."""
    count = microbatches(batch.rows, batch_size=batch_size, accumulate=accumulate)
    options = {"accumulate": count, "compute_dtype": compute_dtype, "trainable": trainable}
    find = ft.partial(_find, loss_fn=plan.constrain(loss_fn), **options)
    assert isinstance(plan.mesh, Mesh)
    flags = jax.device_get(compile_call(find, plan.shardings, plan.mesh)(state, batch.arrays))
    params, _ = partition_trainable(state.model, trainable)
    paths = _floating(state), _floating(params, "model"), _floating(batch.arrays)
    return Nonfinite(
        *(
            {path: x for path, x in zip(part, found, strict=True) if np.any(x)}
            for part, found in zip(paths, flags, strict=True)
        )
    )


def _find(
    state: TrainState,
    batch: PyTree,
    *,
    loss_fn: LossFn,
    accumulate: int,
    compute_dtype: Any,
    trainable: PyTree,
) -> tuple[list[jax.Array], list[jax.Array], list[jax.Array]]:
    part = ft.partial(partition_trainable, trainable=trainable)
    loss_of = ft.partial(loss_of_params, loss_fn=loss_fn, compute_dtype=compute_dtype, part=part)
    # A skipped step changes nothing of the state but its number.
    key = jax.random.fold_in(state.key, state.step - 1)
    _, grads = loss_and_grads(loss_of, *part(state.model), batch, key, accumulate)
    found = (
        [jnp.sum(_wrong(path, x)) for path, x in _floating(state).items()],
        [~jnp.isfinite(global_norm([g])) for g in _floating(grads).values()],
        [_rows(x) for x in _floating(batch).values()],
    )
    # Replicated, so that each process can read it.
    return jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x, P()), found)


def _wrong(path: str, x: jax.Array) -> jax.Array:
    # Optimizers begin with infinity where they look for the best so far.
    return ~jnp.isfinite(x) if path.startswith("model") else jnp.isnan(x)


def _rows(x: jax.Array) -> jax.Array:
    return jnp.any(~jnp.isfinite(x), axis=tuple(range(1, x.ndim)))


def _floating(tree: PyTree, prefix: str = "") -> dict[str, Any]:
    """The floating arrays of a tree, by path."""
    found = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if eqx.is_inexact_array(leaf):
            name = show_path(path)
            found["/".join(filter(None, [prefix, name]))] = leaf
    return found


def sentences(
    found: Nonfinite, indices: list[int], first: str | None = None, *, trained: bool
) -> str:
    """Describes what was found; `indices` are those of the batch's examples."""
    when = "" if trained else " before any step"
    parts = [
        f"{path} holds {_count(int(count), 'value')} that {_are(int(count))} NaN or infinite{when}."
        for path, count in list(found.state.items())[:MOST]
    ]
    parts += _inputs(found.batch, indices)
    parts += [first] if first else []
    if found.grads:
        names = list(found.grads)
        parts.append(f"The gradient is NaN or infinite for {several(names, MOST)}.")
    elif not parts:
        parts.append("No single gradient, parameter or input is infinite or NaN by itself.")
    if not (found.state or found.batch or first or trained):
        parts.append(COMMON_CAUSES)
    return " ".join(parts)


def _inputs(found: dict[str, Any], indices: list[int]) -> list[str]:
    sentences = []
    for path, rows in found.items():
        where = f"The batch's array {path}" if path else "The batch"
        examples = [indices[i] for i in np.flatnonzero(rows)]
        sentences.append(
            f"{where} holds NaN or infinite values for the examples {listed(examples)}."
        )
    return sentences


def _is_integer(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.integer) and x.size > 0


def _count(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _are(count: int) -> str:
    return "is" if count == 1 else "are"
