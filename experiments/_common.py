"""What the experiments share: the directory of a run, and a plot of its metrics."""

import json
import math
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import optax

import redcoast as rc


def run_directory(root: Path, *, resume: bool, config: Any) -> Path:
    """A new directory named by the time, with the configuration in it, or the newest one."""
    runs = sorted(path.parent for path in root.glob("*/config.json"))
    if resume and not runs:
        raise SystemExit(f"There is no run to resume in {root}. Leave out --resume to start one.")
    if resume:
        return runs[-1]
    directory = root / time.strftime("%Y%m%d-%H%M%S")
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(asdict(config), default=str, indent=2))
    return directory


def plot_metric(directory: Path, name: str) -> float:
    """Draws a metric of training and evaluation to a PNG; returns its last value in evaluation."""
    import matplotlib

    matplotlib.use("Agg")  # there may be no display
    from matplotlib import pyplot as plt

    history = rc.read_metrics(directory / "metrics.jsonl")
    figure, axes = plt.subplots()
    for key, label, style in ((name, "training", "-"), (f"eval/{name}", "held out", "o-")):
        points = [(entry["step"], entry[key]) for entry in history if key in entry]
        axes.plot([x for x, _ in points], [y for _, y in points], style, label=label)
    axes.set(xlabel="step", ylabel=name.replace("_", " "))
    axes.legend()
    figure.savefig(directory / f"{name}.png", dpi=150)
    plt.close(figure)
    # A run that was interrupted early has none.
    return next((x[f"eval/{name}"] for x in reversed(history) if f"eval/{name}" in x), math.nan)


def make_optimizer(c: Any, examples: int, **adamw: float) -> optax.GradientTransformation:
    """AdamW with clipped gradients and the learning rate of `c`, which the log shows."""
    learning_rate = rc.learning_rate_schedule(
        c.learning_rate, examples=examples, batch_size=c.batch_size, steps=c.steps
    )
    adamw_with_rate = optax.inject_hyperparams(optax.adamw)(learning_rate, **adamw)
    return optax.chain(optax.clip_by_global_norm(1.0), adamw_with_rate)
