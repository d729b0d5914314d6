"""Trains a LLaMA-style language model on text, then samples from it.

The text is Python's own standard library, or any file or folder; some of its files are held out.

    python experiments/language_modeling.py
    python experiments/language_modeling.py --text books/ --tokenizer bpe
    python experiments/language_modeling.py --devices 8 --model 4
    python experiments/language_modeling.py --resume
"""

import functools as ft
import json
import math
import sysconfig
import time
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import optax
import redcoast as rc
import tyro
from redcoast.models.llama import Llama, LlamaConfig


@dataclass(frozen=True)
class Config:
    text: Path | None = None
    """File or folder of UTF-8 text; by default, the source of Python's standard library."""
    tokenizer: Literal["bytes", "bpe"] = "bytes"
    """Tokens are bytes, or byte pairs learned from the training text."""
    vocab: int = 4096
    """Number of different tokens of the bpe tokenizer."""
    prompt: str = "def main("
    """What the sample at the end begins with."""

    width: int = 128
    """Size of the residual stream."""
    layers: int = 4
    heads: int = 8
    """Number of attention heads."""
    kv_heads: int = 4
    """Number of heads for keys and values."""
    seq: int = 128
    """Length of the training sequences, in tokens."""

    batch_size: int = 32
    """Sequences in a batch, over all devices."""
    accumulate: int = 1
    """Microbatches that a batch is split into, to save memory."""
    steps: int = 500
    learning_rate: float = 3e-3
    """Peak of the learning rate."""
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    seed: int = 0

    data: int = -1
    """Devices that the batch is split over; -1 takes all that are left."""
    fsdp: int = 1
    """Devices that the batch is split over, and the storage of the model."""
    model: int = 1
    """Devices that the model is split over, and its arithmetic."""
    devices: int | None = None
    """Emulate so many devices on the CPU."""

    directory: Path = Path("runs/language_modeling")
    """Where runs are kept, each in a directory of its own."""
    resume: bool = False
    """Go on with the newest run in the directory; give the other options as they were."""
    wandb: bool = False
    """Log to Weights & Biases, without an account to a directory."""


def run_directory(root: Path, resume: bool) -> Path:
    runs = sorted(path.parent for path in root.glob("*/config.json"))
    if resume and not runs:
        raise SystemExit(f"There is no run to resume in {root}. Leave out --resume to start one.")
    return runs[-1] if resume else root / time.strftime("%Y%m%d-%H%M%S")


def read_text(path: Path | None) -> tuple[list[str], list[str]]:
    """The texts to train on, and those held out."""
    if path is not None and path.is_file():
        text = path.read_text(encoding="utf-8")
        return [text[: -len(text) // 20]], [text[-len(text) // 20 :]]
    root = Path(sysconfig.get_path("stdlib")) if path is None else path
    files = sorted(root.rglob("*.py" if path is None else "*"))
    skip = {"site-packages", "dist-packages", "test", "tests", "idle_test"} if path is None else set()
    train, valid = [], []
    for file in files:
        name = file.relative_to(root)
        if file.is_file() and not skip & set(name.parts):
            # By name, so that a file stays where it is when others come and go.
            held_out = zlib.crc32(name.as_posix().encode()) % 100 < 4
            (valid if held_out else train).append(file.read_text(encoding="utf-8", errors="replace"))
    return train, valid
