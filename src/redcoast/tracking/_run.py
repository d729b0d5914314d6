"""Loggers: things to pass to `fit` as `log`, a callable `(metrics, step) -> None`.

A logger may also have `start(run)`, called before the first step with a `RunInfo`; `close()`,
called at the end, whatever the end is; and `fail(error)`, called before that if it is an error.
Those of this package that another logger calls join its run themselves.
"""

import contextlib
import contextvars
import dataclasses
import functools as ft
import importlib.metadata
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from time import monotonic
from typing import Any, SupportsFloat

from ._jsonl import metrics_file

Metrics = Mapping[str, SupportsFloat]
Logger = Callable[[dict[str, float], int], None]


@dataclasses.dataclass(frozen=True)
class RunInfo:
    """What a logger is told before the first step.

    **Attributes:**

    - `directory`: the run's directory, if it has one.
    - `resumed`: whether the run goes on from a checkpoint.
    - `step`, `steps`: the number of steps done before, and of those at the end, if it is known.
    - `plan`: the table of shardings, as text.
    - `config`: what the loop knows: batch size, mesh, number of parameters, versions.
    """

    directory: Path | None
    resumed: bool
    plan: str
    config: dict[str, Any]
    step: int = 0
    steps: int | None = None


@dataclasses.dataclass(frozen=True)
class _Run:
    """A run under way: what its loggers are told, those that it knows, and what ends them."""

    info: RunInfo
    loggers: list[Any]
    stack: contextlib.ExitStack


_under_way: contextvars.ContextVar[_Run | None] = contextvars.ContextVar("run", default=None)


def code_version(*packages: str) -> dict[str, str]:
    """The versions of the libraries, and the git commit of the running script.

    **Arguments:**

    - `packages`: further packages whose versions to include.

    **Returns:**

    A dictionary from `python`, `redcoast`, `jax`, `equinox`, `optax` and `packages` to versions
    (without those that are not installed), and `git_commit` and `git_dirty` (`"true"` if tracked
    files differ from the commit) where the script's directory, or else the working directory,
    belongs to a git repository.
    """
    versions = {"python": ".".join(map(str, sys.version_info[:3]))}
    for package in ("redcoast", "jax", "equinox", "optax", *packages):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions | _git_version()


def _git_version() -> dict[str, str]:
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    for directory in ([Path(script).parent] if script else []) + [Path(".")]:
        described = _describe(directory)
        if described:
            commit, _, dirty = described.partition("-")
            return {"git_commit": commit, "git_dirty": "true" if dirty else "false"}
    return {}


def _describe(directory: Path) -> str:
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    # A look at the repository must not take its lock.
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
    try:
        result = subprocess.run(
            command,
            cwd=directory,
            env=environment,
            capture_output=True,
            text=True,
            timeout=2,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return result.stdout.strip()


def say(line: str) -> None:
    """Prints a line to standard output without tearing a progress bar."""
    # If nobody has imported tqdm, there is no bar.
    tqdm = getattr(sys.modules.get("tqdm"), "tqdm", None)
    (print if tqdm is None else tqdm.write)(line)
    sys.stdout.flush()


class _ConsoleLogger:
    def __init__(self, every: int | float):
        self._every, self._next, self._pending = every, 0.0, None

    def __call__(self, metrics: Metrics, step: int) -> None:
        join_run(self)
        now = monotonic()
        if now < self._next and not any(key.startswith("eval/") for key in metrics):
            self._pending = (dict(metrics), step)
            return
        if not all(key.startswith("eval/") for key in metrics):
            self._next, self._pending = now + self._every, None
        say(_line(metrics, step))

    def close(self) -> None:
        if self._pending is not None:
            say(_line(*self._pending))
            self._pending = None


def console_logger(*, every: int | float = 10.0) -> _ConsoleLogger:
    """A logger that prints metrics to standard output, one aligned line now and then.

    Training metrics are printed at most once in `every` seconds, and once more at the end;
    metrics whose names begin with `eval/`, always. A progress bar stays whole.

    !!! example

        ```python
        log = rc.console_logger(every=0)
        log({"loss": 2.5, "grad_norm": 1.25}, 100)
        # step     100  loss 2.5         grad_norm 1.25
        ```

    **Arguments:**

    - `every`: seconds between lines of training metrics; 0 prints each.

    **Returns:**

    A callable `(metrics, step) -> None`, to pass to `fit` as `log`.
    """
    if not isinstance(every, int | float):
        raise TypeError(f"every is {every!r}; it is a number of seconds.")
    if not every >= 0:
        raise ValueError(f"every is {every}; it is a number of seconds, 0 or more.")
    return _ConsoleLogger(every)


def _line(metrics: Metrics, step: int) -> str:
    values = [f"{key} {_number(float(value)):<10}" for key, value in metrics.items()]
    return "  ".join([f"step {step:>7,}", *values]).rstrip()


def _number(value: float) -> str:
    # Counts are shown whole, so that 131072 tokens are not 1.311e+05.
    return f"{value:,.0f}" if value.is_integer() and abs(value) < 1e9 else f"{value:.4g}"


def listed_loggers(log: Any) -> list[Any]:
    """The loggers that `fit` is given: none, one, or several.

    **Raises:**

    `TypeError` if one cannot be called.
    """
    if log is None:
        return []
    several = isinstance(log, Sequence) and not callable(log)
    logs = list(log) if several else [log]
    for i, each in enumerate(logs):
        if not callable(each):
            raise TypeError(
                f"`{f'log[{i}]' if several else 'log'}` is of type {type(each).__name__}. It must "
                "be a callable `(metrics, step)`; to log to several places, pass a list of them."
            )
    return logs


def start_loggers(
    log: Any, run: RunInfo, stack: contextlib.ExitStack, *, progress: Logger | None = None
) -> list[Logger]:
    """The loggers of a run, told that it starts, and closed with the stack."""
    logs = [*listed_loggers(log), *([] if progress is None else [progress])]
    if run.directory is not None:  # before a logger that may raise
        logs = [metrics_file(run.directory / "metrics.jsonl"), *logs]
    # What joins later ends where the others do, after all else of the run.
    joined = _Run(run, [], stack.enter_context(contextlib.ExitStack()))
    stack.callback(_under_way.reset, _under_way.set(joined))
    for each in logs:
        if hasattr(each, "start"):
            each.start(run)
        _end_with(joined, each)
    return logs


def join_run(logger: Any) -> RunInfo | None:
    """What a logger is told of the run under way, which ends it, although only another calls it;
    nothing outside of a run."""
    run = _under_way.get()
    if run is None:
        return None
    if not any(logger is known for known in run.loggers):
        _end_with(run, logger)
    return run.info


def _end_with(run: _Run, logger: Any) -> None:
    run.loggers.append(logger)
    if hasattr(logger, "close"):
        run.stack.callback(logger.close)
    if hasattr(logger, "fail"):
        run.stack.push(ft.partial(_fail, logger))


def _fail(log: Any, kind: Any, error: BaseException | None, traceback: Any) -> None:
    if error is not None:
        log.fail(error)
