"""The throughput of a run, which is logged with the metrics of each step."""

from collections.abc import Callable, Mapping
from time import perf_counter
from typing import SupportsFloat

import jax

from ._loggers import RunInfo


class Rates:
    """Measures the time between steps.

    The first step is not measured, because it is compiled, nor is time between `pause` and
    `resume`.
    """

    def __init__(self, run: RunInfo, clock: Callable[[], float] = perf_counter):
        self._config, self.now = run.config, clock
        self._last: tuple[int, float] | None = None
        self._seconds: float | None = None  # of each step up to the last
        self._paused_at: float | None = None
        self._reports_memory = True  # as far as is known

    def __call__(
        self,
        step: int,
        metrics: Mapping[str, SupportsFloat],
        at: float | None = None,
        end: int | None = None,
    ) -> dict[str, float]:
        """The rates of a completed step, as far as they are known.

        `step_seconds`, `examples_per_second` or `tokens_per_second`, `epoch`, `peak_memory_gb`,
        and `mfu` (model FLOPs utilisation, from 0 to 1).

        `at` is the time at which the step was dispatched, by default now, and `end` the last of the
        steps that were dispatched together with it.
        """
        if at is None:
            at = self.now()
        if end is None:
            end = step
        self._measure(end, at)
        rows, examples = self._config.get("batch_size"), self._config.get("examples")
        rates: dict[str, float] = {}
        if rows and examples:
            rates["epoch"] = step * rows / examples
        peak = self._peak_memory()
        if peak is not None:
            rates["peak_memory_gb"] = peak / 1e9
        seconds = self._seconds
        if seconds is None:
            return rates
        rates["step_seconds"] = seconds
        if "weight" in metrics:
            rates["tokens_per_second"] = float(metrics["weight"]) / seconds
        elif rows:
            rates["examples_per_second"] = rows / seconds
        if least := self._config.get("seconds_at_peak"):
            # What the model's arithmetic takes at the peak rate, as a share of what the step took.
            rates["mfu"] = least / seconds
        return rates

    def _peak_memory(self) -> int | None:
        """Bytes of a device; `None` if it does not report them, which is asked once."""
        if not self._reports_memory:
            return None
        peak = (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
        self._reports_memory = peak is not None
        return peak

    def _measure(self, end: int, at: float) -> None:
        """Computes the time of each step since the last measurement."""
        before, self._last = self._last, (end, at)
        if before == self._last:  # another step of the same call
            return
        self._seconds = None
        if before is not None and end > before[0] and at > before[1]:
            self._seconds = (at - before[1]) / (end - before[0])

    def pause(self) -> None:
        self._paused_at = self.now()

    def resume(self) -> None:
        if self._last is not None and self._paused_at is not None:
            # As if the last step had ended later by the pause.
            self._last = (self._last[0], self._last[1] + self.now() - self._paused_at)
        self._paused_at = None
