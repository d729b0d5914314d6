"""Shows the progress of a loop: a bar on a terminal or in a notebook, lines elsewhere."""

import logging
import math
import os
import sys
from collections import deque
from collections.abc import Mapping
from time import perf_counter
from typing import Any, NamedTuple, SupportsFloat

from ..core._errors import check_flag
from ..core._output import forgiving
from ._notebook import NotebookBar, NotebookEvaluation, notebook_display
from ._terminal import Stream, has_colours, is_logged, is_terminal

logger = logging.getLogger("redcoast")

# Throughput is averaged over this many seconds: enough to smooth it, but changes are visible.
_WINDOW = 30.0
_BAR_INTERVAL = 0.1  # seconds
# At least so many lines off a terminal, and the longest time without one.
_LINES, _LONGEST_SILENCE = 40, 300.0
_SHORTEST_BAR = 5  # columns


Bar = Any  # of tqdm, or a `NotebookBar`, which has the same methods


class _Sample(NamedTuple):
    seconds: float  # without pauses
    step: int
    done: float  # examples or tokens


class ProgressLogger:
    """The logger that `progress_logger` creates.

    It counts a step in each call, and can be told of pauses and of evaluations. `enabled` is
    `False` if it shows nothing.
    """

    def __init__(self, enabled: bool | None, file: Stream | None):
        self.enabled = enabled is not False
        self._draws_bar = bool(enabled)  # also where there is no terminal
        self._wanted_file = file
        self._forget()

    def _forget(self) -> None:
        """Forgets an earlier run, and shows nothing until the next one begins."""
        self._total: int | None = None
        self._steps_per_epoch: int | float | None = None
        self._rows = 1
        self._file: Stream | None = None
        self._bar: Bar | None = None
        self._evaluation: Bar | None = None  # the bar of an evaluation
        self._step, self._done, self._metrics = 0, 0.0, {}
        self._drawn = 0  # the step that was shown last
        self._samples: deque[_Sample] = deque()
        self._next = math.inf  # the time of the next line
        self._idle, self._paused_at = 0.0, None  # seconds of all pauses

    def start(self, run) -> None:
        rows, examples = run.config.get("batch_size", 1), run.config.get("examples")
        # If nothing is left to train, a bar would show "compiling".
        if run.steps is None or run.step < run.steps:
            self.begin(run.steps, run.step, rows, examples and examples / rows)

    def begin(
        self,
        total: int | None,
        start: int = 0,
        rows: int = 1,
        steps_per_epoch: int | float | None = None,
    ) -> None:
        """Begins a run after `start` steps. `total` is the number of its last step, if known."""
        self._forget()
        self._total, self._rows, self._steps_per_epoch = total, rows, steps_per_epoch
        self._step = self._drawn = start
        file = self._wanted_file
        show = None
        if file is None:
            file = sys.stderr
            if self.enabled:
                show = notebook_display()
        self._file = forgiving(file)
        if not self.enabled or self._file is None:
            return
        self._next = 0.0
        if show is not None:
            self._bar = NotebookBar(show, label="step", total=total, initial=start)
            # Until the first step is finished.
            self._bar.set_postfix_str("compiling")
        elif self._draws_bar or is_terminal(self._file):
            layout = "step {n_fmt}{postfix}"
            if total is not None:
                layout = "step {n_fmt}/{total_fmt} |{bar}| {percentage:.0f}%{postfix}"
            colour = None
            if has_colours(self._file):
                colour = "green"
            options = {"total": total, "initial": start, "colour": colour}
            self._bar = _bar(self._file, layout, postfix="compiling", **options)
        if self._bar is not None:
            # A filter sees each message before it is written.
            logger.addFilter(self._make_room)

    def __call__(self, metrics: Mapping[str, SupportsFloat], step: int) -> None:
        if not all(name.startswith("eval/") for name in metrics):
            self.update(step, metrics, self._rows)

    def update(self, step: int, metrics: Mapping[str, SupportsFloat], amount: int | float) -> None:
        """Counts a completed step.

        - `step`: the number of steps completed so far.
        - `metrics`: the metrics of the step. `loss` is shown; `weight` is the number of tokens.
        - `amount`: the number of examples in the step's batch.
        """
        self._step, self._metrics = step, metrics
        self._done += float(metrics.get("weight", amount))
        now = perf_counter()
        is_line = self._bar is None and is_logged(step, self._total, lines=_LINES)
        if now < self._next and not (is_line and self._next < math.inf):
            return
        first = not self._samples
        if first:
            # The clock starts after the first step, to exclude compilation.
            self._samples.append(self._sample(now))
        if not first or self._bar is not None:
            self._draw(now)
        self._next = now + _LONGEST_SILENCE
        if self._bar is not None:
            self._next = now + _BAR_INTERVAL

    def pause(self) -> None:
        """Stops the clock of the throughput, for example during an evaluation or a save."""
        if self._paused_at is None:
            self._paused_at = perf_counter()

    def evaluating(self, batches: int) -> None:
        """Shows a separate bar for an evaluation of this many batches, until `resume`."""
        if self._bar is None or self._evaluation is not None:
            return
        if isinstance(self._bar, NotebookBar):
            self._evaluation = NotebookEvaluation(self._bar, batches)
        else:
            self._bar.clear()
            assert self._file is not None
            layout = "evaluating {n_fmt}/{total_fmt} |{bar}| {percentage:.0f}%, {remaining} left"
            self._evaluation = _bar(self._file, layout, total=batches, leave=False, position=0)

    def advance(self) -> None:
        """Counts an evaluated batch."""
        if self._evaluation is not None:
            self._evaluation.update()

    def resume(self) -> None:
        """Starts the clock again."""
        bar, self._evaluation = self._evaluation, None
        if bar is not None:
            bar.close()
        if self._paused_at is not None:
            self._idle += perf_counter() - self._paused_at
            self._paused_at = None

    def close(self) -> None:
        """Shows the last step and closes the bar; later calls do nothing."""
        self.resume()
        if self._drawn != self._step and self._next < math.inf:
            self._draw(perf_counter())
        self._next = math.inf
        if self._bar is not None:
            logger.removeFilter(self._make_room)
            self._bar.close()

    def _make_room(self, record: logging.LogRecord) -> bool:
        """Removes the bars before a message is logged, so that the message has its own line."""
        for bar in (self._bar, self._evaluation):
            if bar is not None:
                bar.clear()
        return True

    def _sample(self, now: float) -> _Sample:
        if self._paused_at is not None:
            now = self._paused_at
        return _Sample(now - self._idle, self._step, self._done)

    def _draw(self, now: float) -> None:
        self._drawn = self._step
        sample = self._sample(now)
        self._samples.append(sample)
        # The first sample is at the beginning of the window, or the last one before it.
        while len(self._samples) > 2 and self._samples[1].seconds <= sample.seconds - _WINDOW:
            self._samples.popleft()
        details = self._details(self._samples[0], sample)
        if self._bar is not None:
            # Set rather than updated: steps between two drawings were not counted.
            self._bar.n = self._step
            self._bar.set_postfix_str(", ".join(self._fitting(details)), refresh=False)
            self._bar.refresh()
        else:
            step = f"step {self._step:,}"
            if self._total is not None:
                step += f"/{self._total:,}"
            print("  ".join([step, *details]), file=self._file)
            assert self._file is not None
            self._file.flush()

    def _fitting(self, details: list[str]) -> list[str]:
        """As many of the details as fit beside a short bar; the last ones matter most."""
        assert self._bar is not None
        columns = self._bar.format_dict["ncols"] or math.inf
        # What the layout of the bar has besides the details.
        counts = 2 * len(f"{self._total or self._step}") + len("step / || 100%, ") + _SHORTEST_BAR
        while len(details) > 1 and counts + len(", ".join(details)) >= columns:
            details = details[1:]
        return details

    def _details(self, first: _Sample, last: _Sample) -> list[str]:
        details = []
        if self._steps_per_epoch:
            epoch = self._step / self._steps_per_epoch
            if epoch >= 0.1:
                details.append(f"epoch {epoch:.1f}")
            else:
                details.append(f"epoch {epoch:.1g}")
        if "loss" in self._metrics:
            details.append(f"loss {float(self._metrics['loss']):.4g}")
        seconds = last.seconds - first.seconds
        if seconds > 0 and last.step > first.step:
            rate = (last.done - first.done) / seconds
            unit = "examples"
            if "weight" in self._metrics:
                unit = "tokens"
            if rate >= 100:
                details.append(f"{rate:,.0f} {unit}/s")
            else:
                details.append(f"{rate:.3g} {unit}/s")
            if self._total is not None:
                left = (self._total - last.step) * seconds / (last.step - first.step)
                details.append(f"{_clock(left)} left")
        return details


