"""Evaluation and prediction over raw examples."""

import contextlib
import functools as ft
import math
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Set
from typing import Any, Literal, NamedTuple

import equinox as eqx
import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import PRNGKeyArray, PyTree

from ..core._axis_types import auto_ambient_mesh, on_auto_axes, with_auto_axes
from ..core._dtypes import tree_to_jax_dtypes
from ..core._errors import check_choice, check_functions, check_key, noting
from ..core._frames import hide_frames
from ..core._iterate import with_last
from ..core._owned import copied, held_elsewhere
from ..core._program_lines import describe_array
from ..core._pytree import show_place
from ..core._tracing import refuse_traced
from ..core._train_state import refuse_state
from ..core._user_functions import calling
from ..data._collate import CollateFn, check_batching
from ..data._loading import (
    Loaded,
    OwnBatches,
    Threads,
    checked_threads,
    count_in_epoch,
    ordered_batches,
    read_batches,
)
from ..data._sources import by_epoch, read_source
from ..data._streams import is_iterator, state_methods
from ..distributed._agreement import agree, agree_on_program, tree_listing
from ..distributed._arrays import allowed_transfers, own_rows, place_tree, put
from ..distributed._kv_store import is_main
from ..distributed._mesh import ambient_or_default, batch_sharding
from ..sharding import Plan, plan_shardings
from ..tracking._metrics import check_scalars
from ..train._compiled_call import CompiledCall
from ..train._coupled import warn_if_not_mean
from ..train._loss import ExaminedLoss, LossFn, evaluate_loss
from ..train._precision import ComputeDtype, as_compute_dtype
from ..train._predict import PredictFn, predict
from ..train._state import TrainState
from ._first_examples import first_examples
from ._stop import refuse_after_signal

OutputFn = Callable[[PyTree], list[Any]]
Gather = Literal["all", "first", "none"]


@hide_frames
def evaluate(
    model: PyTree,
    examples: Any,
    *,
    collate_fn: CollateFn | None = None,
    loss_fn: LossFn,
    batch_size: int | None,
    mesh: Mesh | None = None,
    key: PRNGKeyArray | None = None,
    compute_dtype: Any = None,
    workers: int = 2,
    ahead: int = 4,
) -> dict[str, float]:
    """Computes the mean loss and metrics over examples, with the model in inference mode.

    Every example counts exactly once, for any batch size. If the loss makes the examples of a batch
    depend on each other, as contrastive losses do, the result is the mean over batches of this
    size, and a warning is given.

    **Arguments:**

    - `model`: any PyTree, on one device or sharded.
    - `examples`: as for [`redcoast.fit`][], but read once and in order.
    - `collate_fn`: as for [`redcoast.fit`][]. If it has a parameter `rngs`, it is called with
        `rngs=None`, so that it does not augment.
    - `loss_fn`: as for [`redcoast.train_step`][].
    - `batch_size`: the number of examples in a batch, over all devices; `None` if the items of
        `examples` are batches already.
    - `mesh`: the devices to use; by default the ambient mesh, or all devices as `data`.
    - `key`: a JAX key, for losses that use random numbers; `jax.random.key(0)` by default.
    - `compute_dtype`: as for [`redcoast.train_step`][].
    - `workers`, `ahead`: as for [`redcoast.batches`][].

    **Returns:**

    A dict with `loss` and the entries of `aux`: means weighted by `aux["weight"]`, or else by the
    number of examples. If the loss returns `weight`, its value is the sum.

    **Raises:**

    `ValueError` or `TypeError` if there are no examples, or if a function returns something of the
    wrong kind. `RuntimeError` after a signal cut [`redcoast.fit`][] short in this process.

    !!! Example

        ```python
        metrics = rc.evaluate(
            model, test_examples, collate_fn=collate_fn, loss_fn=loss_fn, batch_size=64
        )
        ```
    """
    _check_call("evaluate", model, key, instead="loss_fn")
    check_functions(loss_fn=loss_fn)
    compute_dtype = as_compute_dtype(compute_dtype)
    loading = _loading(examples, collate_fn, batch_size, workers, ahead)
    mesh = with_auto_axes(ambient_or_default(mesh))
    model, key = on_auto_axes((tree_to_jax_dtypes(model, "the model"), key))
    evaluated = ft.partial(_evaluation, loss_fn=loss_fn, compute_dtype=compute_dtype)

    def loss(*args: PyTree) -> tuple[PyTree, dict[str, PyTree]]:
        means, _ = evaluated(*args)
        return means.pop("loss"), means

    with allowed_transfers(), auto_ambient_mesh():
        first, batches = _read(loading, model, mesh, key)
        # The key of a state is on the devices of its run, which may be other devices.
        key = put(_default(key), NamedSharding(mesh, P()))
        plan = _plan(loss, model, mesh, first, key)
        count = count_in_epoch(loading.examples)
        # The mean over one batch is the mean over its examples, whatever they depend on. Nodes of
        # graphs depend on each other, and graphs need not.
        is_mean = count is not None and count <= (loading.batch_size or 0)
        if not is_mean and not first.per_batch:
            traced = ExaminedLoss(loss_fn, model, first.arrays, plan.mesh, compute_dtype)
            # Nothing is planned for one device.
            warn_if_not_mean(traced, first.rows, plan.report.program_or_none)
        evaluation = compile_loss(loss_fn, plan, compute_dtype)
        placed = place_tree(model, plan.shardings)
        check_program("the program of the loss", evaluation, placed, first.arrays, key)
        return run_evaluation(evaluation, placed, batches, key)


