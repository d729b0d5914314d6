"""Early stopping by a metric of the evaluations, and the best state of a run."""

import dataclasses
import math
from collections.abc import Callable, Hashable, Mapping
from types import NoneType
from typing import Literal

import jax
import numpy as np
from jaxtyping import PyTree

from ..checkpoint._policy import Checkpoints, best_metrics, default_mode
from ..checkpoint._tree import load_checkpoint
from ..core._errors import check_choice, check_integer, check_kind
from ..core._frames import hide_frames_of_init
from ..core._pytree import join, split
from ..core._read_json import JSONObject
from ._evaluation import Evaluation
from ._stop import ASKED, StopRequest

SAVED = "early_stopping"  # the name of the counters in the data of a checkpoint


@hide_frames_of_init
@dataclasses.dataclass(frozen=True)
class EarlyStopping:
    """Stops [`redcoast.fit`][] when a metric of its evaluations no longer improves.

    `fit` then returns the state with the best value of the metric, and not the last state, also if
    the run ends without stopping early. With checkpoints, this is the best checkpoint; without
    them, a copy of the best state is kept in host memory.

    **Arguments:**

    - `patience`: the number of consecutive evaluations without improvement after which to stop.
    - `metric`: the name of the metric: `"loss"`, or a key of the dict that `metric_fn` returns. By
        default, the metric of `Checkpoints(best=...)`, or else the loss.
    - `mode`: `"min"` if a smaller value is better, `"max"` if a larger one is. By default, the mode
        of `Checkpoints(best=...)`, or `"min"` for the loss. It is required for other metrics.

    **Raises:**

    `TypeError` or `ValueError` if an argument has the wrong type or an impossible value.

    !!! Example

        ```python
        state = rc.fit(
            model, optimizer, examples,
            collate_fn=collate_fn, loss_fn=loss_fn, batch_size=32, epochs=3,
            evaluation=rc.Evaluation(test_examples),
            early_stopping=rc.EarlyStopping(patience=2),
        )
        ```
    """

    patience: int
    _: dataclasses.KW_ONLY
    metric: str | None = None
    mode: Literal["min", "max"] | None = None

    def __post_init__(self) -> None:
        check_integer("EarlyStopping.patience", self.patience)
        words = "the name of a metric"
        check_kind("EarlyStopping.metric", self.metric, (str, NoneType), words)
        if self.mode is not None:
            check_choice("EarlyStopping.mode", self.mode, ("min", "max"))


def complete_early_stopping(
    early_stopping: EarlyStopping | None,
    evaluation: Evaluation | None,
    checkpoints: Checkpoints | None,
) -> tuple[EarlyStopping | None, Checkpoints | None]:
    """Early stopping with its metric and mode, and checkpoints that keep its best state."""
    if early_stopping is None:
        return None, checkpoints
    words = "a `redcoast.EarlyStopping`, such as `redcoast.EarlyStopping(patience=3)`"
    check_kind("early_stopping", early_stopping, EarlyStopping, words)
    if evaluation is None:
        raise ValueError(
            "`early_stopping` needs a metric of evaluations: pass `evaluation` too, such as "
            "`redcoast.Evaluation(validation_examples)`."
        )
    best = checkpoints
    if checkpoints is None or checkpoints.best is None:
        best = None
    metric = (early_stopping.metric or "loss").removeprefix("eval/")
    if best and not early_stopping.metric:
        metric = best.metric  # what decides which checkpoint is kept also decides when to stop
    mode = early_stopping.mode
    if mode is None and best and best.metric == metric:
        mode = best.mode
    if mode is None:
        mode = default_mode(metric, f"EarlyStopping(metric={early_stopping.metric!r})")
    # The state that is returned is the best by early stopping, and must be among those that are
    # kept.
    if best and (best.metric, best.mode) != (metric, mode):
        raise ValueError(
            f"`early_stopping` stops by the {mode}imum of {metric!r}, and `checkpoints` keep the "
            f"{best.mode}imum of {best.metric!r}. The state that is returned is from a "
            "checkpoint, so they must be the same: leave out one of them."
        )
    if checkpoints is not None:
        checkpoints = dataclasses.replace(checkpoints, best=metric, mode=mode)
    return dataclasses.replace(early_stopping, metric=metric, mode=mode), checkpoints


def best_so_far(
    early_stopping: EarlyStopping | None,
    checkpoints: Checkpoints | None,
    saved: JSONObject | None,
) -> "BestSoFar | None":
    """The best evaluation so far, with what a checkpoint has of it; `None` without early
    stopping."""
    if early_stopping is None:
        return None
    best = BestSoFar(early_stopping, checkpoints)
    if saved is not None:
        best.restore(saved.get(SAVED))
    return best


