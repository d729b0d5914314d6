"""The quality of suggested meshes: every mesh is compiled and compared with the suggestion.

The compilers come with JAX and need no device: the programs are compiled but not run.

    pip install -e ".[experiments]" "jax[cuda12]" "jax[tpu]"
    python experiments/benchmarks/meshes.py

A program takes a few seconds on each mesh, and up to a minute for a TPU. Results are stored in a
file, and a second call continues from there.
"""

import os

# Keeps JAX from looking for accelerators. JAX reads this when it is first imported.
os.environ |= {"JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "2"}

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import tyro

sys.path.insert(0, str(Path(__file__).parents[1]))

from _cells import markdown
from _pages import number

import redcoast as rc
from redcoast_cli._workload import make_workload

# The name of the model, the sequence length, and the batch size.
CASES: tuple[tuple[str, int, int], ...] = (
    ("gpt2-small", 512, 32),
    ("llama3.2-1b", 1024, 8),
    ("t5-large", 512, 16),
    ("bert-large", 512, 32),
    ("gpt2-large", 512, 16),
)
TARGETS = ("cpu:8", "a100-40gb:8", "h100:8", "v4:2x2x1")
MORE_THAN_THERE_ARE = 1000  # meshes
Row = dict[str, Any]


def main(
    results: Path = Path("runs/dry_run/meshes.json"),
    targets: tuple[str, ...] = TARGETS,
    models: tuple[str, ...] = tuple(name for name, *_ in CASES),
) -> None:
    """Prints a table with a line for each model and target.

    Args:
        results: The JSON file that stores the results.
        targets: Names of devices, as for `redcoast.suggest_mesh`.
        models: Names of models.
    """
    rows: list[Row] = json.loads(results.read_text()) if results.exists() else []
    for target in targets:
        for case in CASES:
            known = any(row["model"] == case[0] and row["target"] == target for row in rows)
            if case[0] in models and not known:
                rows.append(measure(target, *case))
                results.write_text(json.dumps(rows, indent=1))
                print(*line(rows[-1]), sep="  ", file=sys.stderr, flush=True)
    wanted = [row for row in rows if row["target"] in targets and row["model"] in models]
    print(table(wanted))


def measure(target: str, model: str, seq: int, rows: int) -> Row:
    """The suggested mesh, and the compiled figures of every mesh."""
    arguments = make_workload(model, seq).arguments(rows)
    every = rc.suggest_mesh(*arguments, target=target, compiled=MORE_THAN_THERE_ARE)
    suggested = rc.suggest_mesh(*arguments, target=target)
    return {
        "target": target,
        "model": model,
        "rows": rows,
        "seq": seq,
        "suggested": dict(suggested),
        "meshes": [dataclasses.asdict(candidate) for candidate in every.candidates],
        "notes": list(suggested.notes),
    }


def table(rows: list[Row]) -> str:
    return markdown(list(HEAD), [line(row) for row in rows])


HEAD = ("model, target", "suggested", "fits", "MB communicated", "least", "ratio")
HEAD += ("ms", "least", "ratio", "peak / estimated memory")


def line(row: Row) -> list[str]:
    """The suggested mesh compared with the best that fits, by bytes communicated and by time."""
    compiled = [candidate for candidate in row["meshes"] if candidate["sent_bytes"] is not None]
    fit = [candidate for candidate in compiled if candidate["fits"]]
    mine = next(candidate for candidate in row["meshes"] if candidate["mesh"] == row["suggested"])
    cells = [f"{row['model']}, {row['target']}", "x".join(map(str, row["suggested"].values()))]
    failed = sum(candidate["error"] is not None for candidate in row["meshes"])
    cells += [f"{len(fit)} of {len(row['meshes'])}" + (f", {failed} failed" if failed else "")]
    for key, unit, digits in (("sent_bytes", 1e6, ",.0f"), ("seconds", 1e-3, ",.1f")):
        least = min((candidate[key] for candidate in fit or compiled), default=0)
        own, ratio = None, None
        if mine[key] is not None:
            own = mine[key] / unit
        if mine[key] and least:
            ratio = mine[key] / least
        cells += [number(own, digits), number(least / unit, digits), number(ratio, ".2f")]
    of = [candidate["peak_memory"] / candidate["estimated_memory"] for candidate in compiled]
    return [*cells, f"{min(of):.2f} to {max(of):.2f}" if of else "-"]


if __name__ == "__main__":
    tyro.cli(main)