def _check_call(name: str, model: PyTree, key: PRNGKeyArray | None, *, instead: str) -> None:
    """Raises if the public function `name` cannot run here, or with this model and key. In a trace,
    `instead` can be called."""
    refuse_after_signal(name, trains=False)
    refuse_state(model, name)
    refuse_traced((model, key), name, f"It compiles its own program: call `{instead}` there.")
    if key is not None:
        check_key(key)


class _Loading(NamedTuple):
    """The examples, and how they are collated."""

    examples: Any
    collate_fn: CollateFn | None
    batch_size: int | None
    threads: Threads


def _loading(
    examples: Any, collate_fn: CollateFn | None, batch_size: int | None, workers: int, ahead: int
) -> _Loading:
    """Checks the arguments about the data. A stream is opened, and can be read once."""
    collate_fn = check_batching(collate_fn, batch_size)
    threads = checked_threads(workers, ahead)
    if batch_size is None:
        stream = read_batches(OwnBatches(examples))
        return _Loading(OwnBatches(stream), collate_fn, None, threads)
    if is_iterator(examples) and state_methods(examples) is not None:
        by_epoch(examples)  # it may have no end
    return _Loading(read_source(examples, epochs=1), collate_fn, batch_size, threads)


@hide_frames
def predict_examples(
    model: PyTree,
    examples: Any,
    *,
    collate_fn: CollateFn | None = None,
    predict_fn: PredictFn,
    batch_size: int | None,
    output_fn: OutputFn | None = None,
    mesh: Mesh | None = None,
    key: PRNGKeyArray | None = None,
    compute_dtype: Any = None,
    gather: Gather = "all",
    workers: int = 2,
    ahead: int = 4,
) -> list[Any]:
    """Computes predictions for examples, in order, with the model in inference mode.

    **Arguments:**

    - `model`, `examples`, `collate_fn`, `batch_size`, `mesh`, `key`, `compute_dtype`, `workers`,
        `ahead`: as for [`redcoast.evaluate`][].
    - `predict_fn`: `predict_fn(model, batch, key)`, as for [`redcoast.predict`][].
    - `output_fn`: `output_fn(predictions)`, run on the host, converts the predictions of a batch
        (NumPy arrays) to a list with one entry for each example, such as decoded text. By default,
        the entries are the rows of the predictions.
    - `gather`: which of several processes get the predictions. `"all"`: all processes. `"first"`:
        process 0; the others get an empty list. `"none"`: each process gets the predictions of its
        own devices, as pairs `(index, entry)`.

    **Returns:**

    A list with one entry for each example, in order.

    **Raises:**

    `ValueError` or `TypeError` if there are no examples, or if a function returns something of the
    wrong kind. `RuntimeError` after a signal cut [`redcoast.fit`][] short in this process.

    !!! Example

        ```python
        labels = rc.predict_examples(
            model, images, collate_fn=collate_fn, predict_fn=predict_fn, batch_size=64
        )
        ```
    """
    _check_call("predict_examples", model, key, instead="redcoast.predict")
    check_functions(predict_fn=predict_fn)
    if output_fn is not None:
        check_functions(output_fn=output_fn)
    check_choice("gather", gather, ("all", "first", "none"))
    compute_dtype = as_compute_dtype(compute_dtype)
    loading = _loading(examples, collate_fn, batch_size, workers, ahead)
    mesh = with_auto_axes(ambient_or_default(mesh))
    model, key = on_auto_axes((tree_to_jax_dtypes(model, "the model"), key))
    predicted = ft.partial(predict, predict_fn=predict_fn, compute_dtype=compute_dtype)
    with allowed_transfers(), auto_ambient_mesh():
        first, batches = _read(loading, model, mesh, key)
        key = put(_default(key), NamedSharding(mesh, P()))
        plan = _plan(predicted, model, mesh, first, key)
        prediction = compile_prediction(predict_fn, plan, compute_dtype, gather=gather)
        placed = place_tree(model, plan.shardings)
        check_program("the program of the prediction", prediction, placed, first.arrays, key)
        outputs = run_prediction(prediction, placed, batches, output_fn, key, gather=gather)
        if gather == "none":
            return list(outputs)
        return [entry for _, entry in outputs]


