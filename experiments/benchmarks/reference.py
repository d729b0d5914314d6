"""SmolLM2-135M in redcoast and in `transformers`, with the same weights, in one process."""

# pyright: reportMissingImports=false

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import torch
import transformers
from _timing import elapsed

import redcoast as rc

sys.path.append(str(Path(__file__).parents[1]))
from _published import smollm2

THREADS = len(os.sched_getaffinity(0))


def both_models(**options: Any) -> tuple[Any, Any]:
    """The redcoast model, loaded with these options, and the `transformers` model."""
    torch.set_num_threads(THREADS)
    ours = rc.load_pretrained(smollm2(), dtype=jnp.float32, **options)
    with tempfile.TemporaryDirectory() as directory:
        rc.save_pretrained(ours, Path(directory) / "model")
        theirs = transformers.AutoModelForCausalLM.from_pretrained(
            Path(directory) / "model", dtype=torch.float32
        )
    return ours, theirs.eval()


def take_turns(ours: Callable[[], Any], theirs: Callable[[], Any], rounds: int) -> dict[str, float]:
    """The median seconds of each, and the median over rounds of the ratio theirs / ours."""
    for run in (ours, theirs):  # compiles, and fills caches
        run()
    times: list[tuple[float, float]] = []
    for _ in range(rounds):
        own = elapsed(ours, time.perf_counter)
        times.append((own, elapsed(theirs, time.perf_counter)))
    return {
        "ours": statistics.median(a for a, _ in times),
        "theirs": statistics.median(b for _, b in times),
        "ratio": statistics.median(b / a for a, b in times),
    }


def describe() -> str:
    versions = f"jax {jax.__version__}, torch {torch.__version__}"
    return f"{THREADS} threads, {versions}, transformers {transformers.__version__}"
