"""The table of what agrees with `transformers`, which a run prints at its end.

    nox -s parity -- --agreement runs/agreement.jsonl
    python tests/parity/agreement.py runs/agreement.jsonl

The second command writes the table into docs/measured/parity.md.
"""

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

# Numbers of comparisons that agree, and the largest errors of all configurations.
COUNTS = ("configurations", "decoding", "adapters read", "adapters written", "failed")
ERRORS = ("logits", "gradients", "saved and read")
ORDER = ("configurations", "logits", "gradients", "decoding")
ORDER += ("adapters read", "adapters written", "saved and read", "failed")

BEGIN, END = "<!-- parity:begin -->", "<!-- parity:end -->"

Entry = tuple[str, str, float]
measured: list[Entry] = []  # by the test that is running


def record(case: Any, column: str, value: float = 1) -> None:
    """Records an error or a comparison of a case, in the row of its type of model."""
    assert column in COUNTS or column in ERRORS, column
    measured.append((case.model.config_class.model_type, column, float(value)))


def table(entries: Iterable[Entry]) -> str:
    """Formats what all tests have recorded as a table with a row for each type of model."""
    cells: dict[str, dict[str, float]] = {}
    for family, column, value in entries:
        row = cells.setdefault(family, {})
        before = row.get(column, 0)
        row[column] = before + value if column in COUNTS else max(before, value)
    shown = [column for column in ORDER if any(column in row for row in cells.values())]
    show = lambda column, value: f"{value:.0f}" if column in COUNTS else f"{value:.0e}"
    rows = [["type", *shown], ["---", *["---:"] * len(shown)]]
    rows += [
        [family, *(show(c, row[c]) if c in row else "" for c in shown)]
        for family, row in sorted(cells.items())
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    line = lambda row: " | ".join(cell.ljust(n) for cell, n in zip(row, widths, strict=True))
    return "\n".join(f"| {line(row)} |" for row in rows)


def write(path: Path, test: str, entries: Iterable[Entry]) -> None:
    """Adds what a test has found to a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps({"test": test, "found": [*entries]}) + "\n")


def read(path: Path) -> list[Entry]:
    """Returns what the last run of each test has found."""
    lines = map(json.loads, path.read_text().splitlines() if path.exists() else ())
    last = {line["test"]: line["found"] for line in lines}
    return [tuple(entry) for found in last.values() for entry in found]


def main(path: Path) -> None:
    page = Path(__file__).parents[2] / "docs/measured/parity.md"
    before, rest = page.read_text().split(BEGIN)
    after = rest[rest.index(END) :]
    page.write_text(f"{before}{BEGIN}\n\n{table(read(path))}\n\n{after}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
