"""Writes the results of dry runs into the documentation.

    python experiments/benchmarks/dry_run_docs.py --out runs/dry_run

The text between the marks in the pages is replaced by the results of `dry_run.py --table1`,
`megatron_ahead.py`, `cpu_bias.py`, `meshes.py` and `real_peak.py`.
"""

import json
import sys
from pathlib import Path

import cpu_bias
import megatron_ahead
import meshes
import real_peak
import tyro
from _pages import between_marks

sys.path.insert(0, str(Path(__file__).parents[1]))
from _cells import beyond_text, paper_table, read_cells
from _table1 import in_order

DOCS = Path(__file__).parents[2] / "docs"


def main(
    out: Path = Path("runs/dry_run"),
    page: Path = DOCS / "dry_run_measured.md",
    more: Path = DOCS / "measured" / "dry_runs.md",
) -> None:
    """Writes tables into two pages.

    Args:
        out: Directory with the results as JSON.
        page: The page with the marks of the paper's table.
        more: The page with the marks of all other tables.
    """
    cells, by_hand, by_cpu = (
        in_order(read_cells(out / f"{name}.json")) for name in ("table1", "megatron", "cpu_bias")
    )
    if not cells:
        raise SystemExit(f"There is no {out}/table1.json. Run dry_run.py --table1 first.")
    text = between_marks(page.read_text("utf-8"), "paper", paper_table(cells))
    if (real := out / "real_peak.json").exists():
        text = between_marks(text, "real", real_peak.table(json.loads(real.read_text())))
    others = between_marks(more.read_text("utf-8"), "beyond", beyond_text(cells))
    if by_hand:
        others = between_marks(others, "megatron", megatron_ahead.table(by_hand))
    if by_cpu:
        others = between_marks(others, "cpu", cpu_bias.report(cells, by_cpu))
    if (compared := out / "meshes.json").exists():
        others = between_marks(others, "meshes", meshes.table(json.loads(compared.read_text())))
    page.write_text(text, "utf-8")
    more.write_text(others, "utf-8")


if __name__ == "__main__":
    tyro.cli(main)
