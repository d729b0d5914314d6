"""Reads the metrics of a training step while the next step is computed."""

import contextlib
import functools as ft
import logging
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import NoneType
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float, PyTree

from ..core._errors import check_integer, check_kind, noting, several
from ..core._frames import hide_frames
from ..core._user_functions import calling
from ..distributed._kv_store import is_main
from ._kept_arrays import KeptArrays
from ._loggers import STOP, RunInfo, all_loggers, is_silent, may_stop, start_loggers, takes_state
from ._rates import Rates

logger = logging.getLogger("redcoast")
Log = Callable[..., object]
MAX_SKIPPED = 20  # steps in a row
MOST_LATE, LATE_SECONDS = 16, 20e-3  # how many steps, and seconds, after a step it is read
LEAST_LOSS_SCALE = 1.0
COMMON_CAUSES = (
    "Common causes are a logarithm of zero, a division by zero, an empty mask, integer labels that "
    "are out of range, inputs that are NaN or infinite, and values above 65,504 in float16. "
    "`jax.config.update('jax_debug_nans', True)` shows where the first NaN is computed."
)


# Not an `eqx.Module`, whose attributes take longer to read: one is created and read in each step.
@jax.tree_util.register_pytree_node_class
class PackedMetrics:
    """The scalar metrics of a step in one array, so that the host reads them in one transfer.

    - `names`: the names of the metrics, in the order of `values`.
    - `values`: the values of the metrics, in float32 or wider; an array, or its shape.
    """

    def __init__(self, names: tuple[str, ...], values: PyTree):
        self.names, self.values = names, values

    def tree_flatten(self) -> tuple[tuple[PyTree], tuple[str, ...]]:
        return (self.values,), self.names

    @classmethod
    def tree_unflatten(cls, names: tuple[str, ...], children: tuple[PyTree]) -> "PackedMetrics":
        return cls(names, *children)


# The metrics that a step returns, before they are read.
DeviceMetrics = PackedMetrics | Mapping[str, ArrayLike]


def pack_metrics(step: Callable[..., PyTree]) -> Callable[..., PyTree]:
    """Wraps `step(state, *args) -> (state, metrics)`, whose metrics are a dict of scalars, so that
    they are packed into one array, a `PackedMetrics`, which is read faster."""

    def packed(state: PyTree, *args: PyTree) -> tuple[PyTree, PackedMetrics]:
        state, metrics = step(state, *args)
        check_scalars(metrics)
        # float32, or float64 if `jax_enable_x64` is set: counts of tokens do not fit into bfloat16.
        values = [x.astype(jnp.result_type(float)) for x in metrics.values()]
        return state, PackedMetrics(tuple(metrics), jnp.stack(values))

    return packed


def check_scalars(metrics: Mapping[str, ArrayLike]) -> None:
    """Raises `ValueError` if the loss returned metrics that are not real scalars."""
    for name, value in metrics.items():
        if jnp.iscomplexobj(value):
            raise ValueError(
                f"`loss_fn` returned aux[{name!r}] of dtype {jnp.result_type(value)}. Metrics are "
                "real numbers: return `jnp.abs` of it, or its real and imaginary parts."
            )
        if jnp.ndim(value):
            raise ValueError(
                f"`loss_fn` returned aux[{name!r}] of shape {jnp.shape(value)}. Metrics must be "
                "scalars: reduce it, or return it from `predict_fn`. A custom training loop can "
                "use arrays that `redcoast.train_step` returns, without `accumulate`."
            )


class StackedMetrics:
    """The metrics of steps that were dispatched together, which the host reads in one transfer."""

    def __init__(self, names: tuple[str, ...], values: Float[Array, "steps metrics"]):
        self.names, self.values = names, values

    @ft.cached_property
    def rows(self) -> list[list[float]]:
        return np.asarray(self.values).tolist()


class MetricsInCall(NamedTuple):
    """The metrics of one of the steps that were dispatched together."""

    of: StackedMetrics
    row: int


Metrics = DeviceMetrics | MetricsInCall


def read_step_metrics(metrics: Metrics) -> dict[str, float]:
    """Waits for a step and returns its metrics as Python floats."""
    if isinstance(metrics, PackedMetrics):
        return dict(zip(metrics.names, np.asarray(metrics.values).tolist(), strict=True))
    if isinstance(metrics, MetricsInCall):
        return dict(zip(metrics.of.names, metrics.of.rows[metrics.row], strict=True))
    check_scalars(metrics)
    return {name: float(x) for name, x in jax.device_get(dict(metrics)).items()}