def reason_of_end(
    stopping: StopRequest, best: "BestSoFar | None", step: int, *, ended: bool
) -> str:
    """Why a run ended after a step, if no signal stopped it; `ended` if it is not to be resumed."""
    if best is not None and ended:
        return best.describe(step)
    if stopping.level != ASKED:
        return ""
    return stopping.reason


class BestSoFar:
    """The best evaluation of a run, and how many evaluations have followed it.

    - `step`: the step of the best evaluation; `None` before it, or if all were NaN
        or infinite.
    - `value`: its value of the metric; `None` likewise.
    - `since`: the number of evaluations after it.
    """

    def __init__(self, early_stopping: EarlyStopping, checkpoints: Checkpoints | None):
        self.rule, self._checkpoints = early_stopping, checkpoints
        self.step: int | None = None
        self.value: float | None = None
        self.since = 0
        self._copy: Callable[[], PyTree] | None = None  # of the best state

    @property
    def is_over(self) -> bool:
        """Whether the run has to stop."""
        return self.since >= self.rule.patience

    @property
    def saved(self) -> JSONObject:
        """The counters, as values that JSON supports."""
        return {"step": self.step, "value": self.value, "since": self.since}

    def restore(self, saved: JSONObject | None) -> None:
        """Restores the counters of a checkpoint.

        If it has none, because the run did not use early stopping before, the best checkpoint
        counts.
        """
        if saved is not None:
            self.step, self.value, self.since = saved["step"], saved["value"], saved["since"]
            return
        # A run that began without early stopping has its metrics in the checkpoints alone.
        values = {}
        if self._checkpoints is not None:
            values = best_metrics(self._checkpoints)
        for step, value in sorted(values.items()):
            if self._is_better(value):
                self.step, self.value = step, value

    def see(self, metrics: Mapping[str, float], step: int, state: PyTree) -> None:
        """Counts an evaluation of a state."""
        value = metrics[self.rule.metric or ""]
        if not self._is_better(value):
            self.since += 1
            return
        self.step, self.value, self.since = step, value, 0
        # Without checkpoints, the best state is kept in the memory of the host.
        if self._checkpoints is None:
            self._copy = copy_state_to_host(state)

    def state(self, last: PyTree, step: int, shardings: PyTree) -> PyTree:
        """The state of the best evaluation, given the last state and its step."""
        # There is no best evaluation, or the last state is the best.
        if self.step is None or self.step == step:
            return last
        if self._copy is not None:
            return self._copy()
        assert self._checkpoints is not None
        path = self._checkpoints.path / str(self.step)
        return load_checkpoint(path, last, shardings=shardings)

    def describe(self, step: int) -> str:
        """A sentence about how a run ended after a step."""
        name, count = self.rule.metric, self.since
        if self.value is None:
            return (
                f"Training ended after step {step:,}: {name} was NaN or infinite in every "
                "evaluation."
            )
        ended = "ended"
        if self.is_over:
            ended = "stopped early"
        evaluations = f"{count} evaluation{'s' * (count != 1)}"
        return (
            f"Training {ended} after step {step:,}: {name} was best at step {self.step:,}, "
            f"{self.value:.4g}, {evaluations} before. The state of that step is returned."
        )

    def _is_better(self, value: float) -> bool:
        sign = 1.0
        if self.rule.mode == "min":
            sign = -1.0
        best = -math.inf
        if self.value is not None:
            best = sign * self.value
        # NaN is not better than anything.
        return sign * value > best


def copy_state_to_host(state: PyTree) -> Callable[[], PyTree]:
    """Copies the arrays of a state; each process copies the parts on its own devices.

    Returns a function that returns the state as it was, with the same shardings.
    """
    arrays, static = split(state)
    copies = list(map(_copy_to_host, arrays))
    return lambda: join([to_devices() for to_devices in copies], static)


def _copy_to_host(x: jax.Array) -> Callable[[], jax.Array]:
    impl, data = None, x
    if jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key):
        # NumPy has no typed keys; their data is an array.
        impl, data = jax.random.key_impl(x), jax.random.key_data(x)
    shape, sharding = data.shape, data.sharding
    # Devices that hold the same shard share one copy of it.
    parts: dict[str, np.ndarray] = {}
    devices: dict[Hashable, str] = {}
    for shard in data.addressable_shards:
        at = devices[shard.device] = str(shard.index)
        if at not in parts:
            parts[at] = np.array(shard.data)  # a copy: the next step donates the array

    # It must not refer to `x` or `data`, whose memory on the devices would stay in use.
    def to_devices() -> jax.Array:
        shards = [jax.device_put(parts[at], device) for device, at in devices.items()]
        array = jax.make_array_from_single_device_arrays(shape, sharding, shards)
        if impl is None:
            return array
        return jax.random.wrap_key_data(array, impl=impl)

    return to_devices
