"""Dry runs of the models and machines of the paper's Table 1 (arXiv:2310.16355)."""

import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from _cells import beyond_text, in_gib, paper_table, peak_gib, read_cells, write_cell
from _options import Maybe, refuse

import redcoast as rc
from redcoast_cli._reach import dry_run_to_fit
from redcoast_cli._workload import make_workload

PAPER_1080TI = 10 * 10**9  # bytes; the paper counts 10 of the card's 11 GB


@dataclass(frozen=True)
class Row:
    """A model, its sequence length, its machine, and half of that machine."""

    model: str
    seq: int
    target: str
    half: str
    usable: Maybe[int] = None  # bytes of memory on a device, instead of the target's


ROWS = (
    Row("bart-large", 1024, "1080ti:2", "1080ti:1", PAPER_1080TI),
    Row("gpt2-large", 512, "1080ti:2", "1080ti:1", PAPER_1080TI),
    Row("llama-7b", 1024, "a100-40gb:4", "a100-40gb:2"),
    Row("gptj-6b", 1024, "a100-40gb:4", "a100-40gb:2"),
    Row("t5-xxl", 512, "v4:2x2x2", "v4:2x2x1"),
    Row("opt-13b", 1024, "v4:2x2x2", "v4:2x2x1"),
    Row("opt-66b", 512, "v4:4x4x4", "v4:2x4x4"),
)
# As in the paper; in bfloat16; at twice the sequence length; on half of the devices.
COLUMNS = ("paper", "bfloat16", "twice", "half")


def print_table1(
    out: Path, *, rows: tuple[str, ...], columns: tuple[str, ...], as_json: bool
) -> None:
    """Measures the chosen cells, adds them to the results in `out`, and prints all results."""
    out.mkdir(parents=True, exist_ok=True)
    for row in choose_rows(rows):
        for column in choose(columns, COLUMNS):
            cell = measure(row, column)
            write_cell(out / "table1.json", cell)
            print(f"{row.model}, {column}: {_outcome(cell)}", file=sys.stderr, flush=True)
    cells = in_order(read_cells(out / "table1.json"))
    text = f"{paper_table(cells)}\n\n{beyond_text(cells)}"
    if as_json:
        text = json.dumps(cells, indent=1)
    print(text)


def choose_rows(names: tuple[str, ...]) -> list[Row]:
    chosen = choose(names, tuple(row.model for row in ROWS))
    return [row for row in ROWS if row.model in chosen]


def choose(names: tuple[str, ...], known: tuple[str, ...]) -> tuple[str, ...]:
    if unknown := [name for name in names if name not in known]:
        refuse(f"Unknown: {', '.join(unknown)}. Choose from {', '.join(known)}.")
    return names or known


def measure(row: Row, column: str, *, mesh: dict[str, int] | None = None) -> dict[str, Any]:
    """Measures a cell: fp32, AdamW, one sequence for each device, all layers rematerialised.

    The mesh is the given one, or the one with the lowest estimated cost. If the step does not fit
    on that, other meshes are compiled.
    """
    target, seq, compute_dtype = row.target, row.seq, None
    if column == "half":
        target = row.half
    elif column == "twice":
        seq = 2 * row.seq
    elif column == "bfloat16":
        compute_dtype = jnp.bfloat16
    chip, _, sizes = target.partition(":")
    devices = math.prod(map(int, sizes.split("x")))
    usable = row.usable
    if usable is None:
        usable = rc.CHIPS[chip].usable
    workload = make_workload(row.model, seq)
    settings: dict[str, Any] = {"compute_dtype": compute_dtype}
    if mesh is None:
        run = dry_run_to_fit(workload, devices, target, usable=usable, **settings)
    else:
        settings |= {"target": target, "mesh": mesh}
        run = rc.dry_run(*workload.arguments(devices), **settings, suggest=False)
    return {
        "model": row.model,
        "column": column,
        "seq": workload.seq,
        "batch": devices,
        "workload_notes": list(workload.notes),
        **{name: value for name, value in run.report.items() if name != "plan"},
        "usable": usable,
        "fits": run.fits and run.memory["peak"] <= usable,
        "jax": jax.__version__,
    }


def in_order(cells: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Sorts cells by the order of models in the table, and then by column."""
    models = [row.model for row in ROWS]
    places = {name: place for place, name in enumerate(COLUMNS)}
    key = lambda cell: (models.index(cell["model"]), places.get(cell["column"], 0))
    return sorted(cells, key=key)


def _outcome(cell: dict[str, Any]) -> str:
    sizes = f"{peak_gib(cell)} of {in_gib(cell['usable'])} GiB"
    return f"{sizes}, {cell['compile_seconds']:.0f} s to compile"
