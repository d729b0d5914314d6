"""Stores the results of dry runs in a JSON file, and formats them as tables."""

import json
from pathlib import Path
from typing import Any

from redcoast_cli._dry_run_command import in_gib, peak_gib, refused

Cell = dict[str, Any]
KEY = ("model", "column")


def read_cells(file: Path) -> list[Cell]:
    return json.loads(file.read_text()) if file.exists() else []


def write_cell(file: Path, cell: Cell) -> None:
    """Adds a result or replaces the one with the same key; the file is replaced atomically."""
    same = lambda old: all(old[name] == cell[name] for name in KEY)
    cells = [*(old for old in read_cells(file) if not same(old)), cell]
    draft = file.with_suffix(".draft")
    draft.write_text(json.dumps(cells, indent=1))
    draft.replace(file)


def markdown(head: list[str], body: list[list[str]]) -> str:
    """A Markdown table whose first column is text and whose other columns are numbers."""
    rows = [head, ["---", *["---:"] * (len(head) - 1)], *body]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    pad = lambda row: [row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]
    return "\n".join(f"| {' | '.join(pad(row))} |" for row in rows)


def paper_table(cells: list[Cell]) -> str:
    """The table of the paper's configurations: which models fit, and the bytes communicated."""
    return markdown(PAPER, [_paper(cell) for cell in cells if cell["column"] == "paper"])


def beyond_text(cells: list[Cell]) -> str:
    """The table of variants, followed by sentences that list the models that fit."""
    words = {"twice": "At twice the length", "half": "On half of the devices"}
    lines = [_fitting(where, [x for x in cells if x["column"] == c]) for c, where in words.items()]
    return "\n\n".join([beyond_table(cells), " ".join(filter(None, lines))]).rstrip()


def _fitting(where: str, cells: list[Cell]) -> str:
    fit = [cell["model"] for cell in cells if cell["fits"]]
    if not cells or not fit:
        return f"{where}, none of {len(cells)} fits." if cells else ""
    which = "" if len(fit) == len(cells) else f" ({', '.join(fit)})"
    return f"{where}, {len(fit)} of {len(cells)} fit{'s' if len(fit) == 1 else ''}{which}."


def beyond_table(cells: list[Cell]) -> str:
    """Each model at twice the length, on half of the devices, and in bfloat16."""
    found = {(cell["model"], cell["column"]): cell for cell in cells}
    models = dict.fromkeys(cell["model"] for cell in cells)
    return markdown(BEYOND, [[model, *_beyond(found, model)] for model in models])


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
    return [
        f"{cell['model']} ({cell['seq']})",
        cell["target"],
        cell["compiler"],
        mesh_text(cell["mesh"]),
        "yes" if cell["fits"] else "no",
        peak_gib(cell),
        "-" if refused(cell) else f"{1 - cell['memory']['peak'] / cell['usable']:.0%}",
        gigabytes(sent_bytes(cell)),
    ]


def _beyond(found: dict[tuple[str, str], Cell], model: str) -> list[str]:
    twice, half, low = (found.get((model, column)) for column in ("twice", "half", "bfloat16"))
    names = {"the length": twice, "the devices": half}
    holds = [name for name, cell in names.items() if cell is not None and cell["fits"]]
    both = "both" if len(holds) == 2 else (holds or ["neither"])[0]
    known = both if twice is not None and half is not None else "-"
    return [_peak(twice), _peak(half), known, _peak(low), gigabytes(low and sent_bytes(low))]


def _peak(cell: Cell | None) -> str:
    """The peak memory, the usable memory and the mesh."""
    if cell is None:
        return "-"
    return f"{peak_gib(cell)} of {in_gib(cell['usable'])}, {mesh_text(cell['mesh'])}"


def sent_bytes(cell: Cell) -> int | None:
    """The bytes communicated by a device; `None` if the compiler rejected the program."""
    return None if refused(cell) else cell["sent_bytes"]


def mesh_text(mesh: dict[str, int]) -> str:
    """The axes of more than one device."""
    return ", ".join(f"{axis} {size}" for axis, size in mesh.items() if size > 1) or "one device"


def gigabytes(size: Any) -> str:
    return "-" if size is None else f"{size / 1e9:.2f}"
