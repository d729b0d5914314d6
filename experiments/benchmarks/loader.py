"""The processor time of batches of `rc.batches`, of torch's `DataLoader`, and of a bare loop.

All of them shuffle the same examples and stack them to NumPy arrays, without a model:

- windows of 512 tokens of an array of 16-bit integers, 16 in a batch, by a class with an index; and
  by `rc.token_windows` and the default `collate_fn`, against the same class and function in torch;
- PNG files of 64 x 64 pixels in memory, which are decoded, 64 in a batch.

The bare loop indexes a permutation and calls `collate_fn`. They take turns, and the ratios are
medians over the turns. The times are those of the processor, of all threads, after the first
batches; with workers, which are processes in torch, those of the processes too, from their start.
Needs torch and pillow.

    python experiments/benchmarks/loader.py
"""

import io
import itertools as it
import operator
import resource
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import torch  # pyright: ignore[reportMissingImports]
import tyro
from PIL import Image
from torch.utils.data import DataLoader  # pyright: ignore[reportMissingImports]

import redcoast as rc

sys.path.append(str(Path(__file__).parents[1]))
from _cells import markdown

Loop = Callable[[int], Iterator[Any]]


class Windows:
    """Windows of an array of tokens, as torch and redcoast index them."""

    def __init__(self, length: int = 512, count: int = 20_000):
        self.length, self.count = length, count
        self.tokens = np.random.default_rng(0).integers(0, 50_000, count * length, np.uint16)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> np.ndarray:
        if i >= self.count:
            raise IndexError(i)
        return self.tokens[i * self.length : (i + 1) * self.length]


def stack_tokens(windows: list[np.ndarray]) -> dict[str, np.ndarray]:
    return {"tokens": np.stack(windows).astype(np.int32)}


def make_images(count: int = 2_000) -> list[tuple[bytes, int]]:
    rng = np.random.default_rng(0)
    images: list[tuple[bytes, int]] = []
    for i in range(count):
        # Smooth, so that the files are small.
        noise = Image.fromarray(rng.integers(0, 255, (8, 8, 3), np.uint8)).resize((64, 64))
        file = io.BytesIO()
        noise.save(file, "png")
        images.append((file.getvalue(), i % 10))
    return images


def decode(examples: list[tuple[bytes, int]]) -> dict[str, np.ndarray]:
    images = np.stack([np.asarray(Image.open(io.BytesIO(data))) for data, _ in examples])
    return {
        "image": images.astype(np.float32) / np.float32(255),
        "label": np.array([label for _, label in examples], np.int32),
    }


def bare(examples: Any, collate_fn: Any, batch_size: int) -> Loop:
    def loop(steps: int) -> Iterator[Any]:
        order = np.random.default_rng(0).permutation(len(examples))
        for i in range(steps):
            rows = order[np.arange(i * batch_size, (i + 1) * batch_size) % len(order)]
            yield collate_fn([examples[j] for j in rows])

    return loop


def ours(examples: Any, collate_fn: Any, batch_size: int, workers: int) -> Loop:
    def loop(steps: int) -> Iterator[Any]:
        mesh = rc.make_mesh(devices=jax.devices()[:1])
        options: Any = {"batch_size": batch_size, "steps": steps, "workers": workers, "mesh": mesh}
        for batch in rc.batches(examples, collate_fn, key=jax.random.key(0), **options):
            yield batch.arrays

    return loop


def torchs(examples: Any, collate_fn: Any, batch_size: int, workers: int) -> Loop:
    def loop(steps: int) -> Iterator[Any]:
        options: Any = {"batch_size": batch_size, "num_workers": workers, "shuffle": True}
        loader = DataLoader(examples, collate_fn=collate_fn, drop_last=True, **options)
        epochs = it.chain.from_iterable(it.repeat(loader))
        yield from it.islice(epochs, steps)

    return loop


def processor_seconds() -> float:
    """Seconds of this process and of its children that have ended."""
    total = 0.0
    for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN):
        used = resource.getrusage(who)
        total += used.ru_utime + used.ru_stime
    return total


def milliseconds(loop: Loop, steps: int, *, warm_up: int) -> float:
    """Processor time of a batch; workers have ended by then."""
    running = loop(steps + warm_up)
    for _ in range(warm_up):
        next(running)
    begin = processor_seconds()
    for _ in running:
        pass
    return 1e3 * (processor_seconds() - begin) / steps


def speed(measured: dict[str, list[float]], name: str, other: str) -> str:
    """The ratio of the speeds of two loops."""
    return f"{statistics.median(map(operator.truediv, measured[other], measured[name])):.2f}"


def main(turns: int = 7, steps: int = 2000) -> None:
    """Prints a table.

    Args:
        turns: The number of turns.
        steps: The number of batches of tokens in a turn; a twentieth of it are batches of images.
    """
    windows, images = Windows(), make_images()
    own = rc.token_windows(windows.tokens, windows.length)
    # The examples, `collate_fn` and batch size; those of redcoast, if they differ; and the batches.
    cases: dict[str, tuple[Any, Any, int, Any, Any, int]] = {
        "tokens": (windows, stack_tokens, 16, windows, stack_tokens, steps),
        "tokens, `token_windows`": (windows, stack_tokens, 16, own, None, steps),
        "images": (images, decode, 64, images, decode, steps // 20),
    }
    rows: list[list[str]] = []
    for name, (examples, collate_fn, size, our_examples, our_collate_fn, count) in cases.items():
        loops = {"bare": bare(examples, collate_fn, size)}
        for workers in (0, 2):
            loops[f"ours, {workers}"] = ours(our_examples, our_collate_fn, size, workers)
            loops[f"torch, {workers}"] = torchs(examples, collate_fn, size, workers)
        measured: dict[str, list[float]] = {loop: [] for loop in loops}
        for _ in range(turns):
            for loop, run in loops.items():
                warm_up = 0 if loop == "torch, 2" else 20
                measured[loop].append(milliseconds(run, count, warm_up=warm_up))
        for workers in (0, 2):
            mine, theirs = f"ours, {workers}", f"torch, {workers}"
            times = [statistics.median(measured[loop]) for loop in ("bare", mine, theirs)]
            ratios = [speed(measured, mine, theirs), speed(measured, mine, "bare")]
            rows.append([name, str(workers), *(f"{x:.3f}" for x in times), *ratios])
    head = ["batches", "workers", "bare loop, ms", "redcoast, ms", "torch, ms"]
    print(markdown([*head, "speed / torch", "speed / bare loop"], rows))
    print(f"torch {torch.__version__}, jax {jax.__version__}, numpy {np.__version__}")


if __name__ == "__main__":
    tyro.cli(main)
