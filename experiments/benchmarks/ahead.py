"""Bytes and arithmetic of training steps on A100s and TPUs, read from programs of their compilers.

The compilers come with JAX and need no device: the programs are compiled but not run. The models
and columns are those of `collectives.py`.

    pip install -e ".[experiments]" "jax[cuda12]" && python experiments/benchmarks/ahead.py a100
    pip install -e ".[experiments]" "jax[tpu]" && python experiments/benchmarks/ahead.py v4

A small model takes seconds, LLaMA-7B up to a minute.
"""

import os

# Keeps JAX from looking for accelerators and from warning about the collectives that are counted
# here, and lets several programs use the TPU compiler at once. JAX reads this when it is first
# imported.
os.environ |= {
    "TF_CPP_MIN_LOG_LEVEL": "2",
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}

import sys
from pathlib import Path
from typing import Any

import tyro
from _pages import Printed
from architectures import CASES, Case
from collectives import choose, parse_mesh
from jax.sharding import Mesh
from traffic.columns import COLUMNS, Layout, abstract, abstract_key, batch_shardings
from traffic.measure import OPTIONS, count_collectives, lower_step
from traffic.tables import markdown, number
from traffic.targets import Platform, target_devices

import redcoast as rc
from redcoast.dryrun.hlo import temporary_bytes
from redcoast.dryrun.hlo._events import count_flops, read_schedule

SMALL = ("GPT-2", "LLaMA, GQA, scanned", "BERT, dropout", "ViT")
MESHES = ("1,2,4", "2,2,2", "2,1,4")
USUAL = ("redcoast", "unconstrained", "megatron")


def main(
    platform: Platform,
    /,
    cases: tuple[str, ...] = (*SMALL, "LLaMA-7B, scanned"),
    meshes: tuple[str, ...] = MESHES,
    columns: tuple[str, ...] = USUAL,
    sequence: bool = False,
    page: Path | None = None,
) -> None:
    """Prints a table with a line for each model and mesh.

    Args:
        platform: The compiler to use.
        cases: Names of models, as in the tables of `collectives.py`.
        meshes: Sizes of data, fsdp and model, such as 1,2,4.
        columns: Layouts to compare.
        sequence: Whether to add a column for plans with `sequence=True`.
        page: A page of `docs/measured/` to write the table into.
    """
    layouts = choose(columns, COLUMNS) | ({"sequence": shard_sequence} if sequence else {})
    devices = target_devices(platform)
    lines = []
    for case in choose(cases, {case.name: case for case in CASES}).values():
        for data, fsdp, model in map(parse_mesh, meshes):
            mesh = rc.make_mesh(data=data, fsdp=fsdp, model=model, devices=devices)
            rows = [measure(case, mesh, make) for make in layouts.values()]
            lines.append([f"{case.name}, {data},{fsdp},{model}", *cells(rows)])
            print(*lines[-1], sep="  ", file=sys.stderr, flush=True)
    heads = [f"MB communicated, {name}" for name in layouts]
    table = Printed()
    rest = "collectives", "MB of temporaries", "G operations of products"
    table.add(markdown([f"on {platform}", *heads, *rest], lines))
    table.write(page, platform)


def shard_sequence(case: Case, mesh: Mesh) -> Layout:
    args = (abstract(case.batch()), abstract_key())
    plan = rc.plan_shardings(case.abstract_params(), mesh, fn=case.loss, args=args, sequence=True)
    return Layout(plan.shardings, batch_shardings(case, mesh), plan.constrain(case.loss))


def measure(case: Case, mesh: Mesh, make: Any) -> dict[str, Any] | None:
    """The bytes communicated, the bytes of temporaries, and the operations of products of a device;
    None if the column does not apply."""
    layout = make(case, mesh)
    if layout is None:
        return None
    platform = mesh.devices.flat[0].platform
    options = None
    if platform == "cpu":
        options = OPTIONS
    compiled = lower_step(case, mesh, layout).compile(compiler_options=options)
    text = compiled.as_text()
    return count_collectives(text, mesh) | {
        "temporary_bytes": temporary_bytes(compiled.memory_analysis(), platform),
        "operations": sum(count_flops(read_schedule(text, mesh)).values()),
    }


def cells(rows: list[dict[str, Any] | None]) -> list[str]:
    """The communication of each layout, then the other figures, of all layouts in one cell each."""
    sent = [scaled(row, "sent_bytes", ",.1f") for row in rows]
    times = " / ".join("-" if row is None else str(row["collectives"]) for row in rows)
    kept = " / ".join(scaled(row, "temporary_bytes", ",.0f") for row in rows)
    computed = " / ".join(scaled(row, "operations", ",.1f", 1e9) for row in rows)
    return [*sent, times, kept, computed]


def scaled(row: dict[str, Any] | None, name: str, form: str, unit: float = 1e6) -> str:
    if row is None:
        return number(None, form)
    return number(row[name] / unit, form)


if __name__ == "__main__":
    tyro.cli(main)
