"""The processor time of planning, against the number of layers, and of comparing all meshes.

    python experiments/benchmarks/planning.py --page docs/sharding_measured.md

Shardings are planned for data 1, fsdp 2 and model 4, tracing included, three times for a new
function each. The figures are medians of processor time, which other programs of the machine
change little. The second table has the estimates of all meshes of many devices, which
`mesh="auto"` compares.
"""

import dataclasses
import statistics
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import tyro
from _pages import Printed
from _timing import elapsed
from architectures import CASES, Case, opt_layers
from jax.extend.core import ClosedJaxpr, Jaxpr
from jax.sharding import Mesh
from traffic.columns import abstract, abstract_key, plan_by_dataflow

import redcoast as rc
from redcoast import models
from redcoast.dryrun._devices import target_place
from redcoast.dryrun._job import make_job
from redcoast.dryrun._mesh_search import likely

DEPTHS = (24, 80, 128)
REPEATS = 3
COUNTS = (8, 64, 512)  # numbers of devices
GPT2_SMALL = models.GPT2Config(
    vocab=50257, width=768, layers=12, heads=12, hidden=3072, positions=1024
)


def main(page: Path | None = None) -> None:
    """Prints a table, and writes it into a page.

    Args:
        page: A page with the marks `planning`.
    """
    rc.emulate_devices(8)
    mesh = rc.make_mesh(data=1, fsdp=2, model=4)
    cases = [opt_layers(depth) for depth in DEPTHS]
    cases += [case for case in CASES if case.abstract]
    table = Printed()
    table.add("| model | equations | processor seconds |", "|---|---:|---:|")
    for case in cases:
        seconds = statistics.median(plan_time(case, mesh) for _ in range(REPEATS))
        table.add(f"| {case.name} | {equations(case):,} | {seconds:.2f} |")
    table.write(page, "planning")
    table = Printed()
    table.add("| devices | meshes | processor seconds |", "|---:|---:|---:|")
    for count in COUNTS:
        seconds, meshes = search_time(count)
        table.add(f"| {count} | {meshes} | {seconds:.2f} |")
    table.write(page, "searching")


def search_time(count: int) -> tuple[float, int]:
    """Processor seconds of the estimates of all meshes for GPT-2 small, and their number."""
    tokens = jax.ShapeDtypeStruct((2 * count, 128), jnp.int32)
    loss_fn = lambda model, tokens, key: rc.losses.cross_entropy(model(tokens), tokens)
    begin = time.process_time()
    init_fn = lambda key: models.GPT2(GPT2_SMALL, key=key)
    job = make_job(init_fn, loss_fn, tokens, optax.adamw(1e-4))
    meshes = likely(job, target_place(f"cpu:{count}"))
    return time.process_time() - begin, len(meshes)


def plan_time(case: Case, mesh: Mesh) -> float:
    """Processor seconds of a plan for a new loss function, of which JAX has no trace."""
    new = dataclasses.replace(case, loss=lambda *args: case.loss(*args))
    return elapsed(lambda: plan_by_dataflow(new, mesh))


def equations(case: Case) -> int:
    """The number of equations of the loss, counting inner programs once."""
    args = (case.abstract_params(), abstract(case.batch()), abstract_key())
    return count_equations(jax.make_jaxpr(case.loss)(*args).jaxpr)


def count_equations(jaxpr: Jaxpr) -> int:
    count = len(jaxpr.eqns)
    for equation in jaxpr.eqns:
        for inner in jax.tree.leaves(equation.params, is_leaf=is_jaxpr):
            if is_jaxpr(inner):
                count += count_equations(getattr(inner, "jaxpr", inner))
    return count


def is_jaxpr(x: jax.Array) -> bool:
    return isinstance(x, Jaxpr | ClosedJaxpr)


if __name__ == "__main__":
    tyro.cli(main)
