"""Plots the learning curves of the experiments that `examples.py` has run, one line for each seed.

python experiments/benchmarks/examples.py --names ppo ddpg
python experiments/benchmarks/curves.py
"""

from pathlib import Path
from typing import Any

import matplotlib
import tyro

import redcoast as rc

matplotlib.use("Agg")
from examples import DOCS, EXAMPLES
from matplotlib import pyplot as plt

REWARDS = ("reward", "length", "kl")  # of GRPO


def main(runs: Path = Path("runs/examples")) -> None:
    """Writes docs/images/learning_curves.png, and docs/images/grpo.png for GRPO.

    Args:
        runs: The directory that `examples.py` wrote to.
    """
    drawn = [x for x in EXAMPLES if x.curve and files_of(runs, x.name)]
    if not drawn:
        raise SystemExit(f"{runs} has no run of an experiment with a learning curve.")
    columns = min(3, len(drawn))
    figure, axes = grid(-(-len(drawn) // columns), columns)
    for ax in axes.flat[len(drawn) :]:
        ax.axis("off")
    for ax, example in zip(axes.flat, drawn, strict=False):
        draw(ax, runs, example.name, example.curve)
        ax.set_title(example.name)
    figure.savefig(DOCS / "images" / "learning_curves.png", dpi=120)
    if files_of(runs, "grpo"):
        draw_rewards(runs)


def draw_rewards(runs: Path) -> None:
    """Draws the reward, the length and the divergence of GRPO."""
    figure, axes = grid(1, len(REWARDS))
    for ax, metric in zip(axes.flat, REWARDS, strict=True):
        draw(ax, runs, "grpo", metric)
    # Single tokens that were very unlikely at the start dominate the estimate of some steps.
    axes.flat[-1].set(yscale="log", ylim=(0.01, None))
    figure.savefig(DOCS / "images" / "grpo.png", dpi=120)


def files_of(runs: Path, name: str) -> list[Path]:
    return sorted((runs / name).glob("*/*/metrics.jsonl"))


def grid(rows: int, columns: int) -> Any:
    size = (4 * columns, 3 * rows)
    return plt.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained")


def draw(ax: Any, runs: Path, name: str, metric: str) -> None:
    """Draws a line for each seed."""
    for file in files_of(runs, name):
        history = [x for x in rc.read_metrics(file) if metric in x]
        steps, label = [x["step"] for x in history], f"seed {file.parts[-3]}"
        ax.plot(steps, [x[metric] for x in history], linewidth=1, label=label)
    ax.set(xlabel="step", ylabel=metric.removeprefix("eval/").replace("_", " "))
    ax.legend()


if __name__ == "__main__":
    tyro.cli(main)
