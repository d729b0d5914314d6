"""Why a step was skipped: which gradients, parameters and examples are not finite.

It is found out when a run stops for it, by computing the gradient once more, so that the training
step pays nothing.
"""

import functools as ft
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import PyTree

from ..checkpoint._policy import Checkpoints, newest_checkpoint
from ..core._errors import listed
from ..core._pytree import partition_trainable
from ..data._batches import Batches
from ..sharding import Plan
from ..tracking._metrics import MetricsReader
from ..train._compile import compile_call, microbatches
from ..train._loss import LossFn
from ..train._step import TrainState, global_norm, loss_and_grads, loss_of_params
from ._steps import Step

MOST = 5  # names in a sentence


def check_finite(
    done: Step,
    reader: MetricsReader,
    data: Batches,
    diagnose: Callable[[Step], "NotFinite"],
    *,
    trained: bool,
    checkpoints: Checkpoints | None,
) -> None:
    """Ends a run whose steps are skipped, and says why, given the last step.

    `diagnose` finds what is NaN or infinite in a step; `trained` is whether any step of this run
    was applied.
    """
    failure = reader.failure(done.number)
    if failure is None:
        return
    indices, words = data.examples_of(done.batch)
    try:
        why = sentences(diagnose(done), indices, trained=trained)
    except Exception as error:  # there may be no memory for it
        why = f"(Where it arises could not be found out: {type(error).__name__}.)"
    last = newest_checkpoint(checkpoints)
    raise failure(reader.complaint(done.number, f"{why} {words}", last))


class NotFinite(NamedTuple):
    """What is not finite, by path."""

    state: dict[str, int]  # how many values of an array
    grads: dict[str, bool]  # whether the norm of a gradient is not
    batch: dict[str, Any]  # which rows of an array


def diagnose_step(done: Step, *, batch_size: int, accumulate: int, **options: Any) -> "NotFinite":
    """Finds what is NaN or infinite in a step, in as many microbatches as it was computed in."""
    batch = done.batch
    count = microbatches(batch.rows, batch_size=batch_size, accumulate=accumulate)
    return find_not_finite(done.state, batch.arrays, accumulate=count, **options)


def find_not_finite(
    state: TrainState,
    batch: PyTree,
    plan: Plan,
    loss_fn: LossFn,
    *,
    accumulate: int,
    compute_dtype: Any,
    trainable: PyTree,
) -> NotFinite:
    """Looks at a step that was skipped, given the state behind it and its batch."""
    options = {"accumulate": accumulate, "compute_dtype": compute_dtype, "trainable": trainable}
    find = ft.partial(_find, loss_fn=loss_fn, **options)
    assert isinstance(plan.mesh, Mesh)
    flags = jax.device_get(compile_call(find, plan.shardings, plan.mesh)(state, batch))
    params, _ = partition_trainable(state.model, trainable)
    paths = _floating(state), _floating(params, "model"), _floating(batch)
    return NotFinite(
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
    # A skipped step moves the state on in nothing but its number.
    key = jax.random.fold_in(state.key, state.step - 1)
    _, grads = loss_and_grads(loss_of, *part(state.model), batch, key, accumulate)
    found = (
        [jnp.sum(_wrong(path, x)) for path, x in _floating(state).items()],
        [~jnp.isfinite(global_norm([g])) for g in _floating(grads).values()],
        [_rows(x) for x in _floating(batch).values()],
    )
    # Whole on each device, so that each process can read it.
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
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            found["/".join(filter(None, [prefix, name]))] = leaf
    return found


def sentences(found: NotFinite, indices: list[int], *, trained: bool) -> str:
    """What was found, in words; `indices` are those of the batch's examples."""
    when = "" if trained else " before any step"
    parts = [
        f"{path} holds {_count(int(count), 'value')} that {_are(int(count))} not finite{when}."
        for path, count in list(found.state.items())[:MOST]
    ]
    for path, rows in found.batch.items():
        where = f"The batch's array {path}" if path else "The batch"
        examples = [indices[i] for i in np.flatnonzero(rows)]
        parts.append(
            f"{where} holds values that are not finite for the examples {listed(examples)}."
        )
    if found.grads:
        names = list(found.grads)
        more = f" and {len(names) - MOST} more" if len(names) > MOST else ""
        parts.append(f"The gradient is not finite for {', '.join(names[:MOST])}{more}.")
    elif not parts:
        parts.append("No single gradient, parameter or input is infinite or NaN by itself.")
    return " ".join(parts)


def _count(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _are(count: int) -> str:
    return "is" if count == 1 else "are"