def _read(
    loading: _Loading, model: PyTree, mesh: Mesh, key: PRNGKeyArray | None
) -> tuple[Loaded, Generator[Loaded, None, None]]:
    """The first batch, and all batches.

    Raises `ValueError` if there is none, or if processes have different models, keys or examples.
    """
    examples, collate_fn, batch_size, threads = loading
    if jax.process_count() > 1:  # they would wait for each other forever
        values = {"`batch_size`": batch_size, "the number of `examples`": count_in_epoch(examples)}
        values |= {"`mesh`": dict(mesh.shape), "`key`": describe_array(_default(key))}
        examined = first_examples(examples, collate_fn, batch_size=batch_size, mesh=mesh)
        agree(values, {"the model": tree_listing(model), "the first examples": examined})
    batches = ordered_batches(
        examples, collate_fn, batch_size=batch_size, mesh=mesh, threads=threads
    )
    first = next(batches, None)
    if first is None:
        raise ValueError("`examples` gave no examples. Pass at least one.")

    def first_and_rest() -> Generator[Loaded, None, None]:
        # Its threads end with this generator, also if it is not read to the end.
        with contextlib.closing(batches):
            yield first
            yield from batches

    return first, first_and_rest()


def _plan(
    program: Callable[..., PyTree], model: PyTree, mesh: Mesh, first: Loaded, key: PRNGKeyArray
) -> Plan:
    if mesh.size == 1:
        # One device needs no trace of the program to be planned for.
        return plan_shardings(model, mesh)
    return plan_shardings(model, mesh, fn=program, args=(first.arrays, key))


def _default(key: PRNGKeyArray | None) -> PRNGKeyArray:
    if key is None:
        return jax.random.key(0)
    return key


def check_program(
    name: str, program: CompiledCall, model: PyTree, batch: PyTree, key: PRNGKeyArray | None
) -> None:
    """Raises `ValueError` on all processes if their programs of `(model, batch, key)` differ."""
    if jax.process_count() > 1:
        agree_on_program(name, program.trace(model, batch, _default(key)).jaxpr, program.mesh)


def compile_loss(loss_fn: LossFn, plan: Plan, compute_dtype: ComputeDtype) -> CompiledCall:
    """A compiled `(model, batch, key) -> (means, weight)`."""
    program = ft.partial(
        _evaluation, loss_fn=plan.constrain(loss_fn), compute_dtype=as_compute_dtype(compute_dtype)
    )
    return CompiledCall(program, _model_shardings(plan), plan.mesh, reuse_for=loss_fn)


