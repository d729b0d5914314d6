"""Explains why a step was skipped: which gradients, parameters and examples are NaN or infinite.

If a run stops for this reason, the gradient is recomputed, and the loss is computed with
`jax.experimental.checkify`, which costs nothing in other steps. After the first skipped step of a
run, only the batch is examined.
"""

import functools as ft
import re
from collections.abc import Iterable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import PyTree

from ..checkpoint._policy import Checkpoints, newest_checkpoint
from ..core._errors import listed, several
from ..core._frames import own_line, warn
from ..core._pytree import ARRAYS, show_place, split
from ..core._trainable import partition_trainable
from ..data._batches import Batch, Batches
from ..data._loading import Loaded
from ..sharding import Plan
from ..tracking._metrics import COMMON_CAUSES
from ..train._compiled_call import CompiledCall
from ..train._lookups import find_lookups
from ..train._loss import ExaminedLoss
from ..train._microbatches import loss_and_grads, loss_of_params, microbatches
from ..train._state import TrainState
from ..train._step import global_norm
from ..train._training import Training
from ._calls import StepTaken

MOST = 5  # names in a sentence
_INDEX = re.compile(r"array of shape (\(.*?\)): index (-?\d+) is out of bounds .* size (\d+)")


def explain_step(
    training: Training,
    plan: Plan,
    data: Batches,
    checkpoints: Checkpoints | None,
    done: StepTaken,
    trained: bool,
) -> str:
    """Sentences about a skipped step: what is NaN or infinite, which examples, which checkpoint.

    `trained` is whether any step of the run changed the state.
    """
    indices, examples = data.examples_of(done.batch)
    try:
        nonfinite = find_nonfinite(done.state, done.batch, plan, data.batch_size, training)
        first = None
        # NaN in the inputs explains all that follows; otherwise the loss itself makes it.
        if not (nonfinite.state or nonfinite.batch):
            first = find_first(done.state, done.batch, plan, indices, training)
        why = sentences(nonfinite, indices, first, trained=trained)
    except Exception as error:  # there may be no memory for it
        why = f"(The cause could not be found: {type(error).__name__}.) {COMMON_CAUSES}"
    return f"{why} {examples} {newest_checkpoint(checkpoints)}"


def explain_batch(data: Batches, batch: Batch) -> str:
    """Sentences about the inputs of a skipped step, which are read once."""
    indices, examples = data.examples_of(batch)
    floating, integers = _floating(batch.arrays, of="batch"), _integers(batch)
    range_of = lambda x: jnp.stack([jnp.min(x), jnp.max(x)])
    inspect = jax.jit(
        lambda floating, integers: (
            jax.tree.map(_nonfinite_rows, floating),
            jax.tree.map(range_of, integers),
        ),
        out_shardings=NamedSharding(data.mesh, P()),
    )
    try:
        # Only flags and two numbers of each array leave the devices.
        rows, ranges = jax.device_get(inspect(floating, integers))
    except Exception as error:  # training goes on
        return f"(Its inputs could not be read: {type(error).__name__}.) {examples}"
    if inputs := _inputs(rows, indices):
        return " ".join(inputs)
    text = "No input is NaN or infinite."
    if ranges:
        within = [f"{path or 'the batch'} from {a} to {b}" for path, (a, b) in ranges.items()]
        text += f" The integers of the batch are {several(within, MOST)}."
    return f"{text} {examples}"


class Nonfinite(NamedTuple):
    """The arrays with NaN or infinite values, by path."""

    state: dict[str, int]  # the number of such values in an array
    grads: dict[str, bool]  # whether the norm of a gradient is
    batch: dict[str, PyTree]  # which rows of an array have such values


def find_nonfinite(
    state: TrainState, batch: Batch, plan: Plan, batch_size: int, training: Training
) -> Nonfinite:
    """Recomputes the gradient of a skipped step from the state after it, in the same parts."""
    # The same parts, since each has random numbers of its own.
    count = microbatches(batch.rows, batch_size=batch_size, accumulate=training.accumulate)
    part = ft.partial(partition_trainable, trainable=training.trainable)
    loss = ft.partial(
        loss_of_params,
        loss_fn=plan.constrain(training.loss_fn),
        compute_dtype=training.compute_dtype,
        part=part,
    )

    def find(state: TrainState, batch: PyTree) -> PyTree:
        params, rest = part(state.model)
        _, grads = loss_and_grads(loss, params, rest, batch, _key(state), count)
        flags = (
            {path: jnp.sum(_wrong(path, x)) for path, x in _floating(state).items()},
            jax.tree.map(lambda x: ~jnp.isfinite(global_norm([x])), _floating({"model": grads})),
            jax.tree.map(_nonfinite_rows, _floating(batch, of="batch")),
        )
        # Replicated, so that each process can read it.
        return jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x, P()), flags)

    # One program for all flags, compiled once, when the first step is skipped.
    flags = jax.device_get(CompiledCall(find, plan.shardings, plan.mesh)(state, batch.arrays))
    params = {"model": part(state.model)[0]}
    inspected = _floating(state), _floating(params), _floating(batch.arrays, of="batch")
    nonfinite: list[dict[str, PyTree]] = []
    for arrays, flag_of in zip(inspected, flags, strict=True):
        # In the order of the arrays, which the program's results do not have.
        nonfinite.append({path: flag_of[path] for path in arrays if np.any(flag_of[path])})
    return Nonfinite(*nonfinite)


