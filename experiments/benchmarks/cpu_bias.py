"""How far the CPU's compiler is off where it stands in for an accelerator's.

The dry runs of the paper's Table 1 that `dry_run.py --table1` kept, done again with nothing but the
CPU's compiler, on the same meshes: peak memory and bytes sent, against those of the targets' own.

    python experiments/dry_run.py --table1 && python experiments/benchmarks/cpu_bias.py

Results are added to those in `--out`, so that a part can be measured again.
"""

import os

# No accelerator is looked for. JAX reads this when it is first imported.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import sys
from pathlib import Path
from typing import Any

import tyro

from redcoast._dryrun import devices

sys.path.insert(0, str(Path(__file__).parents[1]))
from _cells import gib, gigabytes, markdown, read_cells, write_cell
from _table1 import COLUMNS, choose, choose_rows, in_order, measure

CLOSE = 0.1  # of the peak


def main(
    rows: tuple[str, ...] = (),
    columns: tuple[str, ...] = ("paper",),
    out: Path = Path("runs/dry_run"),
) -> None:
    """Prints a table with a line for each dry run, and those that are off by more than 10 %.

    Args:
        rows: Models of the table, such as opt-66b; all by default.
        columns: Which of its dry runs: paper, bfloat16, twice, half.
        out: Directory with the results as JSON.
    """
    known = {(cell["model"], cell["column"]): cell for cell in read_cells(out / "table1.json")}
    # As on a machine where they are not installed.
    devices._installed = lambda compiler: False
    for row in choose_rows(rows):
        for column in choose(columns, COLUMNS):
            cell = known.get((row.model, column))
            if cell is None or cell["compiler"] == "cpu":
                print(f"{row.model}, {column}: not measured with its own compiler", file=sys.stderr)
                continue
            write_cell(out / "cpu_bias.json", measure(row, column, mesh=cell["mesh"]))
            print(f"{row.model}, {column}: done", file=sys.stderr, flush=True)
    print(report(*(in_order(read_cells(out / f"{n}.json")) for n in ("table1", "cpu_bias"))))


def report(targets: list[dict[str, Any]], cpus: list[dict[str, Any]]) -> str:
    known = {name(cell): cell for cell in targets}
    pairs = [(known[name(cell)], cell) for cell in cpus if name(cell) in known]
    heads = ["", "on", "peak, GiB", "by the CPU's", "off by", "GB sent", "by the CPU's", "times"]
    table = markdown(heads, [line(target, cpu) for target, cpu in pairs])
    far = [name(cpu) for target, cpu in pairs if abs(off(target, cpu)) > CLOSE]
    return (
        f"{table}\n\nPeak memory is off by more than {CLOSE:.0%} for: {', '.join(far) or 'none'}."
    )


def line(target: dict[str, Any], cpu: dict[str, Any]) -> list[str]:
    sent = [cell["sent_bytes"] for cell in (target, cpu)]
    return [
        name(target),
        target["target"],
        gib(target["memory"]["peak"]),
        gib(cpu["memory"]["peak"]),
        f"{off(target, cpu):+.1%}",
        *map(gigabytes, sent),
        f"{sent[1] / sent[0]:.2f}" if sent[0] else "-",
    ]


def off(target: dict[str, Any], cpu: dict[str, Any]) -> float:
    return cpu["memory"]["peak"] / target["memory"]["peak"] - 1


def name(cell: dict[str, Any]) -> str:
    column = "" if cell["column"] == "paper" else f", {cell['column']}"
    return f"{cell['model']} ({cell['seq']}){column}"


if __name__ == "__main__":
    tyro.cli(main)
