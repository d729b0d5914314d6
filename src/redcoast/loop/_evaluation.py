"""Evaluation in a training loop: the loss on validation examples, and metrics of predictions."""

import contextlib
import dataclasses
import itertools
import logging
from collections.abc import Callable, Generator
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import PRNGKeyArray, PyTree

from ..core._axis_types import auto_ambient_mesh, on_auto_axes
from ..core._dtypes import has_numbers
from ..core._errors import check_functions, check_integer, check_kind, short_repr
from ..core._frames import hide_frames, hide_frames_of_init
from ..core._train_state import refuse_state
from ..core._user_functions import calling
from ..data._batches import Batches
from ..data._collate import CollateFn, check_batching
from ..data._loading import (
    USUAL_THREADS,
    Loaded,
    OwnBatches,
    Threads,
    chunks,
    count_in_epoch,
    first_rows,
    ordered_batches,
    repeatable,
)
from ..distributed._arrays import allowed_transfers
from ..distributed._heartbeat import doing
from ..distributed._kv_store import decide, is_main
from ..distributed._mesh import batch_shards
from ..sharding import Plan, with_auto_plan
from ..train._compiled_call import CompiledCall
from ..train._coupled import warn_if_not_mean
from ..train._loss import ExaminedLoss, LossFn
from ..train._precision import ComputeDtype, as_compute_dtype
from ..train._predict import PredictFn
from ..train._training import Training
from ._evaluate import (
    OutputFn,
    check_program,
    compile_loss,
    compile_prediction,
    run_evaluation,
    run_prediction,
    weighted_metrics,
)
from ._nonfinite import warn_of_labels

logger = logging.getLogger("redcoast")

_NAME = "Evaluation.examples"  # in messages
KIND = "a `redcoast.Evaluation`, such as `redcoast.Evaluation(validation_examples)`"
MetricFn = Callable[[list[Any], list[Any]], dict[str, float]]


@hide_frames_of_init
@dataclasses.dataclass(frozen=True)
class Evaluation:
    """The evaluations of a training loop: examples, metrics and interval.

    **Arguments:**

    - `examples`: as for [`redcoast.evaluate`][], except iterators, which can be read only once.
    - `every`: the number of steps between evaluations; by default `fit` evaluates at the end of
        each epoch. It always evaluates at the end of training.
    - `predict_fn`, `output_fn`: as for [`redcoast.predict_examples`][].
    - `metric_fn`: `metric_fn(examples, outputs)` compares examples with predictions, and returns a
        dict of numbers. It is only called in process 0.
    - `loss_fn`, `collate_fn`, `batch_size`: as for [`redcoast.evaluate`][]. In `fit`, they default
        to the arguments of `fit`, including `batch_size=None`. Pass a `loss_fn` if the training
        loss is not meaningful on validation examples.

    **Raises:**

    `TypeError` or `ValueError` if an argument is invalid, or needs another one that is missing.

    !!! Example

        ```python
        state = rc.fit(
            model, optimizer, examples,
            collate_fn=collate_fn, loss_fn=loss_fn, batch_size=32, epochs=3,
            evaluation=rc.Evaluation(test_examples, every=500),
        )
        ```
    """

    examples: Any
    _: dataclasses.KW_ONLY
    every: int | None = None
    predict_fn: PredictFn | None = None
    output_fn: OutputFn | None = None
    metric_fn: MetricFn | None = None
    loss_fn: LossFn | None = None
    collate_fn: CollateFn | None = None
    batch_size: int | None = None

    def __post_init__(self) -> None:
        names = ("predict_fn", "output_fn", "metric_fn", "loss_fn", "collate_fn")
        functions = {name: getattr(self, name) for name in names}
        check_functions(**{name: fn for name, fn in functions.items() if fn is not None})
        for name in ("every", "batch_size"):
            if getattr(self, name) is not None:
                check_integer(name, getattr(self, name))
        if self.metric_fn is not None and self.predict_fn is None:
            raise ValueError(
                "`metric_fn` compares predictions with examples; pass `predict_fn` too."
            )
        if self.metric_fn is None and (self.predict_fn or self.output_fn) is not None:
            name = "output_fn"
            if self.predict_fn is not None:
                name = "predict_fn"
            raise ValueError(
                f"`{name}` makes the outputs that `metric_fn` gets; pass `metric_fn` too."
            )


