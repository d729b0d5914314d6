"""Compiles a training step for accelerators that are not there, and says what it needs.

Whether it fits, bytes on each device, bytes sent between devices, how long it takes at least. The
accelerator's own compiler is asked: `pip install "redcoast[tpu]"` or `"redcoast[cuda12]"`; without
it, the CPU's stands in. Exits with 1 if the step does not fit.

    python experiments/dry_run.py --model opt-66b --target v4:4x4x4 --seq 512
    python experiments/dry_run.py --model path/to/config.json --target a100-80gb --smallest
    python experiments/dry_run.py --table1
"""

import os

# No accelerator is looked for. JAX reads this when it is first imported.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import jax.numpy as jnp
import tyro
from _reach import longest_sequence, sizes_of
from _table1 import print_table1
from _workload import make_workload, state_bytes

import redcoast as rc
from redcoast._dryrun.target import Target, parse_target

AXES = ("data", "fsdp", "model")


@dataclass(frozen=True)
class Config:
    model: str = "llama-7b"  # a named size, or a config.json of Hugging Face, or its folder
    target: str = "a100-40gb:4"  # a slice of TPUs (v4:4x4x4), GPUs (h100:8x8: hosts x cards), cpu:8
    seq: int | None = None  # tokens of a sequence; by default 1024, or what the model is made for
    batch: int | None = None  # sequences in a step; by default one for each device and microbatch
    mesh: str | None = None  # sizes, such as fsdp=8,model=8; by default those that cost least
    remat: Literal["none", "dots", "full"] = "full"  # what the backward pass computes again
    accumulate: int = 1  # microbatches that a batch is split into, to save memory
    dtype: Literal["float32", "bfloat16"] = "float32"  # of the computation; weights are float32
    chunk: int | None = None  # positions whose logits are in memory at a time; by default all
    smallest: bool = False  # look for the fewest of the target's chips on which it fits
    longest: bool = False  # look for the longest sequence that fits, a multiple of 128
    table1: bool = False  # the models and machines of the paper's Table 1, in place of one
    rows: tuple[str, ...] = ()  # which models of that table, such as opt-66b; by default all
    columns: tuple[str, ...] = ()  # which of paper, bfloat16, twice, half; by default all
    out: Path = Path("runs/dry_run")  # where the table's figures are kept and added to
    json: bool = False  # print the figures as JSON, in place of tables


def main(c: Config) -> None:
    if c.smallest + c.longest + c.table1 > 1:
        raise SystemExit("Only one of --smallest, --longest and --table1 can be asked for.")
    if c.table1:
        return print_table1(c.out, rows=c.rows, columns=c.columns, as_json=c.json)
    if c.smallest:
        run = smallest(c)
    elif c.longest:
        run = longest(c)
    else:
        run = attempt(c, read_target(c.target), c.seq, suggest=True)
    print(json.dumps(run.report, indent=1) if c.json else run)
    raise SystemExit(0 if run.fits else 1)


def attempt(c: Config, target: Target, seq: int | None, *, suggest: bool = False) -> rc.DryRun:
    """A dry run, which is told of in a line."""
    workload = make_workload(c.model, seq, remat=c.remat, chunk=c.chunk)
    run = rc.dry_run(
        *workload.arguments(c.batch or target.count * c.accumulate),
        target=target.name,
        mesh=read_mesh(c.mesh),
        accumulate=c.accumulate,
        compute_dtype=jnp.dtype(c.dtype),
        suggest=suggest,
    )
    mesh = ", ".join(f"{axis}={size}" for axis, size in run.mesh.items())
    length = "" if workload.seq is None else f", {workload.seq} tokens"
    peak, usable = (run.memory[name] / 2**30 for name in ("peak", "usable"))
    words = f"{c.model} on {run.target} ({mesh}){length}: {peak:.2f} of {usable:.2f} GiB"
    print(words, *workload.notes, file=sys.stderr, flush=True)
    return run


def smallest(c: Config) -> rc.DryRun:
    """On the fewest chips on which it fits."""
    if c.mesh is not None:
        raise SystemExit("--smallest chooses the number of devices: leave --mesh out.")
    least = state_bytes(make_workload(c.model, c.seq))
    for target in sizes_of(read_target(c.target)):
        # Without the compiler's help: what stays between steps does not fit on fewer.
        if least <= target.count * target.chip.usable and (run := attempt(c, target, c.seq)).fits:
            return run
    raise SystemExit(f"{c.model} fits on no number of {c.target.partition(':')[0]} that was tried.")


def longest(c: Config) -> rc.DryRun:
    """With the longest sequence that fits; or with 128 tokens, if not even those do."""
    if make_workload(c.model, c.seq).seq is None:
        raise SystemExit(f"{c.model} reads images, and no texts that --longest could be asked of.")
    target, runs = read_target(c.target), {}

    def fits(seq: int) -> bool:
        runs[seq] = attempt(c, target, seq)
        return runs[seq].fits

    found = longest_sequence(fits, start=c.seq or 1024)
    print(f"The longest sequence that fits has {found} tokens.", file=sys.stderr, flush=True)
    return runs[found or min(runs)]


def read_target(text: str) -> Target:
    try:
        return parse_target(text)
    except ValueError as error:
        raise SystemExit(str(error)) from error


def read_mesh(text: str | None) -> dict[str, int] | None:
    """The sizes in `data=1,fsdp=4,model=2`."""
    if text is None:
        return None
    pairs = [part.split("=") for part in text.split(",")]
    if any(len(p) != 2 or not p[1].isdigit() or p[0] not in AXES for p in pairs):
        raise SystemExit(f"A mesh is written as data=1,fsdp=4,model=2, and not as {text}.")
    return {axis: int(size) for axis, size in pairs}


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
