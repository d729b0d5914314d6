"""Compiles a training step for accelerators that you do not have, and prints what it needs.

It reports whether the step fits, the memory on each device, the communication between devices, and
a lower bound on the time of a step. The figures are those of the accelerator's own compiler if it
is installed (`pip install "redcoast[tpu]"` or `"redcoast[cuda12]"`), otherwise those of the CPU
compiler.
The exit code is 1 if the step does not fit, and 2 if the options are invalid or the compiler fails.

    python experiments/dry_run.py --model opt-66b --target v4:4x4x4 --seq 512
    python experiments/dry_run.py --model path/to/config.json --target a100-80gb --smallest
    python experiments/dry_run.py --table1
"""

import os

# Keeps JAX from looking for accelerators. JAX reads this when it is first imported.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import json
import sys
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

import jax.numpy as jnp
import tyro
from _cells import gib, peak_gib
from _fitting import dry_run_to_fit
from _reach import longest_sequence, read_chip, sizes_of
from _table1 import print_table1
from _usage import mesh_sizes, refuse
from _workload import make_workload, state_bytes

import redcoast as rc
from redcoast.dryrun._target import Target, parse_target


@dataclass(frozen=True)
class Config:
    model: str = "llama-7b"  # a model name, or the path of a Hugging Face config.json or its folder
    target: str = "a100-40gb:4"  # TPU slice (v4:4x4x4), GPUs (l4:4; h100:8x8: hosts x cards), cpu:8
    seq: int | None = None  # sequence length in tokens; by default 1024 or the model's maximum
    batch: int | None = None  # global batch size; by default one sequence per device and microbatch
    mesh: str | None = None  # axis sizes, such as fsdp=8,model=8; by default the estimated cheapest
    remat: Literal["none", "dots", "full"] = "full"  # rematerialisation in the backward pass
    accumulate: int = 1  # number of microbatches for gradient accumulation
    dtype: Literal["float32", "bfloat16"] = "float32"  # compute dtype; weights are float32
    chunk: int | None = None  # positions whose logits are in memory at a time; by default all
    smallest: bool = False  # find the smallest number of chips on which the step fits
    longest: bool = False  # find the longest sequence that fits, a multiple of 128
    table1: bool = False  # run all models and machines of the paper's Table 1
    rows: tuple[str, ...] = ()  # models of Table 1 to run, such as opt-66b; by default all
    columns: tuple[str, ...] = ()  # columns to run: paper, bfloat16, twice, half; by default all
    out: Path = Path("runs/dry_run")  # directory of the results of --table1, which are added to
    json: bool = False  # print the figures as JSON instead of tables


@dataclass(frozen=True)
class Attempt:
    """A dry run, and its settings: model, batch and options."""

    run: rc.DryRun
    settings: dict[str, Any]

    @property
    def fits(self) -> bool:
        return self.run.fits

    @property
    def report(self) -> dict[str, Any]:
        return self.settings | self.run.report


def main(c: Config) -> None:
    try:
        found = answer(c)
    except (ValueError, TypeError, RuntimeError) as error:
        # A RuntimeError means that a compiler failed. Python would exit with 1, as for no fit.
        refuse(str(error))
    if found is not None:
        print(json.dumps(found.report, indent=1) if c.json else found.run)
        raise SystemExit(0 if found.fits else 1)


def answer(c: Config) -> Attempt | None:
    """The requested dry run; `None` after printing the table for --table1."""
    if c.smallest + c.longest + c.table1 > 1:
        refuse("Only one of --smallest, --longest and --table1 can be used.")
    if c.table1:
        if other := chosen(c) - {"table1", "rows", "columns", "out", "json"}:
            refuse(f"--table1 has its own models and settings: leave out {written(other)}.")
        return print_table1(c.out, rows=c.rows, columns=c.columns, as_json=c.json)
    if parts := chosen(c) & {"rows", "columns"}:
        refuse(f"--rows and --columns need --table1: leave out {written(parts)}.")
    if c.smallest:
        return smallest(c)
    return longest(c) if c.longest else attempt(c, parse_target(c.target), c.seq, suggest=True)


