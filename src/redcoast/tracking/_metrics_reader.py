"""Metrics of training steps, read when the next step is under way."""

import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ..core._errors import noting
from ._progress import Progress

logger = logging.getLogger("redcoast")
Log = Callable[[dict[str, float], int], Any]
VOTES = "votes"  # among the metrics of a step, if there are several processes


class MetricsReader:
    """Hands the metrics of each step to the loggers without making the loop wait for the device."""

    def __init__(self, logs: Sequence[Log], bar: Progress, *, max_skipped: int):
        self._logs, self._bar, self._max_skipped = logs, bar, max_skipped
        self._names: list[str] = []
        self._pending: tuple[int, Float[Array, " metrics"], int] | None = None
        self._read_any = False
        self._values: dict[str, float] = {}
        self.skipped = 0  # steps in a row
        self.votes = 0.0  # for stopping, of the step that was read last

    def pack(self, metrics: dict[str, Array]) -> Float[Array, " metrics"]:
        """One array of all metrics, for a step to return: one is read faster than many."""
        self._names = list(metrics)  # when the step is traced
        return stacked(metrics)

    def push(self, step: int, metrics: Float[Array, " metrics"], rows: int) -> None:
        """Takes the metrics of a step that is under way, and reads those of the one before."""
        before, self._pending = self._pending, (step, metrics, rows)
        if before is not None:
            self._read(*before)
        # A mistake in the loss should not cost a second step. And where a run may end for want of
        # a finite loss, no further step must begin, so that it can be said why.
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

    def failure(self, step: int) -> type[Exception] | None:
        """Whether the run must end: what `loss_fn` computes cannot be trained with."""
        if step == 1 and not math.isfinite(self._values.get("loss", 0.0)):
            return ValueError
        return FloatingPointError if self.skipped >= self._max_skipped else None

    def complaint(self, step: int, why: str, last_checkpoint: str) -> str:
        """What to say then."""
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

    def _read(self, step: int, metrics: Float[Array, " metrics"], rows: int) -> None:
        self._read_any = True
        with noting(f"Raised while step {step} was computed."):
            read = np.asarray(metrics).tolist()
        values = self._values = dict(zip(self._names, read, strict=True))
        self.votes = values.pop(VOTES, 0.0)
        self.skipped = self.skipped + 1 if values["skipped"] else 0
        self.write(values, step)
        self._bar.update(step, values, rows)
        if values["skipped"]:
            logger.warning(
                "Step %d was skipped: loss %g, gradient norm %g.",
                *(step, values["loss"], values["grad_norm"]),
            )


def stacked(metrics: dict[str, Array]) -> Float[Array, " metrics"]:
    """One array of all metrics."""
    return jnp.stack([x.astype(jnp.result_type(float)) for x in metrics.values()])


def _name(log: Any) -> str:
    return getattr(log, "__name__", type(log).__name__)
