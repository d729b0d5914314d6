"""The communication of training steps with planned, hand-written, rule-based and simple shardings.

For models of many kinds and meshes of 8 emulated CPU devices, the same training step is compiled
with different shardings, and the bytes communicated are read from the compiled program. redcoast's
program is also run, and its loss and gradients are compared with those of one device.

    python experiments/benchmarks/collectives.py --out runs/collectives

Results are added to those in `--out`, so that a part can be measured again.
"""

import json
import sys
from pathlib import Path
from typing import Any

import collectives_plots
import jax
import tyro
from architectures import CASES, Case
from jax.sharding import Mesh
from traffic.claims import check_claims
from traffic.columns import COLUMNS
from traffic.measure import measure
from traffic.tables import claim_lines, detail_table, sent_table

import redcoast as rc

MESHES = ("2,1,4", "1,2,4", "2,2,2", "1,8,1", "8,1,1", "1,1,8")
FAST_CASES = ("GPT-2", "LLaMA, GQA, scanned", "MLP-Mixer", "LSTM", "MAML")
FAST_MESHES = ("1,2,4", "2,2,2")


def main(
    cases: tuple[str, ...] = (),
    meshes: tuple[str, ...] = (),
    columns: tuple[str, ...] = (),
    out: Path = Path("runs/collectives"),
    fast: bool = False,
    check: bool = False,
) -> None:
    """Prints a table for each mesh, and whether the documentation's claims hold.

    Args:
        cases: Names of models, as in the tables; all by default.
        meshes: Sizes of data, fsdp and model, such as 1,2,4; six meshes by default.
        columns: Layouts to compare; all by default.
        out: Directory for the results as JSON, and for the plots.
        fast: Whether to measure only a few models and meshes.
        check: Whether to fail if a claim does not hold.
    """
    rc.emulate_devices(8)
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_numpy_rank_promotion", "raise")
    if fast:
        cases, meshes = cases or FAST_CASES, meshes or FAST_MESHES
    selected = choose(cases, {case.name: case for case in CASES})
    names = list(choose(columns, dict.fromkeys(COLUMNS)))
    sizes = [*map(parse_mesh, meshes or MESHES)]
    out.mkdir(parents=True, exist_ok=True)
    results = read_results(out)
    for case in selected.values():
        measure_case(results, case, sizes, names)
        write_results(out, results)
    results["claims"] = check_claims(results["rows"])
    write_results(out, results)
    print_results(results)
    collectives_plots.draw(out, results)
    if check and any(claim["failed"] for claim in results["claims"]):
        raise SystemExit("Not all claims hold; see above.")


def choose(names: tuple[str, ...], known: dict[str, Any]) -> dict[str, Any]:
    unknown = [name for name in names if name not in known]
    if unknown:
        raise SystemExit(f"Unknown: {', '.join(unknown)}. Choose from: {'; '.join(known)}.")
    return {name: known[name] for name in names or known}


def parse_mesh(text: str) -> tuple[int, int, int]:
    sizes = text.split(",")
    if len(sizes) != 3 or not all(size.isdigit() for size in sizes):
        raise SystemExit(
            f"A mesh must have the form data,fsdp,model, such as 1,2,4, but is {text}."
        )
    return int(sizes[0]), int(sizes[1]), int(sizes[2])


def make_mesh(sizes: tuple[int, int, int]) -> Mesh:
    data, fsdp, model = sizes
    return rc.make_mesh(data=data, fsdp=fsdp, model=model)


def measure_case(
    results: dict[str, Any], case: Case, sizes: list[tuple[int, int, int]], columns: list[str]
) -> None:
    if not case.compiled:
        return
    for size in sizes:
        for column in columns:
            row = measure(case, make_mesh(size), column)
            if row is not None:
                add_row(results["rows"], row)
                report(row)
    jax.clear_caches()


def add_row(rows: list[dict[str, Any]], row: dict[str, Any]) -> None:
    """Adds a row or replaces the one with the same key; sorts rows by case and mesh."""
    key = lambda row: (row["case"], row["mesh"], row["column"])
    rows[:] = [old for old in rows if key(old) != key(row)] + [row]
    cases = {case.name: place for place, case in enumerate(CASES)}
    meshes = {parse_mesh(text): place for place, text in enumerate(MESHES)}
    case_of = lambda row: cases.get(row["case"], len(cases))
    mesh_of = lambda row: meshes.get(tuple(row["mesh"]), len(meshes))
    rows.sort(key=lambda row: (case_of(row), mesh_of(row)))


def report(row: dict[str, Any]) -> None:
    outcome = row.get("error") or f"{row['sent_bytes'] / 1e6:.2f} MB"
    place = f"{row['case']}, {','.join(map(str, row['mesh']))}, {row['column']}"
    print(f"{place}: {outcome}", file=sys.stderr, flush=True)


def read_results(out: Path) -> dict[str, Any]:
    file = out / "collectives.json"
    if not file.exists():
        return {"rows": []}
    return json.loads(file.read_text())


def write_results(out: Path, results: dict[str, Any]) -> None:
    results["jax"] = jax.__version__
    (out / "collectives.json").write_text(json.dumps(results, indent=1))


def print_results(results: dict[str, Any]) -> None:
    rows = results["rows"]
    columns = [name for name in COLUMNS if any(row["column"] == name for row in rows)]
    for mesh in dict.fromkeys(tuple(row["mesh"]) for row in rows):
        print(f"\n### data {mesh[0]}, fsdp {mesh[1]}, model {mesh[2]}\n")
        print(sent_table(rows, mesh, columns))
        print(f"\n{detail_table(rows, mesh)}")
    print(f"\n{claim_lines(results['claims'])}")


if __name__ == "__main__":
    tyro.cli(main)
