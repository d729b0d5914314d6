"""Compiles a training step for accelerators that are not there, and says what it needs.

Whether it fits, bytes on each device, bytes sent between devices, how long it takes at least. The
accelerator's own compiler is asked: `pip install "redcoast[tpu]"` or `"redcoast[cuda12]"`; without
it, the CPU's stands in. Exits with 1 if the step does not fit, with 2 if there is no answer.

    python experiments/dry_run.py --model opt-66b --target v4:4x4x4 --seq 512
    python experiments/dry_run.py --model path/to/config.json --target a100-80gb --smallest
    python experiments/dry_run.py --table1
"""

import os

# No accelerator is looked for. JAX reads this when it is first imported.
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
from _usage import refuse
from _workload import make_workload, state_bytes

import redcoast as rc
from redcoast.dryrun._target import Target, parse_target

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


@dataclass(frozen=True)
class Attempt:
    """A dry run; `asked` are the model, the batch and the settings that it is of."""

    run: rc.DryRun
    asked: dict[str, Any]

    @property
    def fits(self) -> bool:
        return self.run.fits

    @property
    def report(self) -> dict[str, Any]:
        return self.asked | self.run.report


def main(c: Config) -> None:
    try:
        found = answer(c)
    except (ValueError, TypeError, RuntimeError) as error:
        # RuntimeError is a compiler that failed: Python would exit with 1, as if it did not fit.
        refuse(str(error))
    if found is not None:
        print(json.dumps(found.report, indent=1) if c.json else found.run)
        raise SystemExit(0 if found.fits else 1)


def answer(c: Config) -> Attempt | None:
    """The dry run that was asked for; of a table there is none, and it is printed."""
    if c.smallest + c.longest + c.table1 > 1:
        refuse("Only one of --smallest, --longest and --table1 can be asked for.")
    if c.table1:
        if other := chosen(c) - {"table1", "rows", "columns", "out", "json"}:
            refuse(f"--table1 has models and settings of its own: leave out {written(other)}.")
        return print_table1(c.out, rows=c.rows, columns=c.columns, as_json=c.json)
    if parts := chosen(c) & {"rows", "columns"}:
        refuse(f"Without --table1 there are no rows and columns: leave out {written(parts)}.")
    if c.smallest:
        return smallest(c)
    return longest(c) if c.longest else attempt(c, parse_target(c.target), c.seq, suggest=True)


def chosen(c: Config) -> set[str]:
    """The names of the options that are not as they are by default."""
    return {field.name for field in fields(c) if getattr(c, field.name) != field.default}


def written(options: set[str]) -> str:
    return ", ".join(f"--{name}" for name in sorted(options))


def smallest(c: Config) -> Attempt:
    """On the fewest chips on which it fits."""
    if c.mesh is not None:
        refuse("--smallest chooses the number of devices: leave --mesh out.")
    chip = read_chip(c.target)
    least = state_bytes(make_workload(c.model, c.seq))
    for target in sizes_of(chip):
        # Without the compiler's help: what stays between steps does not fit on fewer.
        if least <= target.count * chip.usable and (found := attempt(c, target, c.seq)).fits:
            return found
    words = f"{c.model} fits on no number of {chip.name} that can be tried."
    print(words, file=sys.stderr, flush=True)
    raise SystemExit(1)


def longest(c: Config) -> Attempt:
    """With the longest sequence that fits; or with 128 tokens, if not even those do."""
    if make_workload(c.model, c.seq).seq is None:
        refuse(f"{c.model} reads images, and no texts that --longest could be asked of.")
    target, found = parse_target(c.target), {}

    def fits(seq: int) -> bool:
        found[seq] = attempt(c, target, seq)
        return found[seq].fits

    most = longest_sequence(fits, start=c.seq or 1024)
    print(f"The longest sequence that fits has {most} tokens.", file=sys.stderr, flush=True)
    return found[most or min(found)]


def attempt(c: Config, target: Target, seq: int | None, *, suggest: bool = False) -> Attempt:
    """A dry run, which is told of in a line.

    If it does not fit, changes are looked for with `suggest`, and else other meshes, unless one was
    asked for.
    """
    workload = make_workload(c.model, seq, remat=c.remat, chunk=c.chunk)
    rows, mesh = rows_of(c, target), read_mesh(c.mesh)
    # Not float32 by its name: the library leaves alone what was asked for, and never suggests less.
    dtype = None if c.dtype == "float32" else jnp.dtype(c.dtype)
    options: dict[str, Any] = {"accumulate": c.accumulate, "compute_dtype": dtype}
    if suggest or mesh is not None:
        options |= {"target": target.name, "mesh": mesh, "suggest": suggest}
        run = rc.dry_run(*workload.arguments(rows), **options)
    else:
        run = dry_run_to_fit(workload, rows, target, **options)
    run = replace(run, notes=(*workload.notes, *run.notes))
    asked = {"model": c.model, "seq": workload.seq, "batch": rows, "accumulate": c.accumulate}
    asked |= {"dtype": c.dtype, "remat": c.remat, "chunk": c.chunk}
    print(_line(run, asked), *workload.notes, file=sys.stderr, flush=True)
    return Attempt(run, asked)


def rows_of(c: Config, target: Target) -> int:
    """Of a batch; by default one for each device and microbatch."""
    if c.accumulate < 1:
        refuse(f"A batch is split into at least one part, and --accumulate is {c.accumulate}.")
    rows = target.count * c.accumulate if c.batch is None else c.batch
    if rows < 1:
        refuse(f"A batch has at least one sequence or image, and --batch is {rows}.")
    return rows


def read_mesh(text: str | None) -> dict[str, int] | None:
    """The sizes in `data=1,fsdp=4,model=2`."""
    if text is None:
        return None
    pairs = [part.split("=") for part in text.split(",")]
    if any(len(p) != 2 or not p[1].isdigit() or p[0] not in AXES for p in pairs):
        refuse(f"A mesh is written as data=1,fsdp=4,model=2, and not as {text}.")
    return {axis: int(size) for axis, size in pairs}


def _line(run: rc.DryRun, asked: dict[str, Any]) -> str:
    mesh = ", ".join(f"{axis}={size}" for axis, size in run.mesh.items())
    length = "" if asked["seq"] is None else f", {asked['seq']} tokens"
    sizes = f"{peak_gib(run.report)} of {gib(run.memory['usable'])} GiB"
    return f"{asked['model']} on {run.target} ({mesh}){length}: {sizes}"


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
