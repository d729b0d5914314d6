"""Plots, samples and results of a run, for Weights & Biases and TensorBoard."""

import html
import json
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

import redcoast as rc


def publish(directory: Path, figures: dict[str, float]) -> None:
    """Adds the pictures, the samples and the figures of a run to where its metrics were logged."""
    history = rc.read_metrics(directory / "metrics.jsonl")
    step = history[-1]["step"] if history else 0
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

    run = json.loads((directory / "wandb.json").read_text())  # its id and its project
    offline = any(directory.glob("wandb/offline-run-*"))
    options: dict[str, Any] = {"mode": "offline"} if offline else {}
    where = {**run, "resume": "allow", "dir": str(directory)}
    with wandb.init(**where, **options, settings={"silent": True, "console": "off"}) as run:
        entry: dict[str, Any] = {path.stem: wandb.Image(str(path)) for path in pictures}
        entry |= {key: wandb.Html(f"<pre>{html.escape(text)}</pre>") for key, text in texts.items()}
        run.log(entry | {"step": step})
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
            writer.add_text(name, "\n".join(f"    {x}" for x in text.splitlines()), step)
        for name, value in figures.items():
            writer.add_scalar(f"results/{name}", value, step)
