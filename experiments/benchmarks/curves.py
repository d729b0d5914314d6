"""Plots the learning curves of the experiments that `examples.py` has run, one line for each seed.

python experiments/benchmarks/examples.py --names ppo ddpg
python experiments/benchmarks/curves.py
"""

from pathlib import Path

import matplotlib
import tyro

import redcoast as rc

matplotlib.use("Agg")
from examples import DOCS, EXAMPLES
from matplotlib import pyplot as plt


def main(runs: Path = Path("runs/examples")) -> None:
    """Writes docs/images/learning_curves.png.

    Args:
        runs: The directory that `examples.py` wrote to.
    """
    drawn = [x for x in EXAMPLES if x.curve and list((runs / x.name).glob("*/*/metrics.jsonl"))]
    if not drawn:
        raise SystemExit(f"{runs} has no run of an experiment with a learning curve.")
    columns = min(3, len(drawn))
    rows = -(-len(drawn) // columns)
    size = (4 * columns, 3 * rows)
    figure, axes = plt.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained")
    for ax in axes.flat[len(drawn) :]:
        ax.axis("off")
    for ax, example in zip(axes.flat, drawn, strict=False):
        for file in sorted((runs / example.name).glob("*/*/metrics.jsonl")):
            found = [x for x in rc.read_metrics(file) if example.curve in x]
            steps, label = [x["step"] for x in found], f"seed {file.parts[-3]}"
            ax.plot(steps, [x[example.curve] for x in found], linewidth=1, label=label)
        label = example.curve.removeprefix("eval/").replace("_", " ")
        ax.set(title=example.name, xlabel="step", ylabel=label)
        ax.legend()
    figure.savefig(DOCS / "images" / "learning_curves.png", dpi=120)


if __name__ == "__main__":
    tyro.cli(main)
