"""Stores the results of dry runs in a JSON file, and formats them as tables."""

import json
from operator import itemgetter
from pathlib import Path
from typing import Any

from redcoast_cli._dry_run_command import in_gib, peak_gib, refused

Cell = dict[str, Any]
KEY = ("model", "column")


def read_cells(file: Path) -> list[Cell]:
    if not file.exists():
        return []
    return json.loads(file.read_text())


def write_cell(file: Path, cell: Cell) -> None:
    """Adds a result or replaces the one with the same key; the file is replaced atomically."""
    key_of = itemgetter(*KEY)
    cells = [old for old in read_cells(file) if key_of(old) != key_of(cell)]
    cells.append(cell)
    draft = file.with_suffix(".draft")
    draft.write_text(json.dumps(cells, indent=1))
    draft.replace(file)


def markdown(head: list[str], body: list[list[str]]) -> str:
    """A Markdown table whose first column is text and whose other columns are numbers."""
    rows = [head, ["---", *["---:"] * (len(head) - 1)], *body]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for name, *numbers in rows:
        cells = [name.ljust(widths[0]), *map(str.rjust, numbers, widths[1:])]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def paper_table(cells: list[Cell]) -> str:
    """The table of the paper's configurations: which models fit, and the bytes communicated."""
    return markdown(PAPER, [_paper(cell) for cell in cells if cell["column"] == "paper"])


def beyond_text(cells: list[Cell]) -> str:
    """The table of variants, followed by sentences that list the models that fit."""
    words = {"twice": "At twice the length", "half": "On half of the devices"}
    sentences = []
    for column, where in words.items():
        if of_column := [cell for cell in cells if cell["column"] == column]:
            sentences.append(f"{where}, {_fitting(of_column)}.")
    return f"{beyond_table(cells)}\n\n{' '.join(sentences)}".rstrip()


def _fitting(cells: list[Cell]) -> str:
    """How many of the models fit, and which."""
    fit = [cell["model"] for cell in cells if cell["fits"]]
    if not fit:
        return f"none of {len(cells)} fits"
    words = f"{len(fit)} of {len(cells)} fit"
    if len(fit) == 1:
        words += "s"
    if len(fit) < len(cells):
        words += f" ({', '.join(fit)})"
    return words


def beyond_table(cells: list[Cell]) -> str:
    """Each model at twice the length, on half of the devices, and in bfloat16."""
    columns_of: dict[str, dict[str, Cell]] = {}  # by model, then by column
    for cell in cells:
        columns_of.setdefault(cell["model"], {})[cell["column"]] = cell
    return markdown(BEYOND, [[model, *_beyond(columns)] for model, columns in columns_of.items()])


PAPER = ["fp32, AdamW", "on", "compiler", "mesh", "fits", "peak, GiB", "headroom"]
PAPER += ["GB communicated"]
BEYOND = [
    "one sequence per device",
    "twice the length, GiB",
    "half the devices, GiB",
    "holds",
    "bfloat16, GiB",
    "bfloat16, GB communicated",
]


def _paper(cell: Cell) -> list[str]:
    fits, headroom = "no", "-"
    if cell["fits"]:
        fits = "yes"
    if not refused(cell):
        headroom = f"{1 - cell['memory']['peak'] / cell['usable']:.0%}"
    about = [f"{cell['model']} ({cell['seq']})", cell["target"], cell["compiler"]]
    about += [mesh_text(cell["mesh"]), fits]
    return [*about, peak_gib(cell), headroom, gigabytes(sent_bytes(cell))]


def _beyond(columns: dict[str, Cell]) -> list[str]:
    twice, half, low = map(columns.get, ("twice", "half", "bfloat16"))
    holds, low_bytes = "-", None
    if twice is not None and half is not None:
        which = ("neither", "the devices", "the length", "both")
        holds = which[2 * bool(twice["fits"]) + bool(half["fits"])]
    if low is not None:
        low_bytes = sent_bytes(low)
    return [_peak(twice), _peak(half), holds, _peak(low), gigabytes(low_bytes)]


def _peak(cell: Cell | None) -> str:
    """The peak memory, the usable memory and the mesh."""
    if cell is None:
        return "-"
    return f"{peak_gib(cell)} of {in_gib(cell['usable'])}, {mesh_text(cell['mesh'])}"


def sent_bytes(cell: Cell) -> int | None:
    """The bytes communicated by a device; `None` if the compiler rejected the program."""
    if refused(cell):
        return None
    return cell["sent_bytes"]


def mesh_text(mesh: dict[str, int]) -> str:
    """The axes of more than one device."""
    return ", ".join(f"{axis} {size}" for axis, size in mesh.items() if size > 1) or "one device"


def gigabytes(size: int | float | None) -> str:
    if size is None:
        return "-"
    return f"{size / 1e9:.2f}"
