"""Plots, samples and results of a run, for Weights & Biases and TensorBoard."""

import html
import json
import textwrap
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

import redcoast as rc


def publish(directory: Path, figures: dict[str, float]) -> None:
    """Adds the pictures, the samples and the figures of a run to where its metrics were logged."""
    step = 0
    for entry in rc.read_metrics(directory / "metrics.jsonl"):
        step = entry["step"]  # at the end, the last one
    pictures = sorted(directory.glob("*.png"))
    texts = {path.stem: path.read_text("utf-8") for path in sorted(directory.glob("samples*.txt"))}
    if (directory / "wandb.json").exists():
        to_wandb(directory, step, pictures, texts, figures)
    if (directory / "tensorboard").is_dir():
        to_tensorboard(directory / "tensorboard", step, pictures, texts, figures)


def to_wandb(
    directory: Path,
    step: int,
    pictures: list[Path],
    texts: dict[str, str],
    figures: dict[str, float],
) -> None:
    """Continues the W&B run of the training, offline if that was offline."""
    import wandb

    options: dict[str, Any] = json.loads((directory / "wandb.json").read_text())  # id and project
    options |= {"resume": "allow", "dir": str(directory)}
    if any(directory.glob("wandb/offline-run-*")):
        options["mode"] = "offline"
    with wandb.init(**options, settings={"silent": True, "console": "off"}) as run:
        entry: dict[str, Any] = {"step": step}
        for path in pictures:
            entry[path.stem] = wandb.Image(str(path))
        for name, text in texts.items():
            entry[name] = wandb.Html(f"<pre>{html.escape(text)}</pre>")
        run.log(entry)
        run.summary.update(figures)


def to_tensorboard(
    directory: Path,
    step: int,
    pictures: list[Path],
    texts: dict[str, str],
    figures: dict[str, float],
) -> None:
    from tensorboardX import SummaryWriter

    with SummaryWriter(str(directory)) as writer:
        for path in pictures:
            writer.add_image(path.stem, plt.imread(path)[..., :3], step, dataformats="HWC")
        for name, text in texts.items():
            writer.add_text(name, textwrap.indent(text, " " * 4), step)
        for name, value in figures.items():
            writer.add_scalar(f"results/{name}", value, step)
