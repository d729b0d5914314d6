"""Plots and pictures that experiments leave in the directory of a run."""

import math
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import matplotlib
import numpy as np

import redcoast as rc

matplotlib.use("Agg")  # there may be no display
from matplotlib import font_manager
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, MaxNLocator


def plot_metric(directory: Path, name: str) -> float:
    """Plots a metric in training and validation to a PNG; returns its last value in validation."""
    if jax.process_index() > 0:
        return math.nan  # process 0 has the metrics
    history = rc.read_metrics(directory / "metrics.jsonl")
    figure, axes = plt.subplots(layout="constrained")
    draw_metric(axes, history, name)
    axes.set_title(f"{directory.parent.name} {directory.name}", fontsize=9)
    figure.savefig(directory / f"{name}.png", dpi=150)
    plt.close(figure)
    _, values = steps_and_values(history, f"eval/{name}")
    if not len(values):  # of a run that was interrupted early
        return math.nan
    return float(values[-1])


def read_metric(directory: Path, name: str) -> tuple[np.ndarray, np.ndarray]:
    """The steps of a run in which a metric was logged, and its values."""
    return steps_and_values(rc.read_metrics(directory / "metrics.jsonl"), name)


def steps_and_values(
    history: Sequence[Mapping[str, Any]], name: str
) -> tuple[np.ndarray, np.ndarray]:
    """The steps in which a metric was logged, and its values."""
    steps, values = [], []
    for entry in history:
        if name in entry:
            steps.append(entry["step"])
            values.append(entry[name])
    return np.array(steps, int), np.array(values, float)


def plot_run(directory: Path) -> None:
    """Plots all that a run logged to `run.png`: metrics, learning rate, and throughput."""
    history = rc.read_metrics(directory / "metrics.jsonl")
    logged = {key.removeprefix("eval/") for entry in history for key in entry}
    names = sorted(logged - {"step", "time", "weight", "skipped", "skipped_total", "epoch"})
    names.sort(key=lambda name: name != "loss")
    if not names:
        return
    columns = min(3, len(names))
    rows = -(-len(names) // columns)
    size = (4 * columns, 3 * rows)
    figure, grid = plt.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained")
    for axes in grid.flat[len(names) :]:
        axes.axis("off")
    for axes, name in zip(grid.flat, names, strict=False):
        draw_metric(axes, history, name)
    figure.suptitle(f"{directory.parent.name} {directory.name}")
    figure.savefig(directory / "run.png", dpi=150)
    plt.close(figure)


def draw_metric(axes: Axes, history: Sequence[Mapping[str, Any]], name: str) -> None:
    """Draws a metric in training, also smoothed, and in validation."""
    steps, values = steps_and_values(history, name)
    if len(steps) > 50 and name != "learning_rate":
        width = len(steps) // 25
        mean = np.convolve(values, np.ones(width) / width, "valid")
        axes.plot(steps, values, color="C0", alpha=0.25)
        axes.plot(steps[width - 1 :], mean, color="C0", label="training")
    elif len(steps):
        axes.plot(steps, values, label="training")
    eval_steps, eval_values = steps_and_values(history, f"eval/{name}")
    if len(eval_steps):
        axes.plot(eval_steps, eval_values, "o-", color="C1", markersize=3, label="validation")
    if spans_a_decade(np.concatenate([values, eval_values])):
        axes.set_yscale("log")
        axes.yaxis.set_minor_locator(LogLocator(subs=(2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("{x:g}")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set(xlabel="step", ylabel=name.replace("_", " "))
    axes.grid(alpha=0.3)
    if len(eval_steps):
        axes.legend()


def spans_a_decade(values: np.ndarray) -> bool:
    """Whether values are all positive, and the largest is more than ten times the smallest."""
    finite = values[np.isfinite(values)]
    return bool(len(finite) and finite.min() > 0 and finite.max() > 10 * finite.min())


def plot_lines(file: Path, xlabel: str, ylabel: str, lines: Mapping[str, Any]) -> None:
    """Plots lines to a PNG; each has a name, and is a pair of x and y."""
    if jax.process_index() > 0:
        return
    figure, axes = plt.subplots()
    for name, line in lines.items():
        axes.plot(*line, ".-", label=name)
    axes.set(xlabel=xlabel, ylabel=ylabel)
    axes.legend()
    figure.savefig(file, dpi=150)
    plt.close(figure)


def draw_text(file: Path, text: str, columns: int = 110) -> None:
    """Draws text in a font of fixed width; long lines are cut off.

    Characters that the font does not have, such as those that an untrained model writes, become �.
    """
    known = font_manager.get_font(font_manager.findfont("monospace")).get_charmap()
    lines = []
    for line in text.splitlines():
        if len(line) > columns:
            line = line[: columns - 1] + "…"
        for sign in {*line}:
            if ord(sign) not in known:
                line = line.replace(sign, "\ufffd")
        lines.append(line)
    figure = plt.figure()
    figure.text(0, 0, "\n".join(lines), family="monospace", fontsize=8, parse_math=False)
    figure.savefig(file, dpi=150, bbox_inches="tight")
    plt.close(figure)


def save_pictures(
    file: Path, images: Sequence[np.ndarray] | np.ndarray, titles: Sequence[str]
) -> None:
    """Saves a grid of images, (height, width) or (height, width, 3) from 0 to 1, with titles, which
    are wrapped."""
    if jax.process_index() > 0:
        return
    wrapped, most_lines = [], 1
    for title in titles:
        lines = [textwrap.fill(line, 26) for line in title.split("\n")]
        wrapped.append("\n".join(lines))
        most_lines = max(most_lines, 1 + wrapped[-1].count("\n"))
    columns = min(8, len(images))
    rows = -(-len(images) // columns)
    size = (1.6 * columns, (1.6 + 0.12 * most_lines) * rows)
    figure, axes = plt.subplots(rows, columns, figsize=size, squeeze=False)
    for ax in axes.flat:
        ax.axis("off")
    for ax, image, title in zip(axes.flat, images, wrapped, strict=False):
        ax.imshow(image, cmap="gray", vmin=0, vmax=1)
        ax.set_title(title, fontsize=7)
    figure.tight_layout()
    figure.savefig(file, dpi=150)
    plt.close(figure)


def save_predictions(
    file: Path,
    images: Sequence[np.ndarray] | np.ndarray,
    classes: Sequence[Any] | np.ndarray,
    predictions: Sequence[Any] | np.ndarray,
) -> None:
    """Saves a grid of images with their classes and predictions; `None` is no prediction."""
    titles = []
    for target, prediction in zip(classes, predictions, strict=True):
        title = str(target)
        if prediction is not None:
            title += f", predicted {prediction}"
        titles.append(title)
    save_pictures(file, images, titles)
