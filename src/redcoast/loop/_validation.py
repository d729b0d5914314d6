"""Evaluation inside the training loop: on the loss, and through predictions on metrics."""

import contextlib
import dataclasses
import itertools
import logging
from collections.abc import Callable
from typing import Any

import numpy as np
from jax.sharding import Mesh
from jaxtyping import PRNGKeyArray, PyTree

from ..core._errors import check_functions, noting
from ..data._collate import CollateFn
from ..data._loading import ordered_batches
from ..data._sources import by_epoch, fetch
from ..distributed._heartbeat import doing
from ..distributed._kv_store import decide, is_main
from ..sharding import Plan
from ..train._loss import LossFn
from ..train._predict import PredictFn
from ._evaluate import (
    OutputFn,
    compile_evaluation,
    compile_prediction,
    run_evaluation,
    run_prediction,
    try_evaluation,
)

logger = logging.getLogger("redcoast")

MetricFn = Callable[[list[Any], list[Any]], dict[str, float]]


@dataclasses.dataclass(frozen=True)
class Validation:
    """Evaluates a model on held-out examples; compiled once for the whole run."""

    examples: Any
    collate_fn: CollateFn
    batch_size: int
    mesh: Mesh
    evaluation: Callable[..., Any]
    prediction: Callable[..., Any] | None
    output_fn: OutputFn | None
    metric_fn: MetricFn | None

    def __call__(
        self, model: PyTree, key: PRNGKeyArray, *, rehearsal: bool = False
    ) -> dict[str, float]:
        """The metrics, as `eval/<name>`. A rehearsal takes one batch: of the loss, the first that
        has any weight, since without one no evaluation could succeed."""
        with contextlib.closing(self._batches(None)) as drawn:
            if rehearsal:
                metrics = try_evaluation(self.evaluation, model, drawn, key)
            else:
                metrics = run_evaluation(self.evaluation, model, drawn, key, strict=False)
        if metrics.get("weight", 1.0) == 0:
            logger.warning("The `eval_examples` have a total `weight` of 0: their means are NaN.")
        if self.prediction is not None and self.metric_fn is not None:
            count = 1 if rehearsal else None
            metrics |= self._compared(self.prediction, self.metric_fn, model, key, count, metrics)
        return {f"eval/{name}": value for name, value in metrics.items()}

    def _compared(
        self,
        prediction: Callable[..., Any],
        metric_fn: MetricFn,
        model: PyTree,
        key: PRNGKeyArray,
        batches: int | None,
        taken: dict[str, float],
    ) -> dict[str, float]:
        """What `metric_fn` says of predictions, which process 0 alone is given."""
        drawn = self._batches(batches)
        output_fn, gather = self.output_fn, "first"
        found = run_prediction(prediction, model, drawn, output_fn, self.mesh, key, gather=gather)
        outputs = [output for _, output in found]
        metrics: dict[str, float] = {}
        if is_main():
            examples = fetch(self.examples, list(range(len(outputs))))
            with noting("Raised by `metric_fn`, or in what it calls."), doing("`metric_fn`"):
                metrics = _check_metrics(metric_fn(examples, outputs), taken)
        return decide("the metrics of an evaluation", metrics)

    def _batches(self, count: int | None) -> Any:
        drawn = ordered_batches(
            self.examples,
            self.collate_fn,
            batch_size=self.batch_size,
            mesh=self.mesh,
            name="eval_examples",
        )
        return drawn if count is None else itertools.islice(drawn, count)


def make_validation(
    examples: Any,
    *,
    collate_fn: CollateFn,
    loss_fn: LossFn,
    predict_fn: PredictFn | None,
    output_fn: OutputFn | None,
    metric_fn: MetricFn | None,
    batch_size: int,
    plan: Plan,
    mesh: Mesh,
    compute_dtype: Any,
) -> Validation | None:
    """What `fit` evaluates with; nothing if there are no examples to evaluate on."""
    given = {"predict_fn": predict_fn, "output_fn": output_fn, "metric_fn": metric_fn}
    check_functions(**{name: fn for name, fn in given.items() if fn is not None})
    if metric_fn is not None and predict_fn is None:
        raise ValueError("`metric_fn` compares predictions with examples; pass `predict_fn` too.")
    if output_fn is not None and metric_fn is None:
        raise ValueError("`output_fn` makes what `metric_fn` is given; pass `metric_fn` too.")
    if examples is None:
        if metric_fn is not None:
            raise ValueError("`metric_fn` needs examples; pass `eval_examples` too.")
        return None
    of_epoch, _ = by_epoch(examples, name="eval_examples")
    examples = of_epoch(0)
    shardings = plan.shardings.model
    evaluation = compile_evaluation(plan.constrain(loss_fn), shardings, mesh, compute_dtype)
    prediction = None
    if predict_fn is not None and metric_fn is not None:
        planned = plan.constrain(predict_fn)
        prediction = compile_prediction(planned, shardings, mesh, compute_dtype, gather="first")
    return Validation(
        examples, collate_fn, batch_size, mesh, evaluation, prediction, output_fn, metric_fn
    )


def _check_metrics(found: Any, taken: dict[str, float]) -> dict[str, float]:
    if not isinstance(found, dict):
        raise TypeError(
            f"`metric_fn` returned {type(found).__name__}. It must return a dict of numbers."
        )
    for name, value in found.items():
        if name in taken:
            raise ValueError(
                f"`metric_fn` returned a metric called {name!r}, which `loss_fn` reports already. "
                "Give it another name."
            )
        if np.ndim(value) or np.asarray(value).dtype.kind not in "buif":
            raise ValueError(
                f"`metric_fn` returned {value!r} for {name!r}. Each metric must be one number."
            )
    return {name: float(value) for name, value in found.items()}