@dataclasses.dataclass(frozen=True)
class CompiledEvaluation:
    """The result of [`redcoast.compile_evaluation`][]."""

    evaluation: Evaluation
    mesh: Mesh
    mean_loss: CompiledCall | None
    prediction: CompiledCall | None
    threads: Threads = USUAL_THREADS
    compute_dtype: ComputeDtype = None

    @hide_frames
    def __call__(
        self,
        model: PyTree,
        key: PRNGKeyArray | None = None,
        *,
        advance: Callable[[], None] = lambda: None,
    ) -> dict[str, float]:
        """The metrics of a model; `advance` is called for each of the `batches`."""
        refuse_state(model, "CompiledEvaluation")
        model, metrics = on_auto_axes(model), {}
        with allowed_transfers(), auto_ambient_mesh():
            if self.mean_loss is not None:
                batches = self._batches(advance)
                # A run of many hours does not end because no example of an evaluation counts.
                metrics = run_evaluation(self.mean_loss, model, batches, key, strict=False)
                if metrics.get("weight", 1.0) == 0:
                    logger.warning(
                        "The evaluated examples have a total `weight` of 0: means are NaN."
                    )
            return metrics | self._compared(model, key, None, metrics, advance)

    @property
    def batches(self) -> int:
        """The number of batches that are computed; 0 if it is not known."""
        examples = count_in_epoch(self.evaluation.examples, _NAME)
        if examples is None or self.evaluation.batch_size is None:
            return 0
        # A last batch may be read in several parts.
        each = len([*chunks(examples, self.evaluation.batch_size, batch_shards(self.mesh))])
        return each * ((self.mean_loss is not None) + (self.prediction is not None))

    def rehearse(self, model: PyTree, key: PRNGKeyArray | None = None) -> list[str]:
        """Returns the names of the metrics. The loss is traced, and one batch is predicted."""
        if jax.process_count() > 1:
            programs = {"loss": self.mean_loss, "prediction": self.prediction}
            # One batch stands for all: its shapes and dtypes decide which program runs.
            with contextlib.closing(self._batches(count=1)) as batches:
                arrays = next(batches).arrays
            for name, program in programs.items():
                if program is not None:
                    name = f"the program of the evaluation's {name}"
                    check_program(name, program, model, arrays, key)
        names: list[str] = []
        if self.mean_loss is not None:
            with contextlib.closing(self._batches()) as batches:
                names = weighted_metrics(self.mean_loss, model, batches, key)
        return names + list(self._compared(model, key, 1, dict.fromkeys(names, 0.0)))

    def try_loss(self, model: PyTree, key: PRNGKeyArray | None = None) -> None:
        """Computes the loss of one batch."""
        if self.mean_loss is not None:
            with contextlib.closing(self._batches()) as batches:
                first = itertools.islice(batches, 1)
                run_evaluation(self.mean_loss, model, first, key, strict=False)

    def explain_nan(self, model: PyTree) -> None:
        """Warns about labels that are out of range, after the loss was NaN."""
        if self.evaluation.loss_fn is not None:
            loss = ExaminedLoss(self.evaluation.loss_fn, model, None, self.mesh, self.compute_dtype)
            with contextlib.closing(self._batches()) as batches:
                warn_of_labels(loss, batches)

    def _compared(
        self,
        model: PyTree,
        key: PRNGKeyArray | None,
        count: int | None,
        taken: dict[str, float],
        advance: Callable[[], None] = lambda: None,
    ) -> dict[str, float]:
        """Returns the result of `metric_fn` for the predictions of all batches, on all
        processes."""
        metric_fn, output_fn = self.evaluation.metric_fn, self.evaluation.output_fn
        if self.prediction is None or metric_fn is None:
            return {}
        called = (self.prediction, model, self._batches(advance, count), output_fn, key)
        # Empty in all processes but the first.
        outputs = [output for _, output in run_prediction(*called, gather="first")]
        metrics: dict[str, float] = {}
        # A metric of texts may take long, and needs no devices.
        if is_main():
            examples = first_rows(self.evaluation.examples, len(outputs), name=_NAME)
            arguments = {"examples": examples, "outputs": outputs}
            with calling("metric_fn", arguments), doing("`metric_fn`"):
                metrics = metric_fn(examples, outputs)
            metrics = _check_metrics(metrics, taken)
        # All processes get the same numbers, which decide when they stop and what they keep.
        return decide("the metrics of an evaluation", metrics)

    def _batches(
        self, advance: Callable[[], None] = lambda: None, count: int | None = None
    ) -> Generator[Loaded, None, None]:
        evaluation = self.evaluation
        loaded = ordered_batches(
            evaluation.examples,
            evaluation.collate_fn,
            batch_size=evaluation.batch_size,
            mesh=self.mesh,
            name=_NAME,
            threads=self.threads,
        )
        with contextlib.closing(loaded):
            for batch in itertools.islice(loaded, count):
                yield batch
                advance()


