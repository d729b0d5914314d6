"""Formats the results as Markdown tables."""

from typing import Any

from _cells import markdown as markdown
from _pages import number as number

from .claims import Place, Row, by_place


def sent_table(rows: list[Row], mesh: tuple[int, ...], columns: list[str]) -> str:
    """The table of megabytes that a device communicates in a step, for each case and column."""
    places = {place: at_place for place, at_place in by_place(rows).items() if place[1] == mesh}
    head = ["MB communicated", *columns]
    body = [
        [case, *(megabytes(at_place.get(column), "sent_bytes") for column in columns)]
        for (case, _), at_place in places.items()
    ]
    return markdown(head, body)


def detail_table(rows: list[Row], mesh: tuple[int, ...]) -> str:
    """The table of other figures of redcoast's column."""
    head = ["redcoast", "collectives", "temporaries, MB", "parameters, MB", "over `model`"]
    head += ["plan, s", "compile, s", "loss error", "gradient error"]
    places: list[tuple[Place, Row]] = [
        (place, at_place["redcoast"])
        for place, at_place in by_place(rows).items()
        if place[1] == mesh and "redcoast" in at_place
    ]
    body = [
        [
            place[0],
            str(row["collectives"]),
            megabytes(row, "temporary_bytes"),
            megabytes(row, "param_bytes"),
            f"{row['model_share']:.1%}",
            number(row["plan_seconds"], ".2f"),
            number(row["compile_seconds"], ".1f"),
            number(row.get("loss_error"), ".0e"),
            gradient_error(row),
        ]
        for place, row in places
    ]
    if not body:
        return ""
    return markdown(head, body)


def megabytes(row: Row | None, name: str) -> str:
    if row is None or row[name] is None:
        return "-"
    return number(row[name] / 1e6, ".2f")


def gradient_error(row: Row) -> str:
    """The error in float32 or, if that is too large, in float64."""
    if "float64" in row:
        return f"{number(row['float64']['grad_error'], '.0e')} in float64"
    return number(row.get("grad_error"), ".0e")


def claim_lines(claims: list[dict[str, Any]]) -> str:
    """Lists each claim with its worst figure, followed by the places where it fails."""
    lines = []
    for claim in claims:
        mark = {True: "holds", False: "FAILS", None: "unchecked"}[claim["holds"]]
        count = f"{claim['checked'] - len(claim['failed'])} of {claim['checked']}"
        lines.append(f"{mark}: {claim['claim']} ({count}; worst {claim['worst']})")
        lines += [f"    {line}" for line in claim["failed"]]
    return "\n".join(lines)
