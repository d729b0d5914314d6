"""The table of what agrees with `transformers`, which a run prints at its end."""

from collections.abc import Iterable
from typing import Any

# Numbers of comparisons that agree, and the largest errors of all configurations.
COUNTS = ("configurations", "decoding", "adapters read", "adapters written", "failed")
ERRORS = ("logits", "gradients", "saved and read")
ORDER = ("configurations", "logits", "gradients", "decoding")
ORDER += ("adapters read", "adapters written", "saved and read", "failed")

Entry = tuple[str, str, float]
measured: list[Entry] = []  # by the test that is running


def record(case: Any, column: str, value: float = 1) -> None:
    """Records an error or a comparison of a case, in the row of its type of model."""
    assert column in COUNTS or column in ERRORS, column
    measured.append((case.model.config_class.model_type, column, value))


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
