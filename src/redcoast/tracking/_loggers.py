"""Starts and closes the loggers of a run, which are callables `(metrics, step) -> None`.

A logger may also have the methods `start(run)`, called before the first step with a `RunInfo`;
`close()`, always called at the end; and `fail(error)`, called before `close()` if the run ends with
an error. Loggers of this package that are called by another logger join its run.
"""

import contextlib
import contextvars
import dataclasses
import functools as ft
import importlib.metadata
import itertools
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from time import monotonic
from typing import Any, SupportsFloat

from ..core._errors import absolute_path, check_integer, check_number
from ..core._output import say
from ..core._read_json import JSONObject
from ..core._user_functions import takes_keyword
from ._jsonl import jsonl_logger
from ._progress import ProgressLogger, progress_logger
from ._terminal import BOLD, DIM, columns, is_logged, styled

logger = logging.getLogger("redcoast")
Metrics = Mapping[str, SupportsFloat]
Logger = Callable[[dict[str, float], int], None]


class _Stop:
    """A value that a function in `log` returns to stop the run after the current step.

    [`redcoast.fit`][] then saves the state and returns it. Several processes all stop after the
    next step.

    !!! Example

        ```python
        log = lambda metrics, step: rc.STOP if metrics.get("loss", 1.0) < 0.01 else None
        ```
    """

    def __repr__(self) -> str:
        return "redcoast.STOP"


STOP = _Stop()
"""A value that a function in `log` returns to stop a run of [`redcoast.fit`][]."""


@dataclasses.dataclass(frozen=True)
class RunInfo:
    """The information about a run that its loggers receive before the first step.

    **Attributes:**

    - `directory`: the run's directory, if it has one.
    - `resumed`: whether the run was resumed from a checkpoint.
    - `plan`: the summary and the table of the plan, as text.
    - `config`: the settings of the run: batch size, number of examples and of parameters, mesh,
        devices, versions; from `fit`, also the optimizer, the compute dtype and others.
    - `step`, `steps`: the number of steps completed before this run, and the total number if known.
    - `rows`: how each array is sharded and why, as dicts with the same keys.
    """

    directory: Path | None = None
    resumed: bool = False
    plan: str = ""
    config: dict[str, Any] = dataclasses.field(default_factory=dict)
    step: int = 0
    steps: int | None = None
    rows: tuple[Mapping[str, object], ...] = ()

    def __post_init__(self) -> None:
        # Loggers write later, when the user's code may have called `os.chdir`.
        if self.directory is not None:
            object.__setattr__(self, "directory", absolute_path("directory", self.directory))


@dataclasses.dataclass(frozen=True)
class _Run:
    """The current run: its information, its loggers, and the stack that closes them."""

    info: RunInfo
    loggers: list[object]
    stack: contextlib.ExitStack


_current_run: contextvars.ContextVar[_Run | None] = contextvars.ContextVar("run", default=None)


