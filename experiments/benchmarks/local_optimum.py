"""Whether a plan can be improved by sharding one array differently.

For small models of many kinds and meshes of 8 emulated CPU devices, the sharding of each array is
changed by `overrides`, one array at a time. The changed program is planned, constrained and
compiled, and its communication is compared with that of the original plan. Changes that need more
memory for parameters are left out. If a plan is a local optimum, no change communicates less.

    python experiments/benchmarks/local_optimum.py --out runs/local_optimum

Results are added to those in `--out`, so that a part can be measured again.
"""

import itertools
import json
import re
import sys
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

import jax
import tyro
from architectures import VARIED, Case
from collectives import choose, make_mesh, parse_mesh
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from traffic.claims import SAME_MEMORY, SIMPLE
from traffic.columns import COLUMNS, LARGE, Layout, abstract, abstract_key, batch_shardings
from traffic.measure import measure, measure_layout
from traffic.tables import markdown

import redcoast as rc

MESHES = ("2,1,4", "1,1,8", "1,2,4")
LESS, SAME_WORK = 0.99, 1.01
Row = dict[str, Any]


def main(
    cases: tuple[str, ...] = (),
    meshes: tuple[str, ...] = MESHES,
    simple: tuple[str, ...] = SIMPLE,
    changes: bool = True,
    out: Path = Path("runs/local_optimum"),
    check: bool = False,
) -> None:
    """Prints a line for each model and mesh, and the changes that communicate at least 1 % less.

    Args:
        cases: Names of models, as in the table; all by default.
        meshes: Sizes of data, fsdp and model, such as 1,2,4.
        simple: Simple layouts to compare with, by their names in `collectives.py`.
        changes: Whether to change shardings; otherwise plans are only compared with simple layouts.
        out: Directory for the results as JSON.
        check: Whether to fail if a change communicates at least 1 % less.
    """
    rc.emulate_devices(8)
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_numpy_rank_promotion", "raise")
    selected = choose(cases, {case.name: case for case in VARIED})
    columns = choose(simple, dict.fromkeys(COLUMNS)) if simple else {}
    file = out / "local_optimum.json"
    rows: list[Row] = json.loads(file.read_text()) if file.exists() else []
    out.mkdir(parents=True, exist_ok=True)
    sizes = [parse_mesh(text) for text in meshes]
    for case, size in itertools.product(selected.values(), sizes):
        row = measure_changes(case, make_mesh(size), list(columns), changes)
        rows[:] = [old for old in rows if key(old) != key(row)] + [row]
        file.write_text(json.dumps(rows, indent=1))
        print(*line(row), sep="  ", file=sys.stderr, flush=True)
        jax.clear_caches()
    wanted = {(name, size) for name in selected for size in sizes}
    rows = [row for row in rows if key(row) in wanted]
    print_results(rows)
    if check and any(better(row) for row in rows):
        raise SystemExit("Some plans are improved by sharding one array differently; see above.")


def key(row: Row) -> tuple[str, tuple[int, ...]]:
    return row["case"], tuple(row["mesh"])


def measure_changes(case: Case, mesh: Mesh, columns: list[str], changes: bool) -> Row:
    """The communication of the plan's program, of other layouts, and of all changes."""
    plan = make_plan(case, mesh)
    own = compile_plan(case, mesh, plan)
    seen, measured = {describe(plan)}, []
    for path, spec in alternatives(plan, mesh) if changes else ():
        changed = make_plan(case, mesh, [(f"^{re.escape(path)}$", spec)])
        if describe(changed) in seen or bytes_of(changed) > SAME_MEMORY * bytes_of(plan):
            continue
        seen.add(describe(changed))
        sent = compile_plan(case, mesh, changed)["sent_bytes"]
        change = {"path": path, "spec": str(spec), "sent_bytes": sent, "work": work_of(changed)}
        measured.append(change | {"priced_bytes": estimated_bytes(changed)})
    others = {column: measure(case, mesh, column) for column in columns}
    return {
        "case": case.name,
        "mesh": list(mesh.shape.values()),
        "sent_bytes": own["sent_bytes"],
        "sent_by_axes": own["sent_by_axes"],
        "priced_bytes": estimated_bytes(plan),
        "work": work_of(plan),
        "changes": measured,
        "param_bytes": own["param_bytes"],
        "simple": [row for row in others.values() if row and "error" not in row],
    }


