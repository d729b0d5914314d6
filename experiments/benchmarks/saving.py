"""The processor time of saving and loading a checkpoint, compared with Orbax alone.

    python experiments/benchmarks/saving.py

`save_checkpoint` and `load_checkpoint` take turns with `orbax.checkpoint.StandardCheckpointer`,
which writes the same arrays without checksums and without syncing its files. A ratio above 1 means
that redcoast takes longer.
"""

import contextlib
import resource
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import tyro

import redcoast as rc
from redcoast.checkpoint._saver import Saver


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
    print_pause_and_memory(tree, turns)


def print_pause_and_memory(tree: Any, turns: int) -> None:
    """Prints how long a save in the background stops the loop, and the memory that saves take."""
    total = sum(x.nbytes for x in tree.values()) / 1e6
    pauses: list[float] = []
    memory: dict[str, list[float]] = {"in the background": [], "`save_checkpoint`": []}
    with tempfile.TemporaryDirectory() as directory:
        policy = rc.Checkpoints(Path(directory) / "run", every=1)
        with Saver(policy) as saver:
            for turn in range(turns + 1):
                with peak_memory() as peak:
                    begin = time.perf_counter()
                    saver.save(turn, tree, {"metrics": {}})
                    pauses.append(1e3 * (time.perf_counter() - begin))
                    saver._settle()  # waits until it is on the disk
                memory["in the background"].append(peak[0])
        for turn in range(turns + 1):
            with peak_memory() as peak:
                rc.save_checkpoint(Path(directory) / f"alone{turn}", tree)
            memory["`save_checkpoint`"].append(peak[0])
    print(f"The loop waits {statistics.median(pauses[1:]):.1f} ms for a save of {total:.0f} MB.")
    for name, peaks in memory.items():
        later = statistics.median(peaks[1:])
        print(
            f"Memory beyond the state, {name}: {peaks[0]:.0f} MB the first time, {later:.0f} later"
        )


@contextlib.contextmanager
def peak_memory() -> Iterator[list[float]]:
    """Megabytes by which the resident memory grows at most inside, measured by a thread."""
    peak, ended = [0.0], threading.Event()
    before = resident()

    def watch() -> None:
        while not ended.wait(2e-3):
            peak[0] = max(peak[0], resident() - before)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield peak
    finally:
        ended.set()
        thread.join()


def resident() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 1e6


def processor_time(do: Callable[[Path], Any], path: Path) -> float:
    begin = time.process_time()
    jax.block_until_ready(do(path))
    return time.process_time() - begin


if __name__ == "__main__":
    tyro.cli(main)