def progress_logger(enabled: bool | None = None, *, file: Stream | None = None) -> ProgressLogger:
    """Creates a logger that shows the progress of a run: step, loss, throughput and time left.

    **Arguments:**

    - `enabled`: `None` draws a bar on a terminal and in a notebook, and prints lines elsewhere, at
        steps that depend only on the length of the run; `True` always draws the bar; `False` shows
        nothing, and `fit` does not print the plan.
    - `file`: the file to write to; standard error by default.

    **Returns:**

    A callable `(metrics, step) -> None`, to pass to `fit` in `log`, which adds one by default.

    !!! Example

        ```python
        log = [rc.progress_logger(True), rc.console_logger()]
        ```
    """
    if enabled is not None:
        check_flag("enabled", enabled)
    return ProgressLogger(enabled, file)


def _bar(file: Stream, layout: str, **options: Any) -> Bar:
    """A bar that follows the width of the terminal."""
    from tqdm import tqdm

    try:  # consoles without a width report 0
        unknown = os.get_terminal_size(file.fileno()).columns == 0
    except (OSError, ValueError):  # not a terminal
        unknown = False
    if unknown:
        return tqdm(file=file, bar_format=layout, ncols=79, nrows=24, **options)
    return tqdm(file=file, bar_format=layout, dynamic_ncols=True, **options)


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}:{minutes:02}:{seconds:02}"
    return f"{minutes}:{seconds:02}"