class StepMetrics(Mapping[str, float]):
    """The metrics of a step, each of which is read when it is first accessed.

    Reading waits until the devices have finished the step.
    """

    def __init__(self, metrics: DeviceMetrics):
        self._metrics = metrics
        self._values: dict[str, float] | None = None

    def __getitem__(self, name: str) -> float:
        return self._read()[name]

    def __iter__(self) -> Iterator[str]:
        if isinstance(self._metrics, PackedMetrics):
            return iter(self._metrics.names)
        return iter(self._metrics)

    def __len__(self) -> int:
        return len(list(iter(self)))

    def __repr__(self) -> str:
        return repr(self._read())

    def _read(self) -> dict[str, float]:
        # To read waits for the step, so it is done only for loggers that look.
        if self._values is None:
            self._values = read_step_metrics(self._metrics)
        return self._values


class Pushed(NamedTuple):
    """A step that was dispatched, and what explains it if it was skipped.

    `explain` and `inspect` are as for `MetricsReader.push`; `at` is the time at which the step was
    dispatched, and `end` the last of the steps that were dispatched together with it.
    """

    step: int
    metrics: Metrics
    explain: Callable[[bool], str] | None
    inspect: Callable[[], str] | None
    at: float
    end: int


class MetricsReader:
    """Passes the metrics of each step to the loggers without blocking the loop on the devices.

    It is created by [`redcoast.metrics_reader`][].

    **Attributes:**

    - `stop_reason`: which logger returned [`redcoast.STOP`][] in this process, or `None`. The loop
        must check it.
    """

    def __init__(
        self, logs: Sequence[Log], *, run: RunInfo | None = None, max_skipped: int = MAX_SKIPPED
    ):
        self._takers = [log for log in logs if takes_state(log)]
        self._logs = [log for log in logs if not (takes_state(log) or is_silent(log))]
        self._wants_rates = any(map(_wants_rates, self._logs))
        self._kept_arrays = KeptArrays()
        self._max_skipped = max_skipped
        self.stop_reason: str | None = None
        self.stop_step: int | None = None  # the step whose metrics that logger was called with
        self._rates = Rates(run or RunInfo())
        self._pending = deque[Pushed]()
        # To wait for each step takes longer than a short one. Nobody sees that its metrics are
        # late, unless a logger may ask to stop after it.
        self._most_late = 1
        if not any(map(may_stop, logs)):
            # Less than `max_skipped`, so that the steps that end a run are read in time.
            self._most_late = max(1, min(MOST_LATE, max_skipped - 1))
        self._values: dict[str, float] = {}  # of the step that was read last
        self._trained = False
        self._skipped = 0  # steps in a row
        self._read_steps = self._skipped_steps = 0  # of all

    @property
    def shows_state(self) -> bool:
        """Whether some loggers have a parameter `state`."""
        return bool(self._takers)

    @hide_frames
    def push(
        self,
        step: int,
        metrics: DeviceMetrics,
        *,
        explain: Callable[[bool], str] | None = None,
        inspect: Callable[[], str] | None = None,
        state: PyTree = None,
    ) -> None:
        """Stores the metrics of a dispatched step, and reads the metrics of an earlier step.

        That is the step before it, or, if steps are short and no logger may return
        [`redcoast.STOP`][], one of the 16 steps before it. Loggers with a parameter `state` are
        called at once. They wait for the step if they read the state or the metrics.

        **Arguments:**

        - `step`: the number of the step.
        - `metrics`: the metrics that the step returned: a dict of scalars on the devices.
        - `explain`: a function that returns sentences for the error below, given whether any step
            changed the state.
        - `inspect`: a function that returns sentences for the warning about the first skipped step.
            It is called after the next step has been dispatched.
        - `state`: the state after the step, for loggers with a parameter `state`.

        **Raises:**

        `FloatingPointError` if `max_skipped` steps in a row were skipped because the loss or the
        gradient was NaN or infinite; `ValueError` if the loss of the first step is NaN or infinite.
        """
        now = self._rates.now()
        self._pending.append(Pushed(step, metrics, explain, inspect, now, step))
        self._read_until(self._most_late)
        # Long steps are read one step late: to wait for them costs little.
        while len(self._pending) > 1 and self._pending[0].at < now - LATE_SECONDS:
            self._read_until(len(self._pending) - 1)
        self._read_if_decisive(self._most_late)
        if self._takers:
            self._kept_arrays.see(state, several(list(map(_name_of, self._takers))))
            self._show_state(StepMetrics(metrics), step, state)

    def push_call(
        self,
        numbers: Sequence[int],
        metrics: StackedMetrics,
        *,
        explain: Callable[[int, bool], str],
        inspect: Callable[[int], str],
    ) -> None:
        """Stores the metrics of steps that were dispatched together, and reads the steps before.

        `explain` and `inspect` have the number of the step as their first argument. Loggers with a
        parameter `state` are not called.
        """
        at = self._rates.now()
        for i, number in enumerate(numbers):
            row = MetricsInCall(metrics, i)
            about = ft.partial(explain, number), ft.partial(inspect, number)
            self._pending.append(Pushed(number, row, *about, at, numbers[-1]))
        self._read_until(len(numbers))
        self._read_if_decisive()

    def catch_up(self) -> None:
        """Reads all steps but the last, unless a logger has asked to stop."""
        if self.stop_reason is None:
            self._read_until(1)

    def forget_after(self, step: int) -> None:
        """Drops the metrics of the steps after a step, which are then not logged."""
        self._pending = deque(pushed for pushed in self._pending if pushed.step <= step)

    @hide_frames
    def flush(self) -> None:
        """Waits for the last step and reads its metrics."""
        while self._pending:
            self._read_until(0)

    def _read_until(self, left: int) -> None:
        """Reads steps until this many are left, or a logger asks to stop."""
        reason = self.stop_reason
        while len(self._pending) > left and self.stop_reason is reason:
            self._read(self._pending.popleft())

    def _read_if_decisive(self, unread: int = 1) -> None:
        """Reads the last steps if they may reveal a mistake in the loss, as the first does, or end
        the run, because their state is needed to find the cause."""
        if not self._values or self._skipped + unread >= self._max_skipped:
            self._read_until(0)

    def write(
        self,
        metrics: dict[str, float],
        step: int,
        rates: Mapping[str, float] | None = None,
        *,
        state: PyTree = None,
    ) -> None:
        """Passes other metrics to the loggers, such as the metrics of an evaluation.

        `rates` are figures such as the throughput, for loggers with the attribute `wants_rates`.
        `state` is the state after the step, for loggers with a parameter `state`.
        """
        self._write(metrics, step, rates or {})
        if metrics:
            self._show_state(metrics, step, state)

    def _write(self, metrics: dict[str, float], step: int, rates: Mapping[str, float]) -> None:
        """Passes metrics to the loggers without a parameter `state`, and rates if they want
        them."""
        if not metrics:
            return
        for log in self._logs:
            if _wants_rates(log):
                extra = {name: rate for name, rate in rates.items() if name not in metrics}
                self._call_log(log, {**metrics, **extra}, step)
            else:
                self._call_log(log, dict(metrics), step)

    def _show_state(self, metrics: Mapping[str, float], step: int, state: PyTree) -> None:
        if self._takers and state is None:
            raise ValueError(
                f"`log` ({_name_of(self._takers[0])}) has a parameter `state`. Pass the state "
                "after the step to the `MetricsReader`: `reader.push(step, metrics, state=state)`."
            )
        for log in self._takers:
            self._call_log(log, metrics, step, state=state)

    def _call_log(self, log: Log, metrics: Mapping[str, float], step: int, **state: PyTree) -> None:
        try:
            result = log(metrics, step, **state)
        except BaseException as error:  # a context that adds the note would take longer
            where = f" ({_name_of(log)}) for the metrics of step {step}"
            calling("log", {}, where=where).add_to(error)
            raise
        if result is STOP and self.stop_reason is None:
            self.stop_reason = f"`log` ({_name_of(log)}) returned `redcoast.STOP`"
            self.stop_step = step

    @contextlib.contextmanager
    def paused(self, batches: int = 0) -> Iterator[Callable[[], None]]:
        """Reads the last step, and stops the clock of the throughput, during an evaluation.

        Returns a function to call for each of the `batches` that are evaluated.
        """
        # So that the last step is not logged after the evaluation that follows it.
        self.flush()
        self._call("pause")
        self._rates.pause()
        if batches:
            self._call("evaluating", batches)
        yield lambda: self._call("advance")
        self._rates.resume()
        self._call("resume")

    def _check(self, step: int, explain: Callable[[bool], str] | None) -> None:
        """Raises an error if the loss cannot be trained with."""
        loss, norm = self._values.get("loss", 0.0), self._values.get("grad_norm", 0.0)
        first = step == 1 and not math.isfinite(loss)
        if not first and self._skipped < self._max_skipped:
            return
        why = ""
        if explain is not None:
            why = f" {explain(self._trained)}"
        if first:
            why = why or f" {COMMON_CAUSES}"
            raise ValueError(f"`loss_fn` returned {loss} for the first batch.{why}")
        raise FloatingPointError(
            f"Loss or gradient was NaN or infinite at {self._skipped} steps in a row, up to step "
            f"{step} with loss {loss:g} and gradient norm {norm:g}. These steps were skipped."
            f"{why} Lower the learning rate, clip the gradient, or inspect the data of these steps."
        )

    def _call(self, method: str, *args: object) -> None:
        for log in [*self._logs, *self._takers]:
            getattr(log, method, lambda *_: None)(*args)

    def report_skipped(self) -> None:
        """Logs a warning with the number of skipped steps, if there are any."""
        advice = ""
        if self._skipped_steps > self._read_steps / 2:
            advice = " Lower the learning rate, or clip the gradient."
        if self._skipped_steps:
            logger.warning(
                "%d of %d steps were skipped, because the loss or the gradient was NaN or "
                "infinite. They did not change the model.%s",
                *(self._skipped_steps, self._read_steps, advice),
            )

    def _read(self, pushed: Pushed) -> None:
        step, metrics, explain, inspect, at, end = pushed
        try:
            values = self._values = read_step_metrics(metrics)
        except BaseException as error:  # a context that adds the note would take longer
            noting(f"Raised while step {step} was computed.").add_to(error)
            raise
        skipped = bool(values.get("skipped", 0.0))
        # float16 may have overflowed, in which case a smaller loss scale helps.
        overflow = skipped and values.get("loss_scale", LEAST_LOSS_SCALE) > LEAST_LOSS_SCALE
        self._read_steps += 1
        if skipped and not overflow:
            self._skipped += 1
            self._skipped_steps += 1
        else:
            self._skipped = 0
        self._trained |= not skipped
        rates: Mapping[str, float] = {}
        if self._wants_rates:
            rates = self._rates(step, values, at, end)
        self._write(values, step, rates)
        if skipped:
            more = ""
            if overflow:
                more = f" The loss scale {values['loss_scale']:g} is halved."
            # Of the first skipped step only, unless it is step 1, which `_check` explains.
            if inspect and not overflow and self._skipped_steps == 1 and step > 1:
                more = f" {inspect()}"
            logger.warning(
                "Step %d was skipped: loss %g, gradient norm %g.%s",
                *(step, values.get("loss", math.nan), values.get("grad_norm", math.nan), more),
            )
        self._check(step, explain)


