"""Metrics of training steps, read when the next step is under way."""

import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ._progress import Progress

logger = logging.getLogger("redcoast")
Log = Callable[[dict[str, float], int], Any]
# So many steps in a row without a finite loss and gradient end a run.
MAX_SKIPPED = 20


class MetricsReader:
    """Hands the metrics of each step to the loggers without making the loop wait for the device."""

    def __init__(self, logs: Sequence[Log], bar: Progress, last_checkpoint: Callable[[], str]):
        self._logs, self._bar, self._last_checkpoint = logs, bar, last_checkpoint
        self._names: list[str] = []
        self._pending: tuple[int, Float[Array, " metrics"], int] | None = None
        self._skipped = 0  # in a row

    def pack(self, metrics: dict[str, Array]) -> Float[Array, " metrics"]:
        """One array of all metrics, for a step to return: one is read faster than many."""
        self._names = list(metrics)  # when the step is traced
        return jnp.stack([x.astype(jnp.result_type(float)) for x in metrics.values()])

    def push(self, step: int, metrics: Float[Array, " metrics"], rows: int) -> None:
        """Takes the metrics of a step that is under way, and reads those of the one before."""
        before, self._pending = self._pending, (step, metrics, rows)
        if before is not None:
            self._read(*before)
        if step == 1:
            self.flush()  # a mistake in the loss should not cost a second step

    def flush(self) -> None:
        """Reads the metrics of the last step, and waits for it."""
        before, self._pending = self._pending, None
        if before is not None:
            self._read(*before)

    def write(self, metrics: dict[str, float], step: int) -> None:
        """Hands metrics to the loggers."""
        for log in self._logs:
            log(dict(metrics), step)

    def _read(self, step: int, metrics: Float[Array, " metrics"], rows: int) -> None:
        values = dict(zip(self._names, np.asarray(metrics).tolist(), strict=True))
        self.write(values, step)
        self._bar.update(step, values, rows)
        self._skipped = self._skipped + 1 if values["skipped"] else 0
        if values["skipped"]:
            self._check(step, values)

    def _check(self, step: int, values: dict[str, float]) -> None:
        if step == 1 and not math.isfinite(values["loss"]):
            raise ValueError(
                f"`loss_fn` returned {values['loss']} for the first batch. Look for a logarithm or "
                "a division of zero, an empty mask, or inputs that are not finite; "
                "`jax.config.update('jax_debug_nans', True)` shows where it arises."
            )
        logger.warning(
            "Step %d was skipped: loss %g, gradient norm %g.",
            *(step, values["loss"], values["grad_norm"]),
        )
        if self._skipped >= MAX_SKIPPED:
            raise FloatingPointError(
                f"Loss or gradient was not finite at {self._skipped} steps in a row, up to step "
                f"{step}; those steps changed nothing. {self._last_checkpoint()} Lower the "
                "learning rate, clip the gradient, or look into the data of these steps."
            )