def _key(state: TrainState) -> jax.Array:
    # A skipped step changes only the step number of the state.
    return jax.random.fold_in(state.key, state.step - 1)


def _wrong(path: str, x: jax.Array) -> jax.Array:
    # Some optimizers initialise a best value with infinity.
    if path.startswith("model"):
        return ~jnp.isfinite(x)
    return jnp.isnan(x)


def _nonfinite_rows(x: jax.Array) -> jax.Array:
    return jnp.any(~jnp.isfinite(x), axis=tuple(range(1, x.ndim)))  # (rows,)


def _floating(tree: PyTree, *, of: str = "") -> dict[str, PyTree]:
    """The floating arrays of a tree, by path; `of` is its name if it is data."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {show_place(path, of): x for path, x in leaves if eqx.is_inexact_array(x)}


def _integers(batch: Batch | Loaded) -> dict[str, PyTree]:
    """The integer arrays of a batch that have elements, by their places in it."""
    integers: dict[str, PyTree] = {}
    for path, x in jax.tree_util.tree_leaves_with_path(batch.arrays):
        if isinstance(x, ARRAYS) and jnp.issubdtype(x.dtype, jnp.integer) and x.size > 0:
            integers[show_place(path, "batch")] = x
    return integers


def sentences(nonfinite: Nonfinite, indices: list[int], first: str | None, *, trained: bool) -> str:
    """Describes the nonfinite values; `indices` are the indices of the batch's examples."""
    when = " before any step"
    if trained:
        when = ""
    parts: list[str] = []
    for path, count in list(nonfinite.state.items())[:MOST]:
        values = f"{count:,} values that are"
        if count == 1:
            values = "1 value that is"
        parts.append(f"{path} holds {values} NaN or infinite{when}.")
    parts += _inputs(nonfinite.batch, indices)
    if first:
        parts.append(first)
    # Behind the inputs and parameters, which make all gradients wrong.
    if nonfinite.grads:
        parts.append(f"The gradient is NaN or infinite for {several([*nonfinite.grads], MOST)}.")
    elif not parts:
        parts.append("No single gradient, parameter or input is infinite or NaN by itself.")
    if not (nonfinite.state or nonfinite.batch or first or trained):
        parts.append(COMMON_CAUSES)
    return " ".join(parts)


def _inputs(rows_of: dict[str, PyTree], indices: list[int]) -> list[str]:
    """Sentences about the arrays of the batch with rows that are NaN or infinite."""
    described: list[str] = []
    for path, rows in rows_of.items():
        if np.any(rows):
            described.append(_in_rows("NaN or infinite values", path, rows, indices))
    return described


def _in_rows(what: str, path: str, rows: PyTree, indices: list[int]) -> str:
    """A sentence about values in some rows of an array of the batch."""
    where = "The batch"
    if path:
        where = f"The batch's array {path}"
    positions = np.flatnonzero(rows).tolist()
    if np.size(rows) != len(indices):  # it does not have one row for each example
        return f"{where} holds {what} in the rows {listed(positions)}."
    return f"{where} holds {what} for the examples {listed([indices[i] for i in positions])}."


def find_first(
    state: TrainState, batch: Batch, plan: Plan, indices: list[int], training: Training
) -> str | None:
    """A sentence about the first operation of the loss that computes NaN, divides by zero or reads
    beyond an array; `None` if none is found."""
    from jax.experimental import checkify

    def loss(state: TrainState, batch: PyTree) -> jax.Array:
        return training.loss(state.model, batch, _key(state))

    kinds = checkify.nan_checks | checkify.div_checks | checkify.index_checks
    try:
        checked = CompiledCall(checkify.checkify(loss, errors=kinds), plan.shardings, plan.mesh)
        error: Any = checked(state, batch.arrays)[0].get_exception()
    except Exception:  # not every operation can be checked
        return None
    if error is None:
        return None
    # The line of the user's code, and not of a library that it calls.
    line = own_line(getattr(error, "traceback_info", None))
    at = ""
    if line:
        at = f", at {line}"
    text = str(error).strip()
    if match := _INDEX.search(text):
        shape, index, size = match[1], int(match[2]), int(match[3])
        return _beyond(batch, plan.mesh, index, size, shape, at, indices)
    if match := re.search(r"nan generated by primitive: ([\w-]+)", text):
        return f"The loss computes its first NaN with the operation `{match[1]}`{at}."
    return f"The loss computes a {text.splitlines()[0]}{at}."


