"""Writes metrics to a file of JSON lines, to which a resumed run appends."""

import io
import json
import logging
import time
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any, SupportsFloat

from ..core._errors import absolute_path, local_path
from ..core._frames import hide_frames
from ..core._read_json import JSONObject, open_regular

logger = logging.getLogger("redcoast")

# JSON cannot encode the scalars of NumPy and JAX.
_encode = json.JSONEncoder(default=float).encode


class JsonlLogger:
    """The logger that `jsonl_logger` creates."""

    wants_rates = True

    def __init__(self, path: Path):
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path, self._warned = path, False
        self._open()

    def _open(self) -> None:
        # Unbuffered: each line is one write, so nothing that was logged is lost by a kill.
        self._file = self._path.open("ab+", buffering=0)
        self._cut = False  # whether the last line is incomplete
        size = self._file.seek(0, 2)  # its end
        if size > 0:
            self._file.seek(size - 1)
            self._cut = self._file.read(1) != b"\n"

    def __call__(self, metrics: Mapping[str, SupportsFloat], step: int) -> None:
        line = _encode({"step": step, "time": round(time.time(), 3), **metrics})
        try:
            # At the end of an earlier run.
            if self._file.closed:
                self._open()
            # A line that was cut off is ended first, so that only it is lost.
            data = b"\n" * self._cut + line.encode() + b"\n"
            written = self._file.write(data)
        except OSError as error:
            self._warn(step, str(error))
            return
        self._cut = written < len(data)
        if self._cut:
            self._warn(step, "only a part of the line was written.")

    def _warn(self, step: int, reason: str) -> None:
        # Missing metrics do not end a run, and one warning about a full disk is enough.
        if not self._warned:
            logger.warning(
                "The metrics of step %d could not be written to %s; metrics of later steps may be "
                "missing too: %s",
                *(step, self._file.name, reason),
            )
        self._warned = True

    def close(self) -> None:
        self._file.close()


@hide_frames
def jsonl_logger(path: str | PathLike[str]) -> JsonlLogger:
    """Creates a logger that appends the metrics of each call to a file as one line of JSON.

    A line is `{"step": ..., "time": ..., <metrics>}`, with the time in Unix seconds. It is passed
    to the operating system before the call returns. If the file ends with an incomplete line,
    because a run was killed, a line break is added first. If a line cannot be written, for example
    on a full disk, a warning is logged once, and later lines are still attempted. NaN and infinity
    are written as `NaN` and `Infinity`, which Python's `json` reads.

    **Arguments:**

    - `path`: the file, usually `metrics.jsonl` in the run's directory. Missing directories are
        created.

    **Returns:**

    A callable `(metrics, step) -> None` with a method `close()`.

    !!! Example

        ```python
        log = rc.jsonl_logger("runs/lm/metrics.jsonl")
        log({"loss": 2.5}, 1)
        log.close()  # `fit` does so at the end of a run; the next call opens the file again
        ```
    """
    return JsonlLogger(absolute_path("path", path))


@hide_frames
def read_metrics(path: str | PathLike[str]) -> list[dict[str, Any]]:
    """Reads the metrics of a run from its `metrics.jsonl`, as one dictionary for each step.

    Training and evaluation metrics of the same step are merged. A resumed run repeats the steps
    after its checkpoint; the last value of each metric is kept. Incomplete lines of killed runs are
    ignored.

    **Arguments:**

    - `path`: the path of the file.

    **Returns:**

    A list of dictionaries with `step`, `time` and the metrics, sorted by step.

    **Raises:**

    `FileNotFoundError` if the file does not exist, and `IsADirectoryError` if it is a directory.

    !!! Example

        ```python
        losses = [entry["loss"] for entry in rc.read_metrics("runs/lm/metrics.jsonl")]
        ```
    """
    path = local_path("path", path)
    if path.is_dir():
        raise IsADirectoryError(
            f"{path} is a directory. Pass the path of its file `metrics.jsonl`: "
            f"{path / 'metrics.jsonl'}."
        )
    steps: dict[int, JSONObject] = {}
    # A line that was cut off within a letter is no JSON either way.
    with io.TextIOWrapper(open_regular(path), "utf-8", "replace") as lines:
        for line in lines:
            try:
                entry = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(entry, dict) and isinstance(entry.get("step"), int):
                # Later lines count: of a resumed run, those that it computed last.
                steps.setdefault(entry["step"], {}).update(entry)
    return [steps[step] for step in sorted(steps)]