def _wants_rates(log: object) -> bool:
    return getattr(log, "wants_rates", False)


def _name_of(log: object) -> str:
    return getattr(log, "__name__", type(log).__name__)


@contextlib.contextmanager
def metrics_reader(
    log: Log | Sequence[Log] | Literal[False] | None = None,
    run: RunInfo | None = None,
    *,
    max_skipped: int = MAX_SKIPPED,
) -> Iterator[MetricsReader]:
    """Reads the metrics of each training step while the next one runs, and logs them.

    **Arguments:**

    - `log`: as for [`redcoast.fit`][].
    - `run`: the information about the run, from [`redcoast.run_info`][]. If the run has a
        directory, metrics are also written to `metrics.jsonl` there.
    - `max_skipped`: the number of consecutive skipped steps, because the loss or the gradient is
        NaN or infinite, after which an error is raised. With 1, each step is read at once. Steps
        with a [`redcoast.LossScale`][] above 1 do not count.

    **Returns:**

    A context manager that returns a [`redcoast.MetricsReader`][]; pass the metrics of each step to
    its `push`. On entry, loggers are started, in process 0 only or, if they have a parameter
    `state`, in each process. On exit, the last step is read and the loggers are closed.

    **Raises:**

    `TypeError` or `ValueError` if an argument is invalid.

    !!! Example

        ```python
        with rc.metrics_reader(rc.console_logger()) as reader:
            for done in rc.training_steps(state, data, step):
                reader.push(done.number, done.metrics)
        ```
    """
    check_integer("max_skipped", max_skipped)
    check_kind("run", run, (RunInfo, NoneType), "what `redcoast.run_info` returns")
    loggers = all_loggers(log)
    with contextlib.ExitStack() as stack:
        # Other processes take part where the state is read, which may be sharded over all.
        if not is_main():
            loggers = [log for log in loggers if takes_state(log)]
        logs = start_loggers(loggers, run or RunInfo(), stack, writes=is_main())
        reader = MetricsReader(logs, run=run, max_skipped=max_skipped)
        yield reader
        reader.flush()
        reader.report_skipped()