def _beyond(
    batch: Batch | Loaded,
    mesh: Mesh | AbstractMesh,
    index: int,
    size: int,
    shape: object,
    at: str,
    indices: list[int],
    paths: tuple[str, ...] | None = None,
) -> str:
    """Sentences about an index that is out of range, and the examples with it."""
    holders = ""
    if index < 0:
        # JAX has added the size of the axis, since indices from -1 down count from the end.
        holders = _holders(batch, mesh, index - size, indices, paths)
        if holders:
            index -= size
    holders = holders or _holders(batch, mesh, index, indices, paths)
    masks = ""
    if index < 0:
        masks = (
            f" Mask the examples or tokens with {index}: replace it by 0 before the lookup, "
            "multiply their losses by 0, and divide by the number of the others, which the loss "
            'returns as `aux["weight"]`.'
        )
    return (
        f"The loss reads index {index} of an axis of size {size}, of an array of shape "
        f"{shape}{at}.{holders} Labels and tokens must be from 0 to {size - 1} there.{masks}"
    )


def _holders(
    batch: Batch | Loaded,
    mesh: Mesh | AbstractMesh,
    index: int,
    indices: list[int],
    paths: tuple[str, ...] | None,
) -> str:
    """A sentence about the examples that contain an integer, in the arrays at some paths or in
    any."""
    integers = _integers(batch)
    if paths is not None:
        integers = {path: x for path, x in integers.items() if path in paths}
    equal = lambda x: jnp.any(x == index, axis=tuple(range(1, x.ndim)))  # (rows,)
    find = jax.jit(lambda x: jax.tree.map(equal, x), out_shardings=NamedSharding(mesh, P()))
    for path, rows in jax.device_get(find(integers)).items():
        if np.any(rows):
            return f" {_in_rows(str(index), path, rows, indices)}"
    return ""


def warn_of_clamped_indices(
    training: Training, data: Batches, batch: Batch, state: TrainState
) -> None:
    """Warns if the loss indexes an array beyond its end, where JAX reads the last element."""
    integers = list(_integers(batch).values())
    sizes: set[int] = set()  # of the axes of the model
    for x in jax.tree.leaves(state.model):
        if isinstance(x, ARRAYS):
            sizes.update(x.shape)
    smallest = min(sizes - {0, 1}, default=0)
    if not integers or not smallest:
        return
    # A function of the module, which `jax.jit` knows again in a later run.
    largest = jax.jit(_largest, out_shardings=NamedSharding(data.mesh, P()))
    # If no integer is as large as an axis, no lookup is out of range, and the loss is not traced.
    if max(map(int, jax.device_get(largest(integers)))) < smallest:
        return
    indices, _ = data.examples_of(batch)
    dtype = training.compute_dtype
    loss = ExaminedLoss(training.loss_fn, state.model, batch.arrays, data.mesh, dtype)
    if sentence := _first_beyond(loss, batch, indices, training=True):
        warn(
            f"{sentence} JAX reads the last element instead, without an error. If they are masked, "
            "replace them by 0 before the lookup."
        )


def _largest(arrays: list[jax.Array]) -> list[jax.Array]:
    return list(map(jnp.max, arrays))


def warn_of_labels(loss: ExaminedLoss, batches: Iterable[Loaded]) -> None:
    """Warns about an index that is out of range in the batches of an evaluation."""
    for batch in batches:
        indices = list(range(batch.position - batch.rows, batch.position))
        loss = loss._replace(batch=batch.arrays)
        if sentence := _first_beyond(loss, batch, indices, training=False):
            warn(f"The loss of the evaluation is NaN. {sentence}")
            return


def _first_beyond(
    loss: ExaminedLoss, batch: Batch | Loaded, indices: list[int], *, training: bool
) -> str | None:
    """Sentences about the first index that is out of range; `None` if none is found.

    In training, only indices that read the last element matter, because others make the loss NaN.
    Negative indices count from the end, and a mask may exclude their results.
    """
    if not _integers(batch):
        return None
    try:
        lookups = find_lookups(loss, training=training)
        # A training step reports NaN itself; an evaluation asks why it is NaN.
        wanted = [axis.silent == training for axis in lookups.axes]
        if not any(wanted):
            return None
        ranges = jax.device_get(lookups.extremes(split(batch.arrays)[0]))
    except Exception:  # not every program can be read, and training goes on
        return None
    for axis, (low, high), is_wanted in zip(lookups.axes, ranges, wanted, strict=True):
        if not is_wanted:
            continue
        index = None
        if high >= axis.size:
            index = int(high)
        elif low < 0 and not training:
            index = int(low)
        if index is not None:
            at = ""
            if axis.where:
                at = f", at {axis.where}"
            read = index, axis.size, axis.shape, at
            return _beyond(batch, loss.mesh, *read, indices, axis.paths)
    return None