def code_version() -> dict[str, str]:
    """Returns the versions of the libraries, and the git commit of the running script.

    Returns a dictionary with the versions of `python`, `redcoast`, `jax`, `equinox` and `optax`, as
    far as they are installed. If the directory of the script, or else the working directory, is in
    a git repository, it also has `git_commit` and `git_dirty` (`"true"` if tracked files differ
    from the commit).
    """
    versions = {"python": ".".join(map(str, sys.version_info[:3]))}
    for package in ("redcoast", "jax", "equinox", "optax"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    # The whole commit instead of a tag, and then `-dirty` if a tracked file has changed.
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    # Reading the repository must not lock it.
    options = {"env": {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}, "stderr": subprocess.DEVNULL}
    directories = [Path(".")]
    if script:
        directories.insert(0, Path(script).parent)
    for directory in directories:
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            text = subprocess.check_output(command, cwd=directory, text=True, timeout=2, **options)
            if described := text.strip():
                commit, _, dirty = described.partition("-")
                return versions | {"git_commit": commit, "git_dirty": str(bool(dirty)).lower()}
    return versions


def plain_data(value: object) -> Any:
    """Converts a value for JSON; dtypes, paths, functions and other objects become text."""
    if isinstance(value, Mapping):
        return {str(key): plain_data(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return list(map(plain_data, value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain_data(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, str | int | float | None):
        return value
    return getattr(value, "__name__", None) or str(value)


def plain_config(config: object) -> JSONObject:
    """The `config` that a user passes to a logger, as a dictionary. Raises if it cannot be one."""
    if config is None:
        return {}
    plain = plain_data(config)
    if not isinstance(plain, dict):
        raise TypeError(
            f"`config` is of type {type(config).__name__}; pass a mapping or a dataclass instance."
        )
    return plain


@ft.cache
def say_once(line: str) -> None:
    """Prints a line once per process."""
    say(line)


class _ConsoleLogger:
    def __init__(self, every: int | float | None, steps: int | None):
        self._every, self._steps = every, steps
        self._next, self._pending = 0.0, None

    def __call__(self, metrics: Metrics, step: int) -> None:
        run = join_run(self)
        of_evaluation = [key.startswith("eval/") for key in metrics]
        if not any(of_evaluation) and not self._is_due(step, run):
            # Printed at the end of the run, if no later step is.
            self._pending = (dict(metrics), step)
            return
        if not all(of_evaluation):
            self._pending = None
            self._next = monotonic() + (self._every or 0.0)
        say(_line(metrics, step))

    def _is_due(self, step: int, run: RunInfo | None) -> bool:
        if self._every is not None:
            return monotonic() >= self._next
        if self._steps is not None:
            return step % self._steps == 0
        if run is None:
            return is_logged(step, None)
        return is_logged(step, run.steps)

    def close(self) -> None:
        if self._pending is not None:
            say(_line(*self._pending))
            self._pending = None


def console_logger(*, every: int | float | None = None, steps: int | None = None) -> _ConsoleLogger:
    """Creates a logger that prints metrics to standard output, in aligned lines.

    The steps whose training metrics are printed depend only on the length of the run: by default,
    multiples of a round number that give 20 to 50 lines, and the last step. Metrics whose names
    begin with `eval/` are always printed. The lines do not break a progress bar.

    **Arguments:**

    - `steps`: the number of steps between lines of training metrics.
    - `every`: alternatively, the minimum time between such lines, in seconds; 0 prints all lines.

    **Returns:**

    A callable `(metrics, step) -> None`, to pass to `fit` as `log`.

    !!! Example

        ```python
        log = rc.console_logger(every=0)
        log({"loss": 2.5, "grad_norm": 1.25}, 100)
        # step     100  loss 2.5         grad_norm 1.25
        ```
    """
    if every is not None:
        check_number("every", every, least=0)
    if steps is not None:
        check_integer("steps", steps)
    if every is not None and steps is not None:
        raise ValueError("`every` is a time, and `steps` a number of steps; pass one of them.")
    return _ConsoleLogger(every, steps)


# Weights only matter for means over batches, and steps are rarely skipped.
_HIDDEN, _HIDDEN_IF_ZERO = ("weight", "eval/weight"), ("skipped", "skipped_total")


def _line(metrics: Metrics, step: int) -> str:
    """The metrics in aligned columns; on a terminal, in several lines if one is not wide enough."""
    head, room = f"step {step:>7,}", columns(sys.stdout)
    lines: list[list[str]] = [[styled(head, BOLD)]]
    used = len(head)
    for name, metric in metrics.items():
        if name in _HIDDEN or (name in _HIDDEN_IF_ZERO and float(metric) == 0):
            continue
        number = float(metric)
        value = f"{number:<10.4g}"
        # Counts are shown with all digits: 131,072 tokens instead of 1.311e+05.
        if number.is_integer() and abs(number) < 1e9:
            value = f"{number:<10,.0f}"
        length = len(f"  {name} {value.rstrip()}")
        # At least one metric stands in each line, however narrow the terminal is.
        if room is not None and used + length > room and len(lines[-1]) > 1:
            lines.append([" " * len(head)])
            used = len(head)
        lines[-1].append(f"{styled(name, DIM)} {value}")
        used += len(f"  {name} {value}")
    return "\n".join("  ".join(line).rstrip() for line in lines)


def all_loggers(log: object) -> list[Any]:
    """Returns the argument `log` of `fit` as a list, with a progress logger if it has none.

    Without loggers, evaluations are printed too.

    Raises `TypeError` if a logger is not callable.
    """
    if log is False:
        return []
    if log is None:
        return [_show_evaluation, progress_logger()]
    if isinstance(log, Sequence) and not isinstance(log, str) and not callable(log):
        logs = list(log)
        for i, member in enumerate(logs):
            _check_logger(f"log[{i}]", member)
    else:
        logs = [log]
        _check_logger("log", log)
    if not any(isinstance(member, ProgressLogger) for member in logs):
        logs.append(progress_logger())
    return logs


# The calls that create the loggers of this package.
_CALLS = {
    "console": "console_logger()",
    "jsonl": 'jsonl_logger("metrics.jsonl")',
    "progress": "progress_logger()",
    "tensorboard": 'tensorboard_logger("runs/lm")',
    "trackio": 'trackio_logger(project="lm")',
    "wandb": 'wandb_logger(project="lm")',
}


def _check_logger(name: str, log: object) -> None:
    """Raises `TypeError` unless an argument is a logger, and says how one is created."""
    if isinstance(log, str):
        call = _CALLS.get(log.lower(), "console_logger()")
        raise TypeError(
            f"`{name}` is {log!r}. It must be a callable `(metrics, step)`: pass a logger, such as "
            f"`redcoast.{call}`."
        )
    if log is True:
        raise TypeError(
            f"`{name}` is True. Leave it out to show the progress and the evaluations, or pass a "
            "logger, such as `redcoast.console_logger()`."
        )
    if not callable(log):
        raise TypeError(
            f"`{name}` is of type {type(log).__name__}. It must be a callable `(metrics, step)`; "
            "to use several loggers, pass a list of them."
        )
    factory = getattr(log, "__name__", "")
    call = _CALLS.get(factory.removesuffix("_logger"))
    if _is_own(log) and call is not None:
        raise TypeError(
            f"`{name}` is the function `{factory}`, which creates a logger. Pass what it returns, "
            f"such as `redcoast.{call}`."
        )


def _is_own(log: object) -> bool:
    """Whether a function, or the class of a logger, is defined in this package."""
    return str(getattr(log, "__module__", "")).startswith(f"{__package__}.")


def _show_evaluation(metrics: Metrics, step: int) -> None:
    if metrics and all(name.startswith("eval/") for name in metrics):
        say(_line(metrics, step))


def shows_progress(loggers: Sequence[object]) -> bool:
    """Returns whether a run with these loggers prints its plan and its progress."""
    return any(isinstance(x, ProgressLogger) and x.enabled for x in loggers)


def is_silent(log: object) -> bool:
    """Returns whether a logger shows nothing, and so need not be called."""
    return isinstance(log, ProgressLogger) and not log.enabled


def takes_state(log: Callable[..., object]) -> bool:
    """Returns whether a logger has a parameter `state`, for the state after the step."""
    return takes_keyword(log, "state")


def may_stop(log: object) -> bool:
    """Returns whether a logger may return `STOP`. Those of this package do not."""
    return not _is_own(log)


def start_loggers(
    logs: list[Any], run: RunInfo, stack: contextlib.ExitStack, *, writes: bool = True
) -> list[Logger]:
    """Starts the loggers of a run and returns them; the stack closes them.

    `writes` is whether this process writes the plan and the metrics into the run's directory.
    """
    if run.directory is not None and writes:  # first, because other loggers may raise an error
        _write_plan(run.directory, run)
        logs = [jsonl_logger(run.directory / "metrics.jsonl"), *logs]
    # Loggers that join later are closed together with the others, at the end of the run.
    joined = _Run(run, [], stack.enter_context(contextlib.ExitStack()))
    # Called before the loggers are closed, which no logger joins any more then.
    stack.callback(_current_run.reset, _current_run.set(joined))
    for each in logs:
        if hasattr(each, "start"):
            each.start(run)
        _close_with(joined, each)
    return logs


def _write_plan(directory: Path, run: RunInfo) -> None:
    """Writes `plan.txt`, or `plan_<step>.txt` if a run is resumed with another plan."""
    # `plan_500.txt`, `plan_500_2.txt` and so on.
    later = (f"plan_{run.step}{f'_{i}' * (i > 1)}.txt" for i in itertools.count(1))
    path = directory / "plan.txt"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        # An earlier plan stays, since earlier steps were trained with it.
        while path.exists() and path.read_text("utf-8", errors="replace") != run.plan + "\n":
            path = directory / next(later)
        path.write_text(run.plan + "\n", "utf-8")
    except OSError as error:
        logger.warning("The plan could not be written to %s: %s", path, error)


def join_run(logger: object) -> RunInfo | None:
    """Adds a logger to the current run, which closes it, and returns the information about the run;
    `None` outside a run."""
    run = _current_run.get()
    if run is None:
        return None
    # A logger that joins twice is closed once.
    if not any(logger is known for known in run.loggers):
        _close_with(run, logger)
    return run.info


def _close_with(run: _Run, logger) -> None:
    run.loggers.append(logger)
    if hasattr(logger, "close"):
        run.stack.callback(logger.close)
    # The stack is left in reverse, so `fail` comes before `close`.
    if hasattr(logger, "fail"):
        run.stack.push(ft.partial(_fail, logger))


def _fail(log, _: object, error: BaseException | None, __: object) -> None:
    if error is not None:
        log.fail(error)
