"""Plots and pictures that experiments leave in the directory of a run."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import matplotlib
import numpy as np

import redcoast as rc

matplotlib.use("Agg")  # there may be no display
from matplotlib import pyplot as plt


def plot_metric(directory: Path, name: str) -> float:
    """Plots a metric in training and validation to a PNG; returns its last value in validation."""
    if jax.process_index() > 0:
        return math.nan  # process 0 has the metrics
    history = rc.read_metrics(directory / "metrics.jsonl")
    figure, axes = plt.subplots()
    for key, label, style in ((name, "training", "-"), (f"eval/{name}", "validation", "o-")):
        points = [(entry["step"], entry[key]) for entry in history if key in entry]
        if points:
            axes.plot(*zip(*points, strict=True), style, label=label)
    axes.set(xlabel="step", ylabel=name.replace("_", " "))
    axes.legend()
    figure.savefig(directory / f"{name}.png", dpi=150)
    plt.close(figure)
    # A run that was interrupted early has no evaluation.
    return next((x[f"eval/{name}"] for x in reversed(history) if f"eval/{name}" in x), math.nan)


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


def save_pictures(
    file: Path, images: Sequence[np.ndarray] | np.ndarray, titles: Sequence[str]
) -> None:
    """Saves a grid of images, (height, width) or (height, width, 3) from 0 to 1, with titles."""
    if jax.process_index() > 0:
        return
    columns = min(8, len(images))
    rows = -(-len(images) // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(1.6 * columns, 1.8 * rows), squeeze=False)
    for ax in axes.flat:
        ax.axis("off")
    for ax, image, title in zip(axes.flat, images, titles, strict=False):
        ax.imshow(image, cmap="gray", vmin=0, vmax=1)
        ax.set_title(title, fontsize=7)
    figure.tight_layout()
    figure.savefig(file, dpi=150)
    plt.close(figure)


def save_predictions(
    file: Path,
    images: Sequence[np.ndarray] | np.ndarray,
    classes: Sequence[Any],
    predictions: Sequence[Any],
) -> None:
    """Saves a grid of images with their classes and predictions; `None` is no prediction."""
    pairs = zip(classes, predictions, strict=True)
    titles = [str(y) if guess is None else f"{y}, predicted {guess}" for y, guess in pairs]
    save_pictures(file, images, titles)
