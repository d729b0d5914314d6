"""Shared by the experiments: options for several processes, run directories, and plots."""

import json
import math
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from jax.experimental.multihost_utils import broadcast_one_to_all

import redcoast as rc


@dataclass(frozen=True)
class Hosts:
    """Options for several processes that run one script together; see docs/hosts.md."""

    coordinator: str | None = None  # host:port of process 0; by default from the launcher
    processes: int | None = None  # number of processes; by default from the launcher
    process_id: int | None = None  # index of this process, from 0; by default from the launcher
    local_devices: int | None = None  # number of CPU devices to emulate in each process


def run_directory(root: Path, *, resume: bool, config: Any) -> Path:
    """Creates a directory named after the time, with the configuration in it; to resume, returns
    the newest one."""
    # Process 0 chooses for all: clocks differ, and shared file systems may not be in sync.
    runs = sorted(path.parent.name for path in root.glob("*/config.json"))
    name = broadcast_text((runs or [""])[-1] if resume else time.strftime("%Y%m%d-%H%M%S"))
    if not name:
        raise SystemExit(f"There is no run to resume in {root}. Leave out --resume to start one.")
    if not resume and jax.process_index() == 0:
        (root / name).mkdir(parents=True)
        text = json.dumps(asdict(config), default=str, indent=2)
        (root / name / "config.json").write_text(text)
    return root / name


def broadcast_text(text: str) -> str:
    """Broadcasts a text from process 0 to all processes."""
    encoded = np.frombuffer(text.encode(), np.uint8)
    room = np.zeros(int(broadcast_one_to_all(np.int32(encoded.size))), np.uint8)
    room[: encoded.size] = encoded[: room.size]
    return bytes(np.asarray(broadcast_one_to_all(room), np.uint8)).decode(errors="replace")


def print_once(text: str, end: str = "\n") -> None:
    """Prints a text from process 0 only."""
    if jax.process_index() == 0:
        print(text, end=end, flush=True)


def exit_if_stopped(steps_done: int, steps: int) -> None:
    """Exits with `EX_TEMPFAIL` if the run was stopped, so that a launcher can start it again."""
    if steps_done < steps:
        raise SystemExit(os.EX_TEMPFAIL)


def plot_metric(directory: Path, name: str) -> float:
    """Plots a metric in training and validation to a PNG; returns its last value in validation."""
    if jax.process_index() > 0:
        return math.nan  # process 0 has the metrics
    import matplotlib

    matplotlib.use("Agg")  # there may be no display
    from matplotlib import pyplot as plt

    history = rc.read_metrics(directory / "metrics.jsonl")
    figure, axes = plt.subplots()
    for key, label, style in ((name, "training", "-"), (f"eval/{name}", "validation", "o-")):
        points = [(entry["step"], entry[key]) for entry in history if key in entry]
        axes.plot([x for x, _ in points], [y for _, y in points], style, label=label)
    axes.set(xlabel="step", ylabel=name.replace("_", " "))
    axes.legend()
    figure.savefig(directory / f"{name}.png", dpi=150)
    plt.close(figure)
    # A run that was interrupted early has no evaluation.
    return next((x[f"eval/{name}"] for x in reversed(history) if f"eval/{name}" in x), math.nan)


def make_optimizer(c: Any, examples: int, **adamw: float) -> optax.GradientTransformation:
    """Creates AdamW with gradient clipping and a logged learning-rate schedule."""
    learning_rate = rc.learning_rate_schedule(
        c.learning_rate, examples=examples, batch_size=c.batch_size, steps=c.steps
    )
    adamw_with_rate = optax.inject_hyperparams(optax.adamw)(learning_rate, **adamw)
    return optax.chain(optax.clip_by_global_norm(1.0), adamw_with_rate)
