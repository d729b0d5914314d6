"""Page faults, processor time and resident memory of a step, by the settings of glibc's allocator.

    python experiments/benchmarks/allocator.py --page docs/measured/allocator.md

Trains GPT-2 (width 256) in processes of their own, one for each setting, which take turns. The
number of page faults of a step is exact on a busy machine too. Ratios of processor time are
medians of pairs of processes.
"""

import json
import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import tyro
from _pages import Printed

# The environment of each setting.
SETTINGS = {
    "glibc's defaults": {"REDCOAST_MALLOPT": "0"},
    "thresholds": {
        "REDCOAST_MALLOPT": "0",
        "MALLOC_MMAP_THRESHOLD_": "4000000000",
        "MALLOC_TRIM_THRESHOLD_": "8000000000",
    },
    "redcoast's": {"REDCOAST_MALLOPT": "1"},
}
# Devices, layers, and sequences in a batch.
CASES = ((1, 4, 2), (1, 4, 16), (1, 12, 2), (8, 4, 16), (8, 12, 16))
VOCAB, SEQ = 2048, 128
WARM = 4  # steps that compile, and allocate what later ones use again
HEADER = (
    "| devices | layers | sequences | page faults a step | with thresholds | with redcoast's "
    "| processor time, redcoast's / defaults | least and most | resident MB | with redcoast's |"
)


def main(
    rounds: int = 3,
    steps: int = 9,
    cases: tuple[tuple[int, int, int], ...] = CASES,
    page: Path | None = None,
    child: bool = False,
) -> None:
    """Prints a table.

    Args:
        rounds: The number of processes of each setting.
        steps: The number of steps that a process measures.
        cases: Devices, layers and sequences of each row.
        page: A page of `docs/measured/` to write the table into.
        child: Measures the first of `cases` in this process, and prints it as JSON.
    """
    if child:
        print(json.dumps(measure(*cases[0], steps)))
        return
    table = Printed()
    table.add(HEADER, "| ---: " * 10 + "|")
    for case in cases:
        measured: dict[str, list[Any]] = {name: [] for name in SETTINGS}
        for _ in range(rounds):
            for name, variables in SETTINGS.items():
                measured[name].append(measure_apart(case, steps, variables))
        table.add(row(case, measured))
    table.write(page, "allocator")


def row(case: tuple[int, int, int], measured: dict[str, list[Any]]) -> str:
    middle = lambda name, figure: statistics.median(result[figure] for result in measured[name])
    default, _, ours = SETTINGS
    pairs = zip(measured[ours], measured[default], strict=True)
    ratios = [own["seconds"] / other["seconds"] for own, other in pairs]
    cells = [
        *map(str, case),
        *(f"{middle(name, 'faults'):,.0f}" for name in SETTINGS),
        f"{statistics.median(ratios):.2f}",
        f"{min(ratios):.2f} {max(ratios):.2f}",
        *(f"{middle(name, 'resident') / 1e6:.0f}" for name in (default, ours)),
    ]
    return f"| {' | '.join(cells)} |"


def measure_apart(case: tuple[int, int, int], steps: int, variables: dict[str, str]) -> Any:
    """What `measure` returns in a process with these environment variables."""
    sizes = map(str, case)
    command = [sys.executable, __file__, "--child", "--steps", str(steps), "--cases", *sizes]
    own = {k: v for k, v in os.environ.items() if not k.startswith("MALLOC_")} | variables
    done = subprocess.run(command, env=own, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def measure(devices: int, layers: int, sequences: int, steps: int) -> dict[str, float]:
    """Medians over steps of the faults and seconds, and the largest resident memory in bytes."""
    import jax
    import optax

    import redcoast as rc

    if devices > 1:
        rc.emulate_devices(devices)
    sizes: dict[str, Any] = {"width": 256, "heads": 4, "hidden": 1024, "positions": SEQ}
    sizes["layers"] = layers
    config = rc.models.GPT2Config(vocab=VOCAB, **sizes)
    loss_fn = lambda model, tokens, key: rc.losses.cross_entropy(model(tokens), tokens)
    init_fn = lambda key: rc.models.GPT2(config, key=key)
    tokens = np.random.default_rng(0).integers(0, VOCAB, (sequences, SEQ), np.int32)
    mesh = rc.make_mesh(data=devices)
    options: dict[str, Any] = {"key": jax.random.key(0), "mesh": mesh}
    state, step, _ = rc.prepare(init_fn, optax.adamw(1e-3), loss_fn, tokens, **options)
    faults, seconds = [], []
    for number in range(steps + WARM):
        before, begin = resource.getrusage(resource.RUSAGE_SELF), time.process_time()
        state, _ = step(state, tokens)
        jax.block_until_ready(state)
        after = resource.getrusage(resource.RUSAGE_SELF)
        if number >= WARM:
            faults.append(after.ru_minflt - before.ru_minflt)
            seconds.append(time.process_time() - begin)
    return {
        "faults": statistics.median(faults),
        "seconds": statistics.median(seconds),
        "resident": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


if __name__ == "__main__":
    tyro.cli(main)
