"""How far rounding moves the losses of a learner: between meshes, and from changed weights.

    python experiments/benchmarks/rounding.py --names ddpg maddpg

Each experiment runs in float64 with its default options: on one device, on several, and on one with
all initial weights changed by a relative 1e-15, which is a few units in the last place. Where the
losses on several devices differ from those on one no more than those of the changed weights do, the
difference between the meshes is rounding that the algorithm amplifies.
"""

import importlib
import json
import logging
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import equinox as eqx
import jax
import numpy as np
import tyro

import redcoast as rc

sys.path.insert(0, str(Path(__file__).parents[1]))
OPTIONS = {"ppo": ("--on-device",), "ddpg": ("--on-device",), "maddpg": ()}
MESHES, CHANGE = ("8", "2x4"), 1e-15


def losses(name: str, mesh: str, steps: int, change: float = 0.0) -> np.ndarray:
    """The losses of the first iterations, with all initial weights multiplied by 1 + `change`."""
    module = importlib.import_module(name)
    init_fn: Callable[..., Any] = module.init_fn

    def changed(*args: Any) -> Any:
        weights, rest = eqx.partition(init_fn(*args), eqx.is_inexact_array)
        return eqx.combine(jax.tree.map(lambda x: x * (1 + change), weights), rest)

    with tempfile.TemporaryDirectory() as directory, mock.patch.object(module, "init_fn", changed):
        args = ["--mesh", mesh, "--steps", steps, "--episodes", 2, "--directory", directory]
        module.main(tyro.cli(module.Config, args=[*map(str, args), *OPTIONS[name]]))
        (file,) = Path(directory).glob("*/metrics.jsonl")
        return np.array([x["loss"] for x in rc.read_metrics(file) if "loss" in x])


def differences(name: str, steps: int = 20) -> dict[str, np.ndarray]:
    """The distances from the losses on one device, of changed weights and of each mesh."""
    expected = losses(name, "1", steps)
    errors = {"changed weights": np.abs(losses(name, "1", steps, CHANGE) - expected)}
    for mesh in MESHES:
        errors[mesh] = np.abs(losses(name, mesh, steps) - expected)
    return errors


def main(
    names: tuple[str, ...] = ("ddpg", "maddpg"), steps: int = 20, out: Path | None = None
) -> None:
    """Prints the differences in each iteration.

    Args:
        names: The experiments: ppo, ddpg or maddpg.
        steps: The number of iterations.
        out: A JSON file for the differences.
    """
    rc.emulate_devices(8)
    jax.config.update("jax_enable_x64", True)
    logging.disable(logging.WARNING)  # mpe2 warns of each action in float64
    results: dict[str, dict[str, list[float]]] = {}
    for name in names:
        of_runs = differences(name, steps)
        results[name] = {run: errors.tolist() for run, errors in of_runs.items()}
        print(f"{name}: iteration, then the difference of {', '.join(of_runs)}")
        for i, row in enumerate(zip(*of_runs.values(), strict=True), 1):
            print(f"{i:3d} " + " ".join(f"{x:10.1e}" for x in row))
    if out is not None:
        out.write_text(json.dumps(results))


if __name__ == "__main__":
    tyro.cli(main)
