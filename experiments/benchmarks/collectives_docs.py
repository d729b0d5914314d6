"""Writes the tables and plots of `collectives.py` into the documentation.

    python experiments/benchmarks/collectives_docs.py --out runs/collectives

The text between the marks in the page is replaced.
"""

import json
from pathlib import Path
from typing import Any

import collectives_plots
import tyro
from _pages import between_marks
from traffic.claims import MIXED, check_claims
from traffic.columns import COLUMNS
from traffic.tables import detail_table, sent_table

DOCS = Path(__file__).parents[2] / "docs"
FAMILIES = {
    "transformer": "Transformers, relative to Megatron's communication",
    "other": "Other models, relative to fsdp over all devices",
}


def main(
    out: Path = Path("runs/collectives"),
    page: Path = DOCS / "measured" / "collectives.md",
    images: Path = DOCS / "images",
) -> None:
    """Writes tables into the page, and plots into a directory next to it.

    Args:
        out: Directory with the `collectives.json` of `collectives.py`.
        page: The page with the marks.
        images: Directory for the plots, beside the directory of the page.
    """
    file = out / "collectives.json"
    if not file.exists():
        raise SystemExit(f"There is no {file}. Run collectives.py --out {out} first.")
    results = json.loads(file.read_text())
    text = between_marks(
        page.read_text("utf-8"), "collectives", measured(results, f"../{images.name}")
    )
    collectives_plots.draw(images, results)
    page.write_text(text, "utf-8")


def measured(results: dict[str, Any], images: str) -> str:
    """The text between the marks: mixed meshes first, the others collapsed."""
    rows = results["rows"]
    meshes = sorted(dict.fromkeys(tuple(row["mesh"]) for row in rows), key=order)
    parts = [of_mesh(rows, mesh, images) for mesh in meshes]
    # Computed from all rows: the last run may have measured only a part.
    claims = [claim for claim in check_claims(rows) if claim["checked"]]
    parts.append("### Checks\n\n" + claim_list(claims))
    return "\n\n".join(parts)


def order(mesh: tuple[int, ...]) -> tuple[bool, list[int]]:
    return mesh not in MIXED, [-size for size in mesh]


def of_mesh(rows: list[dict[str, Any]], mesh: tuple[int, ...], images: str) -> str:
    here = [row for row in rows if tuple(row["mesh"]) == mesh]
    columns = [name for name in COLUMNS if any(row["column"] == name for row in here)]
    name = "_".join(map(str, mesh))
    title = f"data {mesh[0]}, fsdp {mesh[1]}, model {mesh[2]}"
    pictures = [
        f"![{words}, {title}]({images}/{family}s_{name}.png)"
        for family, words in FAMILIES.items()
        if any(row["family"] == family for row in here)
    ]
    table, details = sent_table(rows, mesh, columns), detail_table(rows, mesh)
    if mesh not in MIXED:
        return folded(title, "\n\n".join([*pictures, table, details]))
    if details:
        details = folded(f"More of redcoast's programs for {title}", details)
    table = folded(f"The figures for {title}", table)
    return "\n\n".join([f"### {title}", *pictures, table, details])


def folded(title: str, text: str) -> str:
    indented = "\n".join(f"    {line}".rstrip() for line in text.split("\n"))
    return f'??? note "{title}"\n\n{indented}'


def claim_list(claims: list[dict[str, Any]]) -> str:
    """Each claim with its worst figure, and the places where it does not hold."""
    lines = []
    for claim in claims:
        met = claim["checked"] - len(claim["failed"])
        mark = "Does not hold everywhere"
        if claim["holds"]:
            mark = "Holds"
        of = f"{met} of {claim['checked']}; worst: {claim['worst']}"
        lines.append(f"- **{mark}**: {claim['claim']} ({of})")
        lines += [f"    - {line}" for line in claim["failed"]]
    return "\n".join(lines)


if __name__ == "__main__":
    tyro.cli(main)
