"""The checkpoints of a run: where they are, which is the newest whole one, and which are kept."""

import contextlib
import dataclasses
import itertools
import logging
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import jax
from jaxtyping import PyTree

from ..core._errors import check_kind
from ..distributed._kv_store import decide, exchange, is_main
from ._orbax import CheckpointDamaged
from ._tree import check_whole, load_arrays, read_metadata

logger = logging.getLogger("redcoast")


@dataclasses.dataclass(frozen=True)
class Checkpoints:
    """Where and how often `fit` saves its state, and which checkpoints it keeps.

    **Arguments:**

    - `directory`: the directory of the run. Checkpoints go to `checkpoints/<step>` below it, and
        the metrics to `metrics.jsonl`.
    - `every`: after how many steps to save; at each evaluation or end of an epoch by default. The
        end of training is always saved.
    - `keep`: how many of the newest to keep.
    - `best`: the evaluation metric (`"loss"`, `"rouge2"`, ...) whose best checkpoint is kept as
        well; one is then made at each evaluation that is the best so far.
    - `mode`: whether the `"min"` or the `"max"` of `best` is the best.
    - `resume`: whether to go on from the newest checkpoint in `directory`, if there is one. With
        `False`, a directory that holds checkpoints is an error.

    !!! Example

        ```python
        rc.Checkpoints("runs/lm", every=500, keep=3, best="rouge2", mode="max")
        ```
    """

    directory: str | Path
    _: dataclasses.KW_ONLY
    every: int | None = None
    keep: int = 1
    best: str | None = None
    mode: Literal["min", "max"] = "min"
    resume: bool = True

    def __post_init__(self) -> None:
        check_kind("directory", self.directory, (str, Path), "a path")
        for name in ("every", "keep"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, int):
                raise TypeError(f"`Checkpoints({name}={value!r})` must be an integer.")
            if value is not None and value < 1:
                raise ValueError(f"`Checkpoints({name}={value})` must be at least 1.")
        if not isinstance(self.best, str | None):
            raise TypeError(f"`Checkpoints(best={self.best!r})` must be the name of a metric.")
        if self.mode not in ("min", "max"):
            raise ValueError(f"`Checkpoints(mode={self.mode!r})` must be 'min' or 'max'.")

    @property
    def metric(self) -> str:
        """The name of the best-metric, as evaluation reports it."""
        return (self.best or "").removeprefix("eval/")

    @property
    def path(self) -> Path:
        return Path(self.directory).expanduser().absolute() / "checkpoints"


def saved_steps(checkpoints: Checkpoints) -> list[int]:
    """The steps of which there is a checkpoint, oldest first."""
    path = checkpoints.path
    names = [p.name for p in path.iterdir()] if path.is_dir() else []
    return sorted(int(name) for name in names if re.fullmatch("0|[1-9][0-9]*", name))


def newest_checkpoint(checkpoints: Checkpoints | None) -> str:
    """A sentence that says where the newest checkpoint of a run is."""
    steps = []
    with contextlib.suppress(OSError):
        steps = saved_steps(checkpoints) if checkpoints else []
    if not steps or not checkpoints:
        return "There is no checkpoint."
    return f"The last good checkpoint is {checkpoints.path / str(steps[-1])}."


def restore_newest(
    checkpoints: Checkpoints, like: PyTree, shardings: PyTree
) -> tuple[PyTree, dict[str, Any]] | None:
    """The newest whole checkpoint of a run and its metadata; nothing if there is none yet."""
    # All processes take those that process 0 sees, whatever the others see of a shared directory.
    steps = decide("list of checkpoints", saved_steps(checkpoints))
    if steps and not checkpoints.resume:
        raise ValueError(
            f"{checkpoints.path} holds checkpoints up to step {steps[-1]}, and `resume=False` asks "
            "to begin anew. Choose another directory, or remove this one."
        )
    damaged: list[Path] = []
    for step in reversed(steps):
        path = checkpoints.path / str(step)
        found = _restore(path, like, shardings)
        if not isinstance(found, str):
            if is_main():
                _move_aside(damaged, path)
            return found
        logger.warning("%s", found)
        damaged.append(path)
    if damaged:
        raise ValueError(
            f"All checkpoints in {checkpoints.path} are damaged. Choose another directory to begin "
            "anew, or look into this one."
        )
    return None


def _restore(path: Path, like: PyTree, shardings: PyTree) -> tuple[PyTree, dict[str, Any]] | str:
    """The state and the metadata of a checkpoint, or how it is damaged."""
    problems = [
        problem for problem in exchange("verdict on a checkpoint", _damage(path)) if problem
    ]
    if problems:
        return problems[0]
    document = read_metadata(path)
    try:
        tree = load_arrays(path, document, like, shardings=shardings)
    except CheckpointDamaged as error:  # of an older version, without checksums
        return str(error)
    return tree, document["metadata"]


def _damage(path: Path) -> str | None:
    """How a checkpoint is damaged, as far as this process reads it: its share of the files."""
    try:
        check_whole(path, part=jax.process_index(), parts=jax.process_count())
        read_metadata(path)
    except CheckpointDamaged as error:
        return str(error)
    return None


def _move_aside(damaged: list[Path], used: Path) -> None:
    # Their steps will be saved again, and what is left of them may still be of use.
    for path in damaged:
        names = (f"{path.name}.damaged{count or ''}" for count in itertools.count())
        aside = next(p for p in map(path.with_name, names) if not (p.exists() or p.is_symlink()))
        path.rename(aside)
        logger.warning("%s was moved to %s, and %s is used.", path, aside, used)


def best_metrics(checkpoints: Checkpoints) -> dict[int, float]:
    """The best-metric of each checkpoint that was evaluated."""
    found = {}
    for step in saved_steps(checkpoints) if checkpoints.best is not None else []:
        with contextlib.suppress(OSError, ValueError):  # damaged, and not needed now
            metrics = read_metadata(checkpoints.path / str(step))["metadata"].get("metrics", {})
            found[step] = metric_of(checkpoints, metrics)
    return {step: value for step, value in found.items() if not math.isnan(value)}


def metric_of(checkpoints: Checkpoints, metrics: Mapping[str, Any]) -> float:
    """The value of the best-metric; not a number if it was not evaluated."""
    value = metrics.get(checkpoints.metric, math.nan)
    return float(value) if isinstance(value, int | float) else math.nan


def is_best(checkpoints: Checkpoints, value: float, values: Mapping[int, float]) -> bool:
    """Whether a value of the best-metric is better than those of all checkpoints."""
    sign = -1.0 if checkpoints.mode == "min" else 1.0
    best = max((sign * x for x in values.values()), default=-math.inf)
    return checkpoints.best is not None and sign * value > best


def steps_to_delete(
    checkpoints: Checkpoints, steps: Iterable[int], values: Mapping[int, float]
) -> list[int]:
    """Which of the saved steps the policy does not keep: all but the newest, and the best."""
    steps = sorted(steps)
    sign = -1.0 if checkpoints.mode == "min" else 1.0
    evaluated = [step for step in steps if step in values]
    best = sorted(evaluated, key=lambda step: sign * values[step])[-1:]
    return [step for step in steps[: -checkpoints.keep] if step not in best]
