"""A logger for trackio, which keeps the metrics of runs on this machine."""

import contextlib
import importlib
import json
from collections.abc import Mapping
from typing import Any, SupportsFloat

from ..core._frames import hide_frames
from ._loggers import RunInfo, code_version, join_run, plain_data


class TrackioLogger:
    """The logger that `trackio_logger` creates."""

    wants_rates = True

    def __init__(self, trackio: Any, options: dict[str, Any]):
        self._trackio, self._options = trackio, options
        self._run: Any | None = None

    def start(self, run: RunInfo) -> None:
        if self._run is None:
            self._run = self._trackio.init(**self._arguments(run))

    def __call__(self, metrics: Mapping[str, SupportsFloat], step: int) -> None:
        self.start(join_run(self) or RunInfo())
        assert self._run is not None
        self._run.log({name: float(value) for name, value in metrics.items()}, step=step)

    def close(self) -> None:
        run, self._run = self._run, None
        if run is not None:
            run.finish()

    def _arguments(self, run: RunInfo) -> dict[str, Any]:
        about = {"run": plain_data(run.config or code_version()), "plan": run.plan}
        arguments = {**self._options, "config": {**self._options["config"], **about}}
        if run.directory is None:
            return arguments
        # A run is continued by its name, which is kept beside its checkpoints.
        file = run.directory / "trackio.json"
        saved: dict[str, str] = {}
        if run.resumed:
            arguments.setdefault("resume", "allow")
            with contextlib.suppress(OSError, ValueError):
                saved = json.loads(file.read_text("utf-8"))
        if arguments.get("name") is None:
            arguments["name"] = saved.get("name", run.directory.name)
        run.directory.mkdir(parents=True, exist_ok=True)
        kept = {name: arguments[name] for name in ("name", "project")}
        file.write_text(json.dumps(kept) + "\n", "utf-8")
        return arguments


@hide_frames
def trackio_logger(
    *, project: str, config: Any = None, name: str | None = None, **init_options: Any
) -> TrackioLogger:
    """Creates a logger that writes metrics to trackio, whose dashboard `trackio show` opens.

    It needs the package trackio, `pip install "redcoast[trackio]"`. Without other options, the
    metrics stay on this machine. The configuration and the plan are recorded. A run that `fit`
    resumes continues the same trackio run, whose name is in `trackio.json` in the run's directory.

    !!! example

        ```py
        log = rc.trackio_logger(project="lm", config={"dim": 256})
        log({"loss": 2.5}, 1)
        log.close()  # `fit` does so at the end of a run
        ```

    **Arguments:**

    - `project`: the trackio project.
    - `config`: the experiment's settings: a mapping or a dataclass.
    - `name`: the run's name; by default that of the run's directory, or one that trackio generates.
    - `init_options`: other arguments for `trackio.init` (`space_id`, `group`, ...).

    **Returns:**

    A callable `(metrics, step) -> None` with the methods `start(run)` and `close()`. Pass it to
    `fit` as `log`, alone or in a list, or call it in your own logger.

    **Raises:**

    `ModuleNotFoundError` if trackio is not installed. `TypeError` if `project` is not a string or
    `config` is neither a mapping nor a dataclass.
    """
    if not isinstance(project, str):
        raise TypeError(f"`project` must be the name of a trackio project, but is {project!r}.")
    plain = plain_data({} if config is None else config)
    if not isinstance(plain, dict):
        raise TypeError(
            f"`config` is of type {type(config).__name__}; pass a mapping or a dataclass instance."
        )
    try:
        trackio = importlib.import_module("trackio")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "`trackio_logger` needs the package trackio, which is not installed: "
            'pip install "redcoast[trackio]"'
        ) from error
    return TrackioLogger(
        trackio, {"project": project, "name": name, "config": plain, **init_options}
    )