def make_plan(case: Case, mesh: Mesh, overrides: Any = ()) -> Any:
    args = abstract(case.batch()), abstract_key()
    return rc.plan_shardings(
        case.abstract_params(), mesh, fn=case.loss, args=args, overrides=overrides
    )


def compile_plan(case: Case, mesh: Mesh, plan: Any) -> Row:
    batch = batch_shardings(case, mesh, tuple(plan.report.program.batch_axes))
    layout = Layout(plan.shardings, batch, plan.constrain(case.loss))
    return measure_layout(case, mesh, layout, "changed")


def describe(plan: Any) -> Any:
    """Identifies a program by its shardings."""
    return str([row.spec for row in plan.report.arrays]), plan.compute


def bytes_of(plan: Any) -> int:
    return plan.report.totals.all.bytes_per_device


def estimated_bytes(plan: Any) -> int:
    return sum(entry.bytes for entry in plan.report.program.traffic)


def work_of(plan: Any) -> float:
    """The floating point operations of each device."""
    return plan.report.program.arithmetic.per_device


def alternatives(plan: Any, mesh: Mesh) -> Iterator[tuple[str, P]]:
    """Yields each large array with every possible sharding over `fsdp` and `model`.

    Of arrays with the same shape in repeated layers, only the first is changed.
    """
    alike = set()
    for row in plan.report.arrays:
        kind = re.sub(r"\d+", "#", row.path), tuple(row.shape)
        if row.bytes // 4 < LARGE or kind in alike:
            continue
        alike.add(kind)
        # The plan's own spec is included: an override is tensor-parallel, not only FSDP-sharded.
        yield from ((row.path, spec) for spec in specs(tuple(row.shape), mesh))


def specs(shape: tuple[int, ...], mesh: Mesh) -> Iterator[P]:
    axes = [axis for axis in ("fsdp", "model") if mesh.shape[axis] > 1]
    for places in itertools.product(range(len(shape)), repeat=len(axes)):
        placed = list(zip(axes, places, strict=True))
        on = [tuple(axis for axis, d in placed if d == at) for at in range(len(shape))]
        parts = [prod(mesh.shape[axis] for axis in names) for names in on]
        if all(size % n == 0 for size, n in zip(shape, parts, strict=True)):
            entries = [names[0] if len(names) == 1 else names or None for names in on]
            while entries[-1] is None:
                entries.pop()
            yield P(*entries)


def better(row: Row) -> list[Row]:
    """The changes that communicate less without more work for a device."""
    less = [change for change in row["changes"] if change["sent_bytes"] < LESS * row["sent_bytes"]]
    return [change for change in less if change["work"] <= SAME_WORK * row["work"]]


def line(row: Row) -> list[str]:
    own = row["sent_bytes"]
    least = min((change["sent_bytes"] for change in row["changes"]), default=None)
    less = [change for change in row["changes"] if change["sent_bytes"] < LESS * own]
    room = SAME_MEMORY * row["param_bytes"]
    simple = [change["sent_bytes"] for change in row["simple"] if change["param_bytes"] <= room]
    ratio = lambda other: "-" if not other else f"{own / other:.2f}"
    return [
        f"{row['case']}, {','.join(map(str, row['mesh']))}",
        f"{own / 1e6:.3f}",
        ratio(row["priced_bytes"]),
        ratio(min(simple, default=None)),
        ratio(min((layout["sent_bytes"] for layout in row["simple"]), default=None)),
        str(len(row["changes"])),
        str(len(less)),
        str(len(better(row))),
        ratio(least),
    ]


HEAD = ["model, mesh", "MB communicated", "of estimate", "of simple", "of any", "changes"]
HEAD += ["less", "better", "of least"]


def print_results(rows: list[Row]) -> None:
    print(markdown(HEAD, [line(row) for row in rows]))
    for row in rows:
        for change in sorted(better(row), key=lambda change: change["sent_bytes"]):
            sent = f"{change['sent_bytes'] / 1e6:.3f} MB against {row['sent_bytes'] / 1e6:.3f}"
            print(f"{line(row)[0]}: {change['path']} as {change['spec']}: {sent}")


if __name__ == "__main__":
    tyro.cli(main)
