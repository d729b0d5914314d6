"""The checkpoints of a run: where they are stored, which one is restored, and which are kept."""

import contextlib
import dataclasses
import itertools
import logging
import math
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import NoneType
from typing import Literal

import jax
from jaxtyping import PyTree

from ..core._errors import check_choice, check_flag, check_integer, check_kind
from ..core._frames import hide_frames_of_init
from ..core._read_json import JSONObject
from ..distributed._kv_store import decide, exchange, is_main
from ._orbax import CheckpointDamaged
from ._tree import (
    CheckpointMismatch,
    check_whole,
    load_arrays,
    read_metadata,
    storable_path,
)

logger = logging.getLogger("redcoast")
NO_CHECKPOINT = "There is no checkpoint."


@hide_frames_of_init
@dataclasses.dataclass(frozen=True)
class Checkpoints:
    """The checkpoints of [`redcoast.fit`][]: the directory, when to save, and which ones to keep.

    **Arguments:**

    - `directory`: the directory of the run. A relative path is resolved at once, so that a later
        `os.chdir` does not change it. Checkpoints are written to `checkpoints/<step>` inside
        it, and the metrics to `metrics.jsonl`.
    - `every`: the number of steps between checkpoints. By default, `fit` saves at each evaluation
        and at the end of each epoch. It always saves at the end of training.
    - `keep`: the number of newest checkpoints to keep. With 1, there is no older one to fall back
        on if the newest is damaged.
    - `best`: the evaluation metric (`"loss"`, `"rouge2"`, ...) whose best checkpoint is kept too.
        `fit` then also saves at each evaluation that is the best so far.
    - `mode`: `"min"` if a smaller value of `best` is better, `"max"` if a larger one is. The
        default for `"loss"` is `"min"`; other metrics require a mode.
    - `resume`: whether to resume from the newest checkpoint in `directory`, if it has one. With
        `False`, a directory that contains checkpoints raises an error.

    **Raises:**

    `TypeError` or `ValueError` if an argument has the wrong type or an impossible value.

    !!! Example

        ```python
        rc.Checkpoints("runs/lm", every=500, keep=3, best="rouge2", mode="max")
        ```
    """

    directory: str | Path
    _: dataclasses.KW_ONLY
    every: int | None = None
    keep: int = 2
    best: str | None = None
    mode: Literal["min", "max"] | None = None
    resume: bool = True
    _path: Path = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_kind("directory", self.directory, (str, Path), "a path")
        if self.directory == "":
            raise ValueError(
                "`directory` is empty. Pass the path of a directory, such as `runs/first`."
            )
        path = storable_path("directory", self.directory) / "checkpoints"
        object.__setattr__(self, "_path", path)
        check_integer("Checkpoints.keep", self.keep)
        if self.every is not None:
            check_integer("Checkpoints.every", self.every)
        check_flag("Checkpoints.resume", self.resume)
        check_kind("Checkpoints.best", self.best, (str, NoneType), "the name of a metric")
        if self.mode is not None:
            check_choice("Checkpoints.mode", self.mode, ("min", "max"))
        if self.best is not None and self.mode is None:
            mode = default_mode(self.metric, f"Checkpoints(best={self.best!r})")
            # The dataclass is frozen.
            object.__setattr__(self, "mode", mode)

    @property
    def metric(self) -> str:
        """The name of the metric `best`, as the evaluation reports it."""
        return (self.best or "").removeprefix("eval/")

    @property
    def path(self) -> Path:
        """The absolute path of the directory of the checkpoints."""
        return self._path


def default_mode(metric: str, caller: str) -> Literal["min", "max"]:
    """The default mode: `"min"` for the loss. Other metrics have none.

    Raises `ValueError` for a metric other than the loss.
    """
    if metric != "loss":
        raise ValueError(
            f"`{caller}` needs a `mode`: pass mode='max' if a larger {metric!r} is better, as for "
            "an accuracy, or mode='min' if a smaller one is."
        )
    return "min"


def as_checkpoints(checkpoints: object) -> Checkpoints | None:
    """Returns the `Checkpoints` of a run, from themselves or from the path of its directory."""
    if checkpoints is None or isinstance(checkpoints, Checkpoints):
        return checkpoints
    if isinstance(checkpoints, str | os.PathLike):
        return Checkpoints(os.fspath(checkpoints))
    words = "a `redcoast.Checkpoints`, or the path of the run's directory"
    check_kind("checkpoints", checkpoints, Checkpoints, words)
    return None


def saved_steps(checkpoints: Checkpoints) -> list[int]:
    """The steps that have a checkpoint, oldest first."""
    path = checkpoints.path
    entries = []
    if path.is_dir():
        entries = path.iterdir()
    # Without leading zeros, so that a step has one name.
    steps = [entry for entry in entries if re.fullmatch("0|[1-9][0-9]*", entry.name)]
    return sorted(int(entry.name) for entry in steps if entry.is_dir())