@hide_frames
def compile_evaluation(
    evaluation: Evaluation, plan: Plan, *, compute_dtype: Any = None
) -> CompiledEvaluation:
    """Compiles an evaluation for models that are sharded by a plan.

    The model is not moved, and each program is compiled once.

    **Arguments:**

    - `evaluation`: a [`redcoast.Evaluation`][] with `batch_size` and `loss_fn`, and with
        `collate_fn` unless the examples are stacked by default. Without a `loss_fn`, only the
        metrics of `metric_fn` are computed.
    - `plan`: the plan of a [`redcoast.TrainState`][] or of a model, over devices.
    - `compute_dtype`: as for [`redcoast.train_step`][].

    **Returns:**

    A function `(model, key=None) -> dict[str, float]`. It returns `loss` and the entries of `aux`,
    as [`redcoast.evaluate`][] does, and the metrics of `metric_fn`. All processes get the same
    result. If the examples have a total `weight` of 0, means are NaN, and a warning is logged.

    **Raises:**

    `ValueError` if there are no examples, or if a function that it needs is missing.

    !!! Example

        ```python
        evaluation = rc.Evaluation(
            test_examples, collate_fn=collate_fn, loss_fn=loss_fn, batch_size=32
        )
        metrics = rc.compile_evaluation(evaluation, plan)(state.model)
        ```
    """
    check_kind("evaluation", evaluation, Evaluation, KIND)
    check_kind("plan", plan, Plan, "a `redcoast.Plan`")
    if not isinstance(evaluation.examples, OwnBatches):
        if evaluation.batch_size is None:
            raise ValueError("An evaluation needs batches: pass `batch_size`.")
        collate_fn = check_batching(evaluation.collate_fn, evaluation.batch_size)
        evaluation = dataclasses.replace(evaluation, collate_fn=collate_fn)
    if evaluation.loss_fn is None and evaluation.metric_fn is None:
        raise ValueError("An evaluation needs a `loss_fn`, or `predict_fn` and `metric_fn`.")
    compute_dtype = as_compute_dtype(compute_dtype)
    plan = with_auto_plan(plan)
    assert isinstance(plan.mesh, Mesh)
    # Each evaluation reads them from the beginning.
    examples = repeatable(evaluation.examples, name=_NAME)
    mean_loss = prediction = None
    if evaluation.loss_fn is not None:
        mean_loss = compile_loss(evaluation.loss_fn, plan, compute_dtype)
    if evaluation.predict_fn is not None:
        prediction = compile_prediction(evaluation.predict_fn, plan, compute_dtype, gather="first")
    return CompiledEvaluation(
        dataclasses.replace(evaluation, examples=examples),
        plan.mesh,
        mean_loss,
        prediction,
        compute_dtype=compute_dtype,
    )


def check_mean(
    evaluation: Evaluation, training: Training, plan: Plan, model: PyTree, data: Batches
) -> None:
    """Warns if the loss is not a mean over examples and there are several batches.

    There is already a warning for the `loss_fn` of the training.
    """
    count = count_in_epoch(evaluation.examples, _NAME)
    size = evaluation.batch_size or data.batch_size
    if evaluation.loss_fn is None or (count is not None and count <= size):
        return
    # Another `collate_fn` makes other batches; nodes of graphs depend on each other, graphs do not.
    if evaluation.collate_fn is data.collate_fn and not data.per_batch:
        loss_fn = evaluation.loss_fn
        loss = ExaminedLoss(loss_fn, model, data.spec, plan.mesh, training.compute_dtype)
        # The training has warned of its own loss already.
        warn_if_not_mean(loss, size, of_loss=loss_fn is not training.loss_fn)


def _check_metrics(metrics: Any, taken: dict[str, float]) -> dict[str, float]:
    if not isinstance(metrics, dict):
        raise TypeError(
            f"`metric_fn` returned {type(metrics).__name__}. It must return a dict of numbers."
        )
    for name, value in metrics.items():
        if not isinstance(name, str):
            raise TypeError(f"`metric_fn` returned a metric named {name!r}. Names are strings.")
        if name in taken:
            raise ValueError(
                f"`metric_fn` returned a metric called {name!r}, which `loss_fn` reports already. "
                "Give it another name."
            )
        dtype = np.asarray(value).dtype
        if np.ndim(value) or dtype.kind == "c" or not has_numbers(dtype):
            raise ValueError(
                f"`metric_fn` returned {short_repr(value)} for {name!r}. Each metric must be one "
                "number."
            )
    # JSON has no numbers of NumPy.
    return {name: float(value) for name, value in metrics.items()}
