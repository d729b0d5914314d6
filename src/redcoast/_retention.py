"""The checkpoints of a run: where they are, how often one is made, and which are kept."""

import contextlib
import dataclasses
import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from jaxtyping import PyTree

from ._checkpoint import CheckpointMismatch, load_checkpoint, read_metadata, save_args

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
        for name in ("every", "keep"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"`Checkpoints({name}={value})` must be at least 1.")
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
    return sorted(int(p.name) for p in path.iterdir() if p.name.isdigit()) if path.is_dir() else []


def restore_newest(
    checkpoints: Checkpoints, like: PyTree, shardings: PyTree
) -> tuple[PyTree, dict[str, Any]] | None:
    """The newest whole checkpoint of a run and its metadata; nothing if there is none yet."""
    steps = saved_steps(checkpoints)
    if steps and not checkpoints.resume:
        raise ValueError(
            f"{checkpoints.path} holds checkpoints up to step {steps[-1]}, and `resume=False` asks "
            "to begin anew. Choose another directory, or remove this one."
        )
    damaged: list[Path] = []
    for step in reversed(steps):
        path = checkpoints.path / str(step)
        try:
            tree = load_checkpoint(path, like, shardings=shardings)
            metadata = read_metadata(path)["metadata"]
        except CheckpointMismatch:
            raise
        except (OSError, ValueError, KeyError) as error:
            problem = f"{type(error).__name__}: {error}".splitlines()[0]
            logger.warning("The checkpoint %s is damaged: %s", path, problem)
            damaged.append(path)
            continue
        _move_aside(damaged)
        return tree, metadata
    if damaged:
        raise ValueError(
            f"All checkpoints in {checkpoints.path} are damaged. Choose another directory to begin "
            "anew, or look into this one."
        )
    return None


def _move_aside(damaged: list[Path]) -> None:
    # Their steps will be saved again, and what is left of them may still be of use.
    for path in damaged:
        aside = path.with_name(f"{path.name}.damaged")
        path.rename(aside)
        logger.warning("It was moved to %s, and the checkpoint before it is used.", aside)


def _best_metrics(checkpoints: Checkpoints) -> dict[int, float]:
    """The best-metric of each checkpoint that was evaluated."""
    found = {}
    for step in saved_steps(checkpoints) if checkpoints.best is not None else []:
        with contextlib.suppress(OSError, ValueError, KeyError):  # damaged, and not needed now
            metrics = read_metadata(checkpoints.path / str(step))["metadata"]["metrics"]
            found[step] = metrics.get(checkpoints.metric, math.nan)
    return {step: value for step, value in found.items() if not math.isnan(value)}


class Saver:
    """Saves in the background, deletes what the policy does not keep, and waits at the end."""

    def __init__(self, checkpoints: Checkpoints):
        import orbax.checkpoint as ocp

        self._checkpoints = checkpoints
        self._values = _best_metrics(checkpoints)
        options = ocp.CheckpointManagerOptions(
            preservation_policy=_Keep(checkpoints, self._values), cleanup_tmp_directories=True
        )
        self._manager = ocp.CheckpointManager(checkpoints.path, options=options)

    def wants(self, step: int, metrics: Mapping[str, float], *, epoch_ended: bool) -> bool:
        """Whether the policy asks for a checkpoint at a step, and after an evaluation if any."""
        if self._checkpoints.every is None:
            return epoch_ended or bool(metrics)
        return step % self._checkpoints.every == 0 or self._is_best(metrics)

    def save(self, step: int, tree: PyTree, metadata: Mapping[str, Any]) -> None:
        """Begins to save a tree; its arrays may be donated as soon as this returns."""
        if step in self._manager.all_steps():
            return
        value = metadata["metrics"].get(self._checkpoints.metric, math.nan)
        if not math.isnan(value):
            self._values[step] = value
        self._manager.save(step, args=save_args(tree, metadata), force=True)

    def _is_best(self, metrics: Mapping[str, float]) -> bool:
        value = metrics.get(self._checkpoints.metric, math.nan)
        sign = -1.0 if self._checkpoints.mode == "min" else 1.0
        best = max((sign * x for x in self._values.values()), default=-math.inf)
        return self._checkpoints.best is not None and sign * value > best

    def __enter__(self) -> "Saver":
        return self

    def __exit__(self, *_: object) -> None:
        """Waits for what is being saved."""
        self._manager.wait_until_finished()
        self._manager.close()


@dataclasses.dataclass
class _Keep:
    """Orbax asks it which checkpoints to keep: the newest, and the best."""

    policy: Checkpoints
    values: dict[int, float]

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        steps = [info.step for info in checkpoints]
        keep = set(sorted(steps)[-self.policy.keep :])
        sign = -1.0 if self.policy.mode == "min" else 1.0
        evaluated = [step for step in steps if step in self.values]
        keep |= set(sorted(evaluated, key=lambda step: sign * self.values[step])[-1:])
        return [step in keep for step in steps]