def compile_prediction(
    predict_fn: PredictFn, plan: Plan, compute_dtype: ComputeDtype, *, gather: Gather
) -> CompiledCall:
    """A compiled `(model, batch, key) -> predictions`."""
    program: Callable[..., PyTree] = ft.partial(
        predict,
        predict_fn=plan.constrain(predict_fn),
        compute_dtype=as_compute_dtype(compute_dtype),
    )
    if jax.process_count() > 1:
        assert isinstance(plan.mesh, Mesh)
        program = ft.partial(_prediction_to_read, program, over=plan.mesh, gather=gather)
    return CompiledCall(program, _model_shardings(plan), plan.mesh, reuse_for=predict_fn)


def _model_shardings(plan: Plan) -> PyTree[NamedSharding]:
    """The shardings of the model, of a plan for a model or for a whole state."""
    if isinstance(plan.shardings, TrainState):
        return plan.shardings.model
    return plan.shardings


def _prediction_to_read(
    program: Callable[..., PyTree],
    model: PyTree,
    batch: PyTree,
    key: PRNGKeyArray,
    *,
    over: Mesh,
    gather: Gather,
) -> PyTree:
    """Predictions that processes can read: replicated, or sharded if each keeps its own."""

    def constrain(x: jax.Array) -> jax.Array:
        sharding = NamedSharding(over, P())
        if gather == "none":
            sharding = batch_sharding(over, x.shape[0])
        return jax.lax.with_sharding_constraint(x, sharding)

    return jax.tree.map(constrain, program(model, batch, key))


def _evaluation(
    model: PyTree, batch: PyTree, key: PRNGKeyArray, *, loss_fn: LossFn, compute_dtype: ComputeDtype
) -> tuple[dict[str, PyTree], PyTree]:
    model = eqx.nn.inference_mode(model)
    loss, aux, weight, _ = evaluate_loss(loss_fn, model, batch, key, compute_dtype)
    check_scalars(aux)
    return {**aux, "loss": loss}, weight


def run_evaluation(
    evaluation: Callable[..., PyTree],
    model: PyTree,
    batches: Iterable[Loaded],
    key: PRNGKeyArray | None,
    *,
    strict: bool = True,
) -> dict[str, float]:
    """Weighted means over batches, summed on the host in double precision.

    If the total weight is 0, that is an error, or, if not `strict`, the means are NaN.
    """
    sums: dict[str, float] = {}
    total = 0.0
    with contextlib.closing(_one_behind(evaluation, model, batches, key)) as results:
        for rows, result in results:
            # While the devices compute the next batch.
            means, weight = jax.device_get(result)
            if "weight" not in means:
                weight = rows  # all examples count the same
            weight = float(weight)
            total += weight
            for name, mean in means.items():
                share = 0.0
                if name == "weight":
                    share = weight
                elif weight:  # the mean over nothing may be NaN
                    share = weight * float(mean)
                sums[name] = sums.get(name, 0.0) + share
    if total == 0 and strict:
        raise ValueError(
            "The examples have a total `weight` of 0, so there is nothing to take a mean of."
        )
    divisor = total
    if total == 0:
        divisor = math.nan  # the mean over nothing
    for name in sums:
        if name != "weight":
            sums[name] /= divisor
    return sums


def weighted_metrics(
    evaluation: CompiledCall, model: PyTree, batches: Iterable[Loaded], key: PRNGKeyArray | None
) -> list[str]:
    """Returns the names of the metrics, after a check that a batch has a weight.

    The evaluation is traced. Only the weights are computed, up to the first one that is not 0.

    Raises `ValueError` if all weights are 0.
    """
    rows = 0
    for batch in batches:
        (means, _), weight = evaluation.last(model, batch.arrays, _default(key))
        # A rehearsal ends with the first batch in which anything counts.
        if "weight" not in means or float(weight):
            return list(means)
        rows += batch.rows
    raise ValueError(
        f"The {rows} examples of the evaluation have a total `weight` of 0, so there is nothing to "
        "take a mean of. Pass examples that count, or a `loss_fn` that gives them a weight."
    )


