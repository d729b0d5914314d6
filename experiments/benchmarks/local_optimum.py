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
from operator import itemgetter
from pathlib import Path
from typing import Any

import jax
import numpy as np
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
    columns = {}
    if simple:
        columns = choose(simple, dict.fromkeys(COLUMNS))
    file = out / "local_optimum.json"
    rows: list[Row] = []
    if file.exists():
        rows = json.loads(file.read_text())
    out.mkdir(parents=True, exist_ok=True)
    sizes = [parse_mesh(text) for text in meshes]
    for case, size in itertools.product(selected.values(), sizes):
        row = measure_changes(case, make_mesh(size), list(columns), changes)
        rows[:] = [old for old in rows if key(old) != key(row)] + [row]
        file.write_text(json.dumps(rows, indent=1))
        print(*line(row), sep="  ", file=sys.stderr, flush=True)
        jax.clear_caches()
    measured = {*itertools.product(selected, sizes)}
    rows = [row for row in rows if key(row) in measured]
    print_results(rows)
    if check and any(better(row) for row in rows):
        raise SystemExit("Some plans are improved by sharding one array differently; see above.")


def key(row: Row) -> tuple[str, tuple[int, ...]]:
    return row["case"], tuple(row["mesh"])


def measure_changes(case: Case, mesh: Mesh, columns: list[str], changes: bool) -> Row:
    """The communication of the plan's program, of other layouts, and of all changes."""
    plan = make_plan(case, mesh)
    own = compile_plan(case, mesh, plan)
    compiled, measured = {describe(plan)}, []
    specs_to_try = ()
    if changes:
        specs_to_try = alternatives(plan, mesh)
    for path, spec in specs_to_try:
        changed = make_plan(case, mesh, [(f"^{re.escape(path)}$", spec)])
        if describe(changed) in compiled or bytes_of(changed) > SAME_MEMORY * bytes_of(plan):
            continue
        compiled.add(describe(changed))
        measured.append(
            {
                "path": path,
                "spec": str(spec),
                "sent_bytes": compile_plan(case, mesh, changed)["sent_bytes"],
                "work": work_of(changed),
                "priced_bytes": estimated_bytes(changed),
            }
        )
    layouts = [measure(case, mesh, column) for column in columns]
    return {
        "case": case.name,
        "mesh": list(mesh.shape.values()),
        "sent_bytes": own["sent_bytes"],
        "sent_by_axes": own["sent_by_axes"],
        "priced_bytes": estimated_bytes(plan),
        "work": work_of(plan),
        "changes": measured,
        "param_bytes": own["param_bytes"],
        "simple": [row for row in layouts if row and "error" not in row],
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
        axes_of_dims: list[tuple[str, ...]] = [()] * len(shape)
        for axis, dim in zip(axes, places, strict=True):
            axes_of_dims[dim] += (axis,)
        parts = [prod(map(mesh.shape.__getitem__, names)) for names in axes_of_dims]
        if any(np.remainder(shape, parts)):
            continue
        entries: list[Any] = []
        for names in axes_of_dims:
            if len(names) > 1:
                entries.append(names)
            else:
                entries.append(next(iter(names), None))
        while entries[-1] is None:
            entries.pop()
        yield P(*entries)


def less(row: Row) -> list[Row]:
    """The changes that communicate at least 1 % less."""
    return [change for change in row["changes"] if change["sent_bytes"] < LESS * row["sent_bytes"]]


def better(row: Row) -> list[Row]:
    """The changes that communicate less without more work for a device."""
    return [change for change in less(row) if change["work"] <= SAME_WORK * row["work"]]


def line(row: Row) -> list[str]:
    room = SAME_MEMORY * row["param_bytes"]
    small = [layout for layout in row["simple"] if layout["param_bytes"] <= room]
    return [
        f"{row['case']}, {','.join(map(str, row['mesh']))}",
        f"{row['sent_bytes'] / 1e6:.3f}",
        ratio(row, row["priced_bytes"]),
        ratio(row, least_sent(small)),
        ratio(row, least_sent(row["simple"])),
        str(len(row["changes"])),
        str(len(less(row))),
        str(len(better(row))),
        ratio(row, least_sent(row["changes"])),
    ]


def least_sent(layouts: list[Row]) -> int | None:
    return min((layout["sent_bytes"] for layout in layouts), default=None)


def ratio(row: Row, reference_bytes: int | None) -> str:
    """The bytes that the plan communicates, relative to others."""
    if not reference_bytes:
        return "-"
    return f"{row['sent_bytes'] / reference_bytes:.2f}"


HEAD = ["model, mesh", "MB communicated", "of estimate", "of simple", "of any", "changes"]
HEAD += ["less", "better", "of least"]


def print_results(rows: list[Row]) -> None:
    print(markdown(HEAD, [line(row) for row in rows]))
    for row in rows:
        for change in sorted(better(row), key=itemgetter("sent_bytes")):
            sizes = f"{change['sent_bytes'] / 1e6:.3f} MB against {row['sent_bytes'] / 1e6:.3f}"
            print(f"{line(row)[0]}: {change['path']} as {change['spec']}: {sizes}")


if __name__ == "__main__":
    tyro.cli(main)
