"""Writes the results of dry runs into the documentation.

    python experiments/benchmarks/dry_run_docs.py --out runs/dry_run

The text between the marks in the page is replaced by the results of `dry_run.py --table1`,
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
from collectives_docs import between_marks

sys.path.insert(0, str(Path(__file__).parents[1]))
from _cells import beyond_text, paper_table, read_cells
from _table1 import in_order

PAGE = Path(__file__).parents[2] / "docs" / "dry_run_measured.md"


def main(out: Path = Path("runs/dry_run"), page: Path = PAGE) -> None:
    """Writes tables into the page.

    Args:
        out: Directory with the results as JSON.
        page: The page with the marks.
    """
    cells, by_hand, by_cpu = (
        in_order(read_cells(out / f"{name}.json")) for name in ("table1", "megatron", "cpu_bias")
    )
    if not cells:
        raise SystemExit(f"There is no {out}/table1.json. Run dry_run.py --table1 first.")
    text = page.read_text("utf-8")
    text = between_marks(text, "paper", paper_table(cells))
    text = between_marks(text, "beyond", beyond_text(cells))
    if by_hand:
        text = between_marks(text, "megatron", megatron_ahead.table(by_hand))
    if by_cpu:
        text = between_marks(text, "cpu", cpu_bias.report(cells, by_cpu))
    if (found := out / "meshes.json").exists():
        text = between_marks(text, "meshes", meshes.table(json.loads(found.read_text())))
    if (real := out / "real_peak.json").exists():
        text = between_marks(text, "real", real_peak.table(json.loads(real.read_text())))
    page.write_text(text, "utf-8")


if __name__ == "__main__":
    tyro.cli(main)
