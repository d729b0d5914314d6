"""The processor time of saving and loading a checkpoint, compared with Orbax alone.

    python experiments/benchmarks/saving.py

`save_checkpoint` and `load_checkpoint` take turns with `orbax.checkpoint.StandardCheckpointer`,
which writes the same arrays without checksums and without syncing its files. A ratio above 1 means
that redcoast takes longer. The third row is the part of a load that compares the checksums. With
`REDCOAST_MALLOPT=0`, freed memory is returned to the system, so that the memory of each save is
measured; without, a save reuses what earlier ones have freed.
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

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import tyro
from jaxtyping import PyTree

import redcoast as rc
from redcoast.checkpoint._checksums import find_damage
from redcoast.checkpoint._saver import Saver


def main(arrays: int = 150, megabytes: float = 1.0, turns: int = 7, sequences: int = 4) -> None:
    """Prints a table.

    Args:
        arrays: The number of arrays.
        megabytes: The size of each array.
        turns: The number of turns of each; the first is not counted.
        sequences: The batch size of the training step that the pause of a save is compared with.
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

    def measure(task: str, name: str, do: Callable[[Path], Any], path: Path) -> None:
        seconds.setdefault((task, name), []).append(processor_time(do, path))

    with tempfile.TemporaryDirectory() as directory:
        for turn in range(turns + 1):
            for name in save:
                path = Path(directory) / f"{name}{turn}"
                measure("save", name, save[name], path)
                measure("load", name, load[name], path)
            measure("compare checksums", "ours", find_damage, Path(directory) / f"ours{turn}")
    seconds["compare checksums", "orbax"] = seconds["load", "orbax"]
    print("| task | redcoast, s | Orbax, s | ratio | least and most |")
    print("| --- | ---: | ---: | ---: | ---: |")
    for task in ("save", "load", "compare checksums"):
        ours, theirs = (seconds[task, name][1:] for name in save)
        ratios = [mine / other for mine, other in zip(ours, theirs, strict=True)]
        middle = [f"{statistics.median(x):.2f}" for x in (ours, theirs, ratios)]
        print(f"| {task} | {' | '.join(middle)} | {min(ratios):.2f} {max(ratios):.2f} |")
    print_pause_and_memory(tree, turns)
    print_pause_and_step(sequences, turns)


def print_pause_and_memory(tree: PyTree, turns: int) -> None:
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


def print_pause_and_step(sequences: int, turns: int) -> None:
    """Prints how long a save in the background stops the loop, beside a step of the same model."""
    config = rc.models.GPT2Config(
        vocab=4096, width=384, layers=6, heads=6, hidden=1536, positions=128
    )
    tokens = np.random.default_rng(0).integers(0, config.vocab, (sequences, 128), np.int32)
    state, step, _ = rc.prepare(
        lambda key: rc.models.GPT2(config, key=key),
        optax.adamw(1e-4),
        lambda model, batch, key: rc.losses.cross_entropy(model(batch), batch),
        tokens,
        key=jax.random.key(0),
    )
    total = sum(x.nbytes for x in jax.tree.leaves(eqx.filter(state, eqx.is_array))) / 1e6
    steps: list[float] = []
    pauses: list[float] = []
    with (
        tempfile.TemporaryDirectory() as directory,
        Saver(rc.Checkpoints(Path(directory) / "run", every=1)) as saver,
    ):
        for turn in range(turns + 1):
            begin = time.perf_counter()
            state, metrics = step(state, tokens)
            jax.block_until_ready((state, metrics))
            stepped = time.perf_counter()
            saver.save(turn, state, {"metrics": {}})
            pauses.append(1e3 * (time.perf_counter() - stepped))
            steps.append(1e3 * (stepped - begin))
            saver._settle()
    ratios = [pause / step for pause, step in zip(pauses[1:], steps[1:], strict=True)]
    print(
        f"GPT-2, a state of {total:.0f} MB, {sequences} sequences of 128 tokens: a step takes "
        f"{statistics.median(steps[1:]):.0f} ms and the pause {statistics.median(pauses[1:]):.0f} "
        f"ms, a ratio of {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
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
