"""Metrics in a file of JSON lines, which a killed and resumed run goes on writing to."""

import json
import logging
import time
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any, SupportsFloat

logger = logging.getLogger("redcoast")

# NumPy's and JAX's scalars are no JSON numbers.
_encode = json.JSONEncoder(default=float).encode


class MetricsFile:
    """What `metrics_file` returns: a logger with a `close`."""

    def __init__(self, path: Path):
        path.parent.mkdir(parents=True, exist_ok=True)
        # Unbuffered: each line is one write, so that a kill loses nothing that was logged.
        self._file = path.open("ab+", buffering=0)
        self._cut = self._warned = False
        size = self._file.seek(0, 2)
        if size > 0:
            self._file.seek(size - 1)
            self._cut = self._file.read(1) != b"\n"

    def __call__(self, metrics: Mapping[str, SupportsFloat], step: int) -> None:
        line = _encode({"step": step, "time": round(time.time(), 3), **metrics})
        data = b"\n" * self._cut + line.encode() + b"\n"
        try:
            written = self._file.write(data)
        except OSError as error:
            self._miss(step, str(error))
            return
        self._cut = written < len(data)
        if self._cut:
            self._miss(step, "the disk took a part of the line.")

    def _miss(self, step: int, reason: str) -> None:
        # Metrics are no reason to end a run, and one warning is enough of a full disk.
        if not self._warned:
            logger.warning(
                "The metrics of step %d could not be written to %s, nor perhaps those of steps to "
                "come: %s",
                step,
                self._file.name,
                reason,
            )
        self._warned = True

    def close(self) -> None:
        self._file.close()


def metrics_file(path: str | PathLike[str]) -> MetricsFile:
    """A logger that appends each call's metrics to a file as one line of JSON.

    A line is `{"step": ..., "time": ..., <metrics>}`, with the time in Unix seconds, and is on its
    way to the disk when the call returns. A line that a kill cut short is ended, so that what
    comes after it can be read. A line that cannot be written, as on a full disk, is a warning the
    first time; the lines after it are tried all the same. Values that are not finite are written
    as Python writes and reads them, `NaN` and `Infinity`.

    !!! example

        ```python
        log = metrics_file("runs/lm/metrics.jsonl")
        log({"loss": 2.5}, 1)
        ```

    **Arguments:**

    - `path`: the file, usually `metrics.jsonl` in the run's directory, which is made if need be.

    **Returns:**

    A callable `(metrics, step) -> None` with a method `close()`.
    """
    return MetricsFile(Path(path))


def read_metrics(path: str | PathLike[str]) -> list[dict[str, Any]]:
    """Reads what `metrics_file` wrote, one dictionary for each step.

    A run that was resumed has the steps after its checkpoint twice, and a training step and an
    evaluation at the same step are two lines: lines of one step are merged, and of values for one
    key the last is kept. A line that is no JSON (cut short by a kill) is left out.

    !!! Example

        ```python
        losses = [entry["loss"] for entry in rc.read_metrics("runs/lm/metrics.jsonl")]
        ```

    **Arguments:**

    - `path`: the file.

    **Returns:**

    Dictionaries with `step`, `time` and the metrics, in the order of the steps.

    **Raises:**

    `FileNotFoundError` if there is no such file.
    """
    steps: dict[int, dict[str, Any]] = {}
    with open(path, encoding="utf-8", errors="replace") as lines:
        for line in lines:
            try:
                entry = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(entry, dict) and isinstance(entry.get("step"), int):
                steps.setdefault(entry["step"], {}).update(entry)
    return [steps[step] for step in sorted(steps)]
