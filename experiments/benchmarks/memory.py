"""The memory and the communication that a plan estimates, and those of the compiled program.

    python experiments/benchmarks/memory.py --compiled runs/memory.json

A program is the loss and its gradients, with planned shardings and constraints, for eight devices:
emulated ones of the CPU, or with `--platform a100` or `--platform v4` those of an accelerator, by
its own compiler. `planned` is `plan.report.program.memory.total`, and `compiled` the arguments,
results and temporaries of the compiled program, on each device. Under `sent`, they are the sum of
`plan.report.program.traffic`, and the bytes that each device sends in a step. The CPU's compiler
schedules for little memory, as in a dry run that stands in for an accelerator. The compiler for TPU
v4 must not use the 128 MiB of memory on the chip: programs of this size would fit into it, with
copies of their weights, and not show the device's memory. The compiled figures are kept in the file
`--compiled`, so that another version of redcoast can be compared in a minute, as long as its plans
are the same.
"""

import json
import statistics
import sys
from pathlib import Path
from typing import Any

import family_plans
import jax
import tyro
from _pages import Printed
from architectures import CASES, SCIENCE, VARIED, Case
from jax.sharding import Mesh
from traffic.columns import Layout, abstract, abstract_key, batch_shardings
from traffic.measure import lower_step
from traffic.targets import Platform, target_devices

import redcoast as rc
from redcoast.dryrun.hlo import collectives, peak_bytes, sent_bytes

MESHES = {
    "data 8": {"data": 8},
    "data 2, model 4": {"data": 2, "model": 4},
    "fsdp 8": {"data": 1, "fsdp": 8},
}
# The largest difference that is not an outlier, relative to what is compiled.
LIMITS = {"cpu": 0.25}
LIMIT_OF_ACCELERATORS = 0.15
LIMIT_OF_COMMUNICATION = 0.1
OPTIONS: dict[str, dict[str, Any]] = {
    "cpu": {
        "xla_backend_optimization_level": 0,
        "xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED",
    },
    "tpu": {"xla_tpu_cmem_memory_space_assignment": False},
}


def main(
    cases: tuple[str, ...] = (),
    meshes: tuple[str, ...] = tuple(MESHES),
    platform: Platform = "cpu",
    compiled: Path = Path("runs/memory.json"),
    page: Path | None = None,
) -> None:
    """Prints a table with a line for each program and mesh, and the differences.

    Args:
        cases: Names of programs; all by default.
        meshes: Names of meshes.
        platform: What to compile for.
        compiled: A file with the figures of compiled programs; missing ones are added.
        page: A page of `docs/measured/` to write the table into.
    """
    devices = target_devices(platform)
    known = json.loads(compiled.read_text()) if compiled.exists() else {}
    limit = LIMITS.get(platform, LIMIT_OF_ACCELERATORS)
    programs = {case.name: case for case in (*CASES, *SCIENCE) if case.compiled}
    programs |= {f"{case.name} (tiny)": case for case in VARIED}
    programs |= family_plans.make_cases(16, 64)
    table = Printed()
    ratios: list[float] = []
    ratios_sent: list[float] = []
    heads = ("program", "mesh", *("memory planned, MB", "compiled", "ratio"))
    heads += ("sent planned, MB", "compiled", "ratio")
    table.add(f"| {' | '.join(heads)} |", f"|---|---|{'---:|' * 6}")
    for name in cases or programs:
        for mesh_name in meshes:
            mesh = rc.make_mesh(**MESHES[mesh_name], devices=devices)
            plan = plan_of(programs[name], mesh)
            key = f"{platform}, {mesh_name}, {name}"
            if key not in known:
                known[key] = compile_program(programs[name], mesh, plan)
                compiled.parent.mkdir(parents=True, exist_ok=True)
                compiled.write_text(json.dumps(known, indent=1))
                jax.clear_caches()
            if "error" in known[key]:
                print(f"{key}: {known[key]['error']}", file=sys.stderr)
                continue
            planned, real = plan.report.program.memory.total, known[key]["peak"]
            ratios.append(planned / real)
            sent = sum(one.bytes for one in plan.report.program.traffic)
            really_sent = known[key]["sent"]
            # A part of a kilobyte is not worth comparing.
            ratios_sent.append((sent + 1e3) / (really_sent + 1e3))
            cells = (planned / 1e6, real / 1e6, ratios[-1])
            cells += (sent / 1e6, really_sent / 1e6, ratios_sent[-1])
            row = " | ".join(f"{cell:.2f}" for cell in cells)
            table.add(f"| {name} | {mesh_name} | {row} |")
    table.add("", f"Memory: {summary(ratios, limit)}")
    table.add("", f"Communication: {summary(ratios_sent, LIMIT_OF_COMMUNICATION)}")
    table.write(page, f"memory_{platform}")


def summary(ratios: list[float], limit: float) -> str:
    within = sum(abs(ratio - 1) <= limit for ratio in ratios)
    off = statistics.median(abs(ratio - 1) for ratio in ratios)
    return (
        f"{within} of {len(ratios)} plans are within {limit:.0%} of the compiled program; half "
        f"are within {off:.1%}."
    )


def plan_of(case: Case, mesh: Mesh) -> Any:
    params, batch = case.abstract_params(), abstract(case.batch())
    return rc.plan_shardings(params, mesh, fn=case.loss, args=(batch, abstract_key()))


def compile_program(case: Case, mesh: Mesh, plan: Any) -> dict[str, Any]:
    """The bytes on each device that the compiler reports, or its error."""
    layout = Layout(plan.shardings, batch_shardings(case, mesh), plan.constrain(case.loss))
    platform = mesh.devices.flat[0].platform
    try:
        lowered = lower_step(case, mesh, layout)
        compiled = lowered.compile(compiler_options=OPTIONS.get(platform))
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}".splitlines()[0][:300]}
    peak = peak_bytes(compiled.memory_analysis(), platform)
    return {"peak": peak, "sent": sent_bytes(collectives(compiled.as_text(), mesh))}


if __name__ == "__main__":
    tyro.cli(main)