def newest_checkpoint(checkpoints: Checkpoints | None) -> str:
    """A sentence that says where the newest checkpoint of a run is."""
    steps = []
    if checkpoints:
        with contextlib.suppress(OSError):
            steps = saved_steps(checkpoints)
    if not steps or not checkpoints:
        return NO_CHECKPOINT
    return f"The last good checkpoint is {checkpoints.path / str(steps[-1])}."


def restore_newest(
    checkpoints: Checkpoints, like: PyTree, shardings: PyTree
) -> tuple[PyTree, JSONObject] | None:
    """Restores the newest undamaged checkpoint of a run and its metadata; `None` without one.

    Damaged checkpoints that are newer are renamed to `<step>.damaged`.

    Raises `ValueError` if there are checkpoints and `resume=False`, or if all of them are damaged.
    """
    # All processes use the list of process 0: a shared directory may look different to others.
    steps = decide("the list of checkpoints", saved_steps(checkpoints))
    if steps and not checkpoints.resume:
        raise ValueError(
            f"{checkpoints.path} holds checkpoints up to step {steps[-1]}, and `resume=False` "
            "requests a new run. Choose another directory, or remove this one."
        )
    damaged: list[Path] = []
    # The newest that is not damaged; older ones only if newer ones are.
    for step in reversed(steps):
        path = checkpoints.path / str(step)
        restored = _restore(path, like, shardings)
        # A text says what is damaged.
        if not isinstance(restored, str):
            if is_main():
                _move_aside(damaged, path)
            return restored
        logger.warning("%s", restored)
        damaged.append(path)
    if damaged:
        raise ValueError(
            f"All checkpoints in {checkpoints.path} are damaged. Choose another directory to start "
            "a new run, or inspect this one."
        )
    return None


def _restore(path: Path, like: PyTree, shardings: PyTree) -> tuple[PyTree, JSONObject] | str:
    """The state and the metadata of a checkpoint, or a sentence that says how it is damaged."""
    own = None  # about the first damaged file in this process's share of the files
    try:
        check_whole(path, part=jax.process_index(), parts=jax.process_count())
        # The result is not used yet: this is where a damaged document raises.
        read_metadata(path)
    except CheckpointDamaged as error:
        own = str(error)
    if problems := [x for x in exchange("the check of a checkpoint", own) if x]:
        return problems[0]
    # In all processes: each has found that the files are complete, or all raise an error.
    document = read_metadata(path)
    if "step" not in document["metadata"]:
        raise CheckpointMismatch(
            f"{path} was saved by `redcoast.save_checkpoint`, and not by a run. Choose another "
            "directory for the run; `redcoast.load_checkpoint` reads this checkpoint."
        )
    try:
        tree = load_arrays(path, document, like, shardings=shardings, resuming=True)
    except CheckpointDamaged as error:  # written by an older version, without checksums
        return str(error)
    return tree, document["metadata"]


def _move_aside(damaged: list[Path], used: Path) -> None:
    # Their steps will be saved again, and the damaged files may still be of use.
    for path in damaged:
        names = (f"{path.name}.damaged{count or ''}" for count in itertools.count())
        aside = next(p for p in map(path.with_name, names) if not (p.exists() or p.is_symlink()))
        path.rename(aside)
        logger.warning("%s was moved to %s, and %s is used instead.", path, aside, used)


def best_metrics(checkpoints: Checkpoints) -> dict[int, float]:
    """The value of the metric `best` at each checkpoint that was evaluated."""
    values: dict[int, float] = {}
    if checkpoints.best is None:
        return values
    for step in saved_steps(checkpoints):
        with contextlib.suppress(OSError, ValueError):  # a damaged checkpoint does not count
            metrics = read_metadata(checkpoints.path / str(step))["metadata"].get("metrics", {})
            values[step] = metric_of(checkpoints, metrics)
    return {step: value for step, value in values.items() if not math.isnan(value)}


def metric_of(checkpoints: Checkpoints, metrics: Mapping[str, object]) -> float:
    """The value of the metric `best`; NaN if it was not evaluated."""
    value = metrics.get(checkpoints.metric, math.nan)
    if isinstance(value, int | float):
        return float(value)
    return math.nan


def is_best(checkpoints: Checkpoints, value: float, values: Mapping[int, float]) -> bool:
    """Whether a value of the metric `best` is better than in all checkpoints."""
    sign = _sign(checkpoints)
    best = max((sign * x for x in values.values()), default=-math.inf)
    # False if the value is NaN.
    return checkpoints.best is not None and sign * value > best


def _sign(checkpoints: Checkpoints) -> float:
    """The factor by which values of the metric `best` are multiplied, so that more is better."""
    if checkpoints.mode == "min":
        return -1.0
    return 1.0


def steps_to_delete(
    checkpoints: Checkpoints, steps: Iterable[int], values: Mapping[int, float]
) -> list[int]:
    """The saved steps to delete: all except the newest `keep` and the best one."""
    steps = sorted(steps)
    sign = _sign(checkpoints)
    evaluated = [step for step in steps if step in values]
    # Of several with the best value, the newest: the sort keeps their order.
    best = sorted(evaluated, key=lambda step: sign * values[step])[-1:]
    return [step for step in steps[: -checkpoints.keep] if step not in best]
