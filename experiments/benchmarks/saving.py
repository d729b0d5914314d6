"""The processor time of saving and loading a checkpoint, compared with Orbax alone.

    python experiments/benchmarks/saving.py

`save_checkpoint` and `load_checkpoint` take turns with `orbax.checkpoint.StandardCheckpointer`,
which writes the same arrays without checksums and without syncing its files. A ratio above 1 means
that redcoast takes longer.
"""

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import tyro

import redcoast as rc


def main(arrays: int = 150, megabytes: float = 1.0, turns: int = 7) -> None:
    """Prints a table.

    Args:
        arrays: The number of arrays.
        megabytes: The size of each array.
        turns: The number of turns of each; the first is not counted.
    """
    rc.make_mesh()
    random = np.random.default_rng(0)
    numbers = lambda: random.standard_normal(int(megabytes * 2**18), np.float32)
    tree = {f"array{number}": jnp.asarray(numbers()) for number in range(arrays)}
    jax.block_until_ready(tree)
    orbax = ocp.StandardCheckpointer()

    def save_with_orbax(path: Path) -> None:
        orbax.save(path, tree)
        orbax.wait_until_finished()

    save = {"ours": lambda path: rc.save_checkpoint(path, tree), "orbax": save_with_orbax}
    load = {
        "ours": lambda path: rc.load_checkpoint(path, tree),
        "orbax": lambda path: orbax.restore(path, tree),
    }
    seconds: dict[tuple[str, str], list[float]] = {}
    with tempfile.TemporaryDirectory() as directory:
        for turn in range(turns + 1):
            for name in save:
                path = Path(directory) / f"{name}{turn}"
                for task, do in (("save", save[name]), ("load", load[name])):
                    seconds.setdefault((task, name), []).append(processor_time(do, path))
    print("| task | redcoast, s | Orbax, s | ratio | least and most |")
    print("| --- | ---: | ---: | ---: | ---: |")
    for task in ("save", "load"):
        ours, theirs = (seconds[task, name][1:] for name in save)
        ratios = [one / other for one, other in zip(ours, theirs, strict=True)]
        middle = [f"{statistics.median(x):.2f}" for x in (ours, theirs, ratios)]
        print(f"| {task} | {' | '.join(middle)} | {min(ratios):.2f} {max(ratios):.2f} |")


def processor_time(do: Callable[[Path], Any], path: Path) -> float:
    begin = time.process_time()
    jax.block_until_ready(do(path))
    return time.process_time() - begin


if __name__ == "__main__":
    tyro.cli(main)
