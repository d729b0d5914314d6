"""Draws the picture of the README: a plan, and the losses on one device and on eight.

    python experiments/benchmarks/front.py

A GPT-2 of 4 layers and width 256 is trained on the source of Python's standard library, in float32.
"""

import sys
from pathlib import Path

import jax
import matplotlib
import numpy as np
import optax
import tyro

import redcoast as rc
from redcoast.models import GPT2, GPT2Config

sys.path.insert(0, str(Path(__file__).parents[1]))
from _corpus import read_texts, windows

matplotlib.use("Agg")  # there may be no display
from matplotlib import pyplot as plt

PICTURE = Path(__file__).parents[2] / "docs/images/front.png"
BATCH, SEQ = 16, 64


def loss_fn(model, tokens, key):
    logits = model(tokens[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def train(mesh: jax.sharding.Mesh, batches: np.ndarray) -> tuple[np.ndarray, rc.Plan]:
    """The losses of the steps, and the plan."""
    sizes = GPT2Config(vocab=256, width=256, layers=4, heads=8, hidden=1024, positions=SEQ)
    init_fn = lambda key: GPT2(sizes, key=key)
    key, optimizer = jax.random.key(0), optax.adamw(1e-3)
    state, step, plan = rc.prepare(init_fn, optimizer, loss_fn, batches[0], key=key, mesh=mesh)
    losses = []
    for batch in batches:
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    return np.array(losses), plan


def draw(file: Path, plan: str, losses: dict[str, np.ndarray], title: str) -> None:
    """Draws the plan's summary beside the losses."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 3.4), width_ratios=(5, 4))
    left.axis("off")
    left.text(0, 0.5, plan, family="monospace", fontsize=7.5, va="center", linespacing=1.5)
    styles = ({"linewidth": 4, "alpha": 0.35}, {"linewidth": 1})
    for (label, values), style in zip(losses.items(), styles, strict=True):
        right.plot(range(1, len(values) + 1), values, label=label, **style)
    right.set(xlabel="step", ylabel="loss", title=title)
    right.title.set_fontsize(9)
    right.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(file, dpi=150)
    plt.close(figure)


def main(steps: int = 150, out: Path = PICTURE) -> None:
    """Trains on one device and on eight, and draws the picture.

    Args:
        steps: The number of training steps.
        out: The PNG file.
    """
    rc.emulate_devices(8)
    texts, _ = read_texts(None)
    rows = windows(map(str.encode, texts), SEQ)[: steps * BATCH]
    batches = np.random.default_rng(0).permutation(rows).reshape(steps, BATCH, SEQ + 1)
    one, _ = train(rc.make_mesh(devices=jax.devices()[:1]), batches)
    eight, plan = train(rc.make_mesh(model=4), batches)
    difference = np.max(np.abs(eight / one - 1))
    losses = {"1 device": one, "8 devices: data=2, model=4": eight}
    draw(out, str(plan), losses, f"Largest relative difference: {difference:.0e}")
    print(f"{plan}\nLargest relative difference of the losses: {difference:.1e}")


if __name__ == "__main__":
    tyro.cli(main)
