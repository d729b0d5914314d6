"""Metrics of training steps, read while the next step is computed."""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ..core._errors import noting

logger = logging.getLogger("redcoast")
Log = Callable[[dict[str, float], int], Any]


class PackedMetrics(eqx.Module):
    """The scalar metrics of a step in one array, which the host reads in one transfer.

    - `names`: their names, in the order of `values`.
    - `values`: their values, in float32 or wider.
    """

    names: tuple[str, ...] = eqx.field(static=True)
    values: Float[Array, " metrics"]


def pack_metrics(step: Callable[..., Any]) -> Callable[..., Any]:
    """A training step whose metrics are packed into one array: reading one is faster.

    **Arguments:**

    - `step`: `step(state, *args) -> (state, metrics)`, such as [`redcoast.train_step`][] with its
        keyword arguments bound. Its metrics are a dict of scalars.

    **Returns:**

    A step of the same arguments whose metrics are a `PackedMetrics`.
    """

    def packed(state: Any, *args: Any) -> tuple[Any, PackedMetrics]:
        state, metrics = step(state, *args)
        values = [x.astype(jnp.result_type(float)) for x in metrics.values()]
        return state, PackedMetrics(tuple(metrics), jnp.stack(values))

    return packed


def read_step_metrics(metrics: PackedMetrics | Mapping[str, Any]) -> dict[str, float]:
    """The metrics of a step as numbers; waits for the step."""
    if isinstance(metrics, PackedMetrics):
        return dict(zip(metrics.names, np.asarray(metrics.values).tolist(), strict=True))
    return {name: float(x) for name, x in jax.device_get(dict(metrics)).items()}


class MetricsReader:
    """Hands the metrics of each step to the loggers without making the loop wait for the device."""

    def __init__(self, logs: Sequence[Log], *, max_skipped: int):
        self._logs, self._max_skipped = logs, max_skipped
        self._pending: tuple[int, Any] | None = None
        self._read_any = False
        self._values: dict[str, float] = {}
        self.skipped = 0  # steps in a row

    def push(self, step: int, metrics: PackedMetrics | Mapping[str, Any]) -> None:
        """Takes the metrics of a step that was dispatched, and reads those of the step before."""
        before, self._pending = self._pending, (step, metrics)
        if before is not None:
            self._read(*before)
        # A mistake in the loss should not cost a second step. And where the run may end because
        # steps were skipped, no further step must start, so that the cause can be found.
        if not self._read_any or self.skipped + 1 >= self._max_skipped:
            self.flush()

    def flush(self) -> None:
        """Reads the metrics of the last step, and waits for it."""
        before, self._pending = self._pending, None
        if before is not None:
            self._read(*before)

    def write(self, metrics: dict[str, float], step: int) -> None:
        """Hands metrics to the loggers."""
        for log in self._logs:
            with noting(f"Raised by `log` ({_name(log)}) for the metrics of step {step}."):
                log(dict(metrics), step)

    def pause(self) -> None:
        """Tells loggers that measure throughput that something other than a step begins."""
        self._call("pause")

    def resume(self) -> None:
        """Tells them that it has ended."""
        self._call("resume")

    def failure(self, step: int) -> type[Exception] | None:
        """The error with which the run must end, if `loss_fn` cannot be trained with."""
        if step == 1 and not math.isfinite(self._values.get("loss", 0.0)):
            return ValueError
        return FloatingPointError if self.skipped >= self._max_skipped else None

    def complaint(self, step: int, why: str, last_checkpoint: str) -> str:
        """The message of that error."""
        loss, norm = self._values["loss"], self._values["grad_norm"]
        if step == 1 and not math.isfinite(loss):
            return (
                f"`loss_fn` returned {loss} for the first batch. {why} Look for a logarithm or "
                "a division of zero, an empty mask, or inputs that are not finite; "
                "`jax.config.update('jax_debug_nans', True)` shows where it arises."
            )
        return (
            f"Loss or gradient was not finite at {self.skipped} steps in a row, up to step "
            f"{step} with loss {loss:g} and gradient norm {norm:g}; those steps changed nothing. "
            f"{why} {last_checkpoint} Lower the learning rate, clip the gradient, or look into "
            "the data of these steps."
        )

    def _call(self, method: str) -> None:
        for log in self._logs:
            getattr(log, method, lambda: None)()

    def _read(self, step: int, metrics: PackedMetrics | Mapping[str, Any]) -> None:
        self._read_any = True
        with noting(f"Raised while step {step} was computed."):
            values = self._values = read_step_metrics(metrics)
        skipped = values.get("skipped", 0.0)
        self.skipped = self.skipped + 1 if skipped else 0
        self.write(values, step)
        if skipped:
            logger.warning(
                "Step %d was skipped: loss %g, gradient norm %g.",
                *(step, values["loss"], values["grad_norm"]),
            )


def _name(log: Any) -> str:
    return getattr(log, "__name__", type(log).__name__)
