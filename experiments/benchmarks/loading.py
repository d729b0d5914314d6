"""The time of `rc.load_pretrained`, compared with only reading and converting the same bytes.

SmolLM2-135M is loaded to float32 from the published, quantised `.gguf` file, and from a Hugging
Face directory in bfloat16. The baseline reads and converts each tensor, but does not check,
transpose or stack anything, or move it to a device. Needs gguf.

    python experiments/benchmarks/loading.py
"""

import functools as ft
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import gguf
import jax.numpy as jnp
import numpy as np
import tyro
from _timing import elapsed
from safetensors import safe_open

import redcoast as rc

sys.path.append(str(Path(__file__).parents[1]))
from _published import smollm2


@dataclass(frozen=True)
class Config:
    rounds: int = 5  # number of measurements of each


def main(c: Config) -> None:
    path = smollm2()
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary) / "model"
        rc.save_pretrained(rc.load_pretrained(path, dtype=jnp.bfloat16), directory)
        for name, where, convert in (
            ("GGUF, quantised", path, dequantise),
            ("safetensors, bfloat16", directory, widen),
        ):
            load = ft.partial(rc.load_pretrained, where, dtype=jnp.float32)
            bare = ft.partial(convert, where)
            times: list[tuple[float, float]] = []
            for _ in range(c.rounds):
                own = elapsed(load, time.perf_counter)
                times.append((own, elapsed(bare, time.perf_counter)))
            ratio = statistics.median(a / b for a, b in times)
            here, alone = (statistics.median(x) for x in zip(*times, strict=True))
            print(
                f"{name}: {here:.2f} s, only reading and converting {alone:.2f} s, ratio "
                f"{ratio:.2f} (at most 1.5)",
                flush=True,
            )


def dequantise(path: Path) -> list[np.ndarray]:
    return [gguf.dequantize(t.data, t.tensor_type) for t in gguf.GGUFReader(path).tensors]


def widen(directory: Path) -> list[np.ndarray]:
    with safe_open(directory / "model.safetensors", framework="numpy") as file:
        return [file.get_tensor(name).astype(np.float32) for name in file.keys()]  # noqa: SIM118


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
