"""A logger that writes event files for TensorBoard."""

import functools as ft
import importlib
from collections.abc import Callable, Mapping
from os import PathLike
from pathlib import Path
from typing import Protocol, SupportsFloat, runtime_checkable

from ..core._errors import absolute_path
from ..core._frames import hide_frames
from ..core._packages import require_package
from ._loggers import RunInfo, join_run
from ._service_thread import ServiceThread


@runtime_checkable
class Writer(Protocol):
    """What is used of tensorboardX's `SummaryWriter`."""

    def add_text(self, tag: str, text_string: str, global_step: int, /) -> None: ...

    def add_scalar(self, tag: str, scalar_value: float, global_step: int, /) -> None: ...

    def close(self) -> None: ...


class TensorboardLogger:
    """The logger that `tensorboard_logger` creates."""

    wants_rates = True

    def __init__(self, path: Path, make_writer: Callable[[str], Writer]):
        self._path, self._make_writer = path, make_writer
        self._writer: Writer | None = None
        # A writer waits for its own thread, which ends when a disk is full.
        self._thread = ServiceThread("TensorBoard", self._finish)

    def start(self, run: RunInfo) -> None:
        self._put(ft.partial(self._describe, run))

    def __call__(self, metrics: Mapping[str, SupportsFloat], step: int) -> None:
        # So that the end of the run closes the file, also if another callable calls this logger.
        join_run(self)
        values = {name: float(value) for name, value in metrics.items()}
        self._put(ft.partial(self._write, values, step))

    def close(self) -> None:
        # A later call opens another file.
        self._thread.close()

    def _put(self, call: Callable[[], None]) -> None:
        if not self._thread.is_open:
            self._thread.open(self._begin)
        self._thread.put(call)

    def _begin(self) -> None:
        self._writer = self._make_writer(str(self._path))

    def _describe(self, run: RunInfo) -> None:
        writer = self._writer
        assert writer is not None
        if run.plan:
            # Lines that are indented by four spaces are code in Markdown.
            writer.add_text("plan", "\n".join(f"    {x}" for x in run.plan.splitlines()), run.step)
        for name, value in run.config.items():
            writer.add_text(f"config/{name}", str(value), run.step)

    def _write(self, values: Mapping[str, float], step: int) -> None:
        assert self._writer is not None
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def _finish(self) -> None:
        assert self._writer is not None
        self._writer.close()


@hide_frames
def tensorboard_logger(path: str | PathLike[str]) -> TensorboardLogger:
    """Creates a logger that writes metrics to event files, which TensorBoard shows.

    It needs the package tensorboardX, `pip install "redcoast[tensorboard]"`. A resumed run adds a
    file to the directory. `tensorboard --logdir runs` shows all runs below a directory. The files
    are written by a separate thread: if it fails or hangs, a warning is logged and training
    continues.

    **Arguments:**

    - `path`: the directory of the event files, such as `tensorboard` in the run's directory.

    **Returns:**

    A callable `(metrics, step) -> None` with the methods `start(run)` and `close()`. Pass it to
    `fit` as `log`, alone or in a list, or call it in your own logger.

    **Raises:**

    `ModuleNotFoundError` if tensorboardX is not installed.

    !!! Example

        ```python
        log = rc.tensorboard_logger("runs/lm/tensorboard")
        log({"loss": 2.5}, 1)
        log.close()  # `fit` does so at the end of a run
        ```
    """
    require_package("tensorboardX", "`tensorboard_logger`", '"redcoast[tensorboard]"')
    writer = importlib.import_module("tensorboardX").SummaryWriter
    return TensorboardLogger(absolute_path("path", path), writer)
