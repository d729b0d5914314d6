"""Checks the claims of the documentation against the measurements."""

from collections.abc import Iterable, Iterator
from typing import Any

Row = dict[str, Any]
Place = tuple[str, tuple[int, ...]]  # a case and a mesh
Check = tuple[Place, float, str]  # the place, the figure with an upper bound, and a description

MIXED = ((1, 2, 4), (2, 2, 2))
SIMPLE = ("replicated", "fsdp", "rules")
TIE = 1.01
SAME_MEMORY = 1.02
ERROR = 1e-5


def by_place(rows: Iterable[Row]) -> dict[Place, dict[str, Row]]:
    """Groups rows by case and mesh, and then by column, without rows that failed."""
    places: dict[Place, dict[str, Row]] = {}
    for row in rows:
        columns = places.setdefault((row["case"], tuple(row["mesh"])), {})
        if "error" not in row:
            columns[row["column"]] = row
    return places


def check_claims(rows: list[Row]) -> list[dict[str, Any]]:
    """Checks all claims; returns for each the number of checks, the worst, and the failures."""
    places = by_place(rows)
    return [
        claim("redcoast's column can be measured everywhere", failures(rows), most=0),
        claim(f"transformers: at most {TIE} x Megatron's bytes", to_megatron(places), most=TIE),
        claim(
            "transformers on mixed meshes: at most 0.6 x Megatron's bytes",
            (check for check in to_megatron(places) if check[0][1] in MIXED),
            most=0.6,
        ),
        claim(
            f"others: at most {TIE} x the best simple layout with no more parameter memory",
            to_simple(places),
            most=TIE,
        ),
        claim("at least 0.9 of the parameters are tensor-parallel", unsharded(places), most=0.1),
        claim(f"loss and gradients within {ERROR} of one device", errors(places), most=ERROR),
        claim("no more collectives where propagation is as good", added(places), most=0),
    ]


def claim(words: str, checks: Iterable[Check], *, most: float) -> dict[str, Any]:
    checked = sorted(checks, key=lambda check: check[1], reverse=True)
    failed = [check for check in checked if not check[1] <= most]
    return {
        "claim": words,
        "holds": not failed if checked else None,
        "checked": len(checked),
        "worst": describe(checked[0]) if checked else "nothing to check",
        "failed": [describe(check) for check in failed],
    }


def describe(check: Check) -> str:
    (case, mesh), _, words = check
    return f"{case} on {','.join(map(str, mesh))}: {words}" if mesh else f"{case}: {words}"


def failures(rows: list[Row]) -> Iterator[Check]:
    for row in rows:
        if row["column"] == "redcoast":
            words = row.get("error", "measured")
            yield (row["case"], tuple(row["mesh"])), float("error" in row), words


def ratio(ours: Row, theirs: Row) -> tuple[float, str]:
    a, b = ours["sent_bytes"], theirs["sent_bytes"]
    value = float(a > 0)
    if b:
        value = a / b
    return value, f"{a / 1e6:.2f} MB against {b / 1e6:.2f} MB ({theirs['column']}), {value:.3f}"


def to_megatron(places: dict[Place, dict[str, Row]]) -> Iterator[Check]:
    for place, columns in places.items():
        if {"redcoast", "megatron"} <= columns.keys():
            yield place, *ratio(columns["redcoast"], columns["megatron"])


def to_simple(places: dict[Place, dict[str, Row]]) -> Iterator[Check]:
    for place, columns in places.items():
        ours = columns.get("redcoast")
        if ours is None or ours["family"] == "transformer":
            continue
        room = SAME_MEMORY * ours["param_bytes"]
        simple = [columns[name] for name in SIMPLE if name in columns]
        fitting = [row for row in simple if row["param_bytes"] <= room]
        if fitting:
            yield place, *ratio(ours, min(fitting, key=lambda row: row["sent_bytes"]))


def unsharded(places: dict[Place, dict[str, Row]]) -> Iterator[Check]:
    """The fraction of the parameters that is not sharded over `model`, on meshes with this axis."""
    for place, columns in places.items():
        if place[1][2] > 1 and "redcoast" in columns:
            share = columns["redcoast"]["model_share"]
            yield place, 1 - share, f"{share:.3f}"


def errors(places: dict[Place, dict[str, Row]]) -> Iterator[Check]:
    """The differences from one device in float32 or, if they are too large, in float64."""
    for place, columns in places.items():
        row = columns.get("redcoast", {})
        if "grad_error" in row:
            differences = row.get("float64", row)
            words = (
                f"loss {differences['loss_error']:.1e}, gradient {differences['grad_error']:.1e}"
            )
            words += f" at {differences['grad_error_at']}"
            if "float64" in row:
                words += f" in float64, {row['grad_error']:.1e} in float32"
            yield place, max(differences["loss_error"], differences["grad_error"]), words


def added(places: dict[Place, dict[str, Row]]) -> Iterator[Check]:
    """The number of collectives that constraints add if the compiler alone communicates no more."""
    for place, columns in places.items():
        if not {"redcoast", "unconstrained"} <= columns.keys():
            continue
        ours, free = columns["redcoast"], columns["unconstrained"]
        if free["sent_bytes"] <= ours["sent_bytes"]:
            more = ours["collectives"] - free["collectives"]
            words = f"{ours['collectives']} against {free['collectives']}"
            yield place, float(more), f"{words}; {ratio(ours, free)[1]}"