def run_prediction(
    prediction: CompiledCall,
    model: PyTree,
    batches: Iterable[Loaded],
    output_fn: OutputFn | None,
    key: PRNGKeyArray | None = None,
    *,
    gather: Gather,
) -> Iterator[tuple[int, Any]]:
    """Yields the outputs that this process gets, one for each example, with their indices."""
    begin = 0
    # The other processes only take part in the computation.
    reads = gather != "first" or is_main()
    # In one process, all rows are its own, and predictions may have any sharding.
    reads_own_part = gather == "none" and jax.process_count() > 1
    read = jax.device_get
    if reads_own_part:
        read = _own_part
    with contextlib.closing(_one_behind(prediction, model, batches, key)) as results:
        for rows, predictions in results:
            # The examples whose predictions this process reads.
            own = list(range(rows))
            if gather == "none":
                own = own_rows(prediction.mesh, rows)
            with noting(f"Raised for the examples with indices {begin} to {begin + rows - 1}."):
                if reads_own_part:
                    _check_rows(predictions, rows, "With several processes and `gather='none'`")
                outputs = []
                if reads:
                    outputs = _outputs(read(predictions), output_fn, len(own))
            yield from ((begin + i, output) for i, output in zip(own, outputs, strict=reads))
            begin += rows


def _own_part(predictions: PyTree) -> PyTree:
    """The rows that the devices of this process hold."""

    def part(x: jax.Array) -> np.ndarray:
        # Devices along `model` hold the same rows, which count once.
        rows_at = {shard.index[0].start or 0: shard.data for shard in x.addressable_shards}
        return np.concatenate([np.asarray(rows_at[start]) for start in sorted(rows_at)])

    return jax.tree.map(part, predictions)


def _check_rows(predictions: PyTree, rows: int, when: str) -> None:
    """Raises `ValueError` unless each array of the predictions has one row for each example."""
    for path, x in jax.tree_util.tree_leaves_with_path(predictions):
        if x.shape[0] != rows:
            where = ""
            if path:
                where = f" at {show_place(path, 'prediction')}"
            raise ValueError(
                f"`predict_fn` returned an array of shape {x.shape}{where} for {rows} examples. "
                f"{when}, each prediction must have one row for each example. Return such rows, or "
                "pass an `output_fn` that makes a list with one entry for each example."
            )


def _outputs(predictions: PyTree, output_fn: OutputFn | None, rows: int) -> list[Any]:
    if output_fn is None:
        _check_rows(predictions, rows, "Without `output_fn`")
        return [jax.tree.map(lambda x, i=i: x[i], predictions) for i in range(rows)]
    with calling("output_fn", {"predictions": predictions}):
        # In a list, so that one array is looked through like several.
        returned = [output_fn(predictions)]
    if any(held_elsewhere(returned, known=jax.tree.leaves(predictions))):
        returned = copied(returned)  # `output_fn` may write into it for the next batch
    outputs = returned[0]
    # A dict would be read as its keys, and a text as its letters.
    has_keys_or_letters = isinstance(outputs, Mapping | Set | str | bytes)
    has_entries = hasattr(outputs, "__len__") and not has_keys_or_letters
    if not has_entries or len(outputs) != rows:
        what = f"an object of type {type(outputs).__name__}"
        if has_entries:
            what = f"{len(outputs)} entries"
        raise ValueError(
            f"`output_fn` was given the predictions of {rows} examples and returned {what}. It "
            "must return a list with one entry for each example."
        )
    return list(outputs)


def _one_behind(
    call: Callable[..., PyTree], model: PyTree, batches: Iterable[Loaded], key: PRNGKeyArray | None
) -> Generator[tuple[int, PyTree], None, None]:
    """Yields rows and results, each after the next one was dispatched."""
    key = _default(key)
    # A generator, which dispatches a batch when the one before is asked for.
    results = (
        (batch.rows, call(model, batch.arrays, jax.random.fold_in(key, i)))
        for i, batch in enumerate(batches)
    )
    with contextlib.ExitStack() as stack:
        if isinstance(batches, Generator):  # its threads end here, though an error refers to it
            stack.callback(batches.close)
        yield from (result for result, _ in with_last(results))