def chosen(c: Config) -> set[str]:
    """The names of the options that differ from their defaults."""
    return {field.name for field in fields(c) if getattr(c, field.name) != field.default}


def written(options: set[str]) -> str:
    return ", ".join(f"--{name}" for name in sorted(options))


def smallest(c: Config) -> Attempt:
    """The dry run on the smallest number of chips on which the step fits."""
    if c.mesh is not None:
        refuse("--smallest chooses the number of devices: leave out --mesh.")
    chip = read_chip(c.target)
    least = state_bytes(make_workload(c.model, c.seq))
    for target in sizes_of(chip):
        # No need to compile where not even the training state fits.
        if least <= target.count * chip.usable and (found := attempt(c, target, c.seq)).fits:
            return found
    words = f"{c.model} does not fit on any number of {chip.name} that was tried."
    print(words, file=sys.stderr, flush=True)
    raise SystemExit(1)


def longest(c: Config) -> Attempt:
    """The dry run with the longest sequence that fits, or with 128 tokens if none does."""
    if make_workload(c.model, c.seq).seq is None:
        refuse(f"{c.model} reads images: --longest needs a model that reads text.")
    target, found = parse_target(c.target), {}

    def fits(seq: int) -> bool:
        found[seq] = attempt(c, target, seq)
        return found[seq].fits

    most = longest_sequence(fits, start=c.seq or 1024)
    print(f"The longest sequence that fits has {most} tokens.", file=sys.stderr, flush=True)
    return found[most or min(found)]


def attempt(c: Config, target: Target, seq: int | None, *, suggest: bool = False) -> Attempt:
    """A dry run, which is also reported in a line on stderr.

    If the step does not fit, `suggest` looks for changes that make it fit. Without it, other meshes
    are tried, unless --mesh is given.
    """
    workload = make_workload(c.model, seq, remat=c.remat, chunk=c.chunk)
    rows = rows_of(c, target)
    mesh = None if c.mesh is None else mesh_sizes(c.mesh)
    # None and not "float32": the library never suggests lowering a dtype that was given.
    dtype = None if c.dtype == "float32" else jnp.dtype(c.dtype)
    options: dict[str, Any] = {"accumulate": c.accumulate, "compute_dtype": dtype}
    if suggest or mesh is not None:
        options |= {"target": target.name, "mesh": mesh, "suggest": suggest}
        run = rc.dry_run(*workload.arguments(rows), **options)
    else:
        run = dry_run_to_fit(workload, rows, target, **options)
    run = replace(run, notes=(*workload.notes, *run.notes))
    settings = {"model": c.model, "seq": workload.seq, "batch": rows, "accumulate": c.accumulate}
    settings |= {"dtype": c.dtype, "remat": c.remat, "chunk": c.chunk}
    print(_line(run, settings), *workload.notes, file=sys.stderr, flush=True)
    return Attempt(run, settings)


def rows_of(c: Config, target: Target) -> int:
    """The global batch size; by default one row for each device and microbatch."""
    if c.accumulate < 1:
        refuse(f"--accumulate must be at least 1, but is {c.accumulate}.")
    rows = target.count * c.accumulate if c.batch is None else c.batch
    if rows < 1:
        refuse(f"--batch must be at least 1, but is {rows}.")
    return rows


def _line(run: rc.DryRun, settings: dict[str, Any]) -> str:
    mesh = ", ".join(f"{axis}={size}" for axis, size in run.mesh.items())
    length = "" if settings["seq"] is None else f", {settings['seq']} tokens"
    sizes = f"{peak_gib(run.report)} of {gib(run.memory['usable'])} GiB"
    return f"{settings['model']} on {run.target} ({mesh}){length}: {sizes}"


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
