"""The communication of the paper's models with redcoast's plan and with hand-written shardings.

The hand-written shardings are Megatron's tensor parallelism over `model` (arXiv:1909.08053), every
large array FSDP-sharded along its largest remaining dimension, and unconstrained activations. Both
are compiled for the same step and the same mesh, the one that redcoast chooses for these devices,
by the compilers for A100 and TPU v4, which need no device.

    pip install "redcoast[cuda12]" && python experiments/benchmarks/megatron_ahead.py a100
    pip install "redcoast[tpu]" && python experiments/benchmarks/megatron_ahead.py v4

Results are added to those in `--out`, so that a part can be measured again.
"""

import os

# Keeps JAX from looking for accelerators. JAX reads this when it is first imported.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import dataclasses
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import jax
import tyro
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from traffic.columns import also_shard

import redcoast as rc
from redcoast.dryrun._compile_job import compile_job
from redcoast.dryrun._job import Job, make_job

sys.path.insert(0, str(Path(__file__).parents[1]))
from _cells import (
    gigabytes,
    in_gib,
    markdown,
    mesh_text,
    peak_gib,
    read_cells,
    sent_bytes,
    write_cell,
)
from _table1 import Row, choose_rows, in_order

from redcoast_cli._workload import make_workload

Platform = Literal["a100", "v4"]

# The devices of each model: as many as in the paper, or more if it needs more memory.
TARGETS: dict[Platform, dict[str, str]] = {
    "a100": {
        **dict.fromkeys(("bart-large", "gpt2-large"), "a100-40gb:2"),
        **dict.fromkeys(("llama-7b", "gptj-6b"), "a100-40gb:4"),
        **dict.fromkeys(("t5-xxl", "opt-13b"), "a100-40gb:8"),
        "opt-66b": "a100-40gb:8x8",
    },
    "v4": {
        **dict.fromkeys(("bart-large", "gpt2-large"), "v4:2x2x1"),
        **dict.fromkeys(("llama-7b", "gptj-6b", "t5-xxl", "opt-13b"), "v4:2x2x2"),
        "opt-66b": "v4:4x4x4",
    },
}
# The dimension that Megatron shards, from the end: heads, hidden features, or the vocabulary.
COLUMNS = dict.fromkeys(["wq", "wk", "wv", "bq", "bk", "bv"], -2)
COLUMNS |= dict.fromkeys(["up", "gate", "up_bias", "head", "head_bias", "relative_bias"], -1)
SHARDED = COLUMNS | {"wo": -3, "down": -2, "embed": -2, "logits_bias": -1}


class ByHand(rc.Plan):
    """A plan that does not constrain activations."""

    def constrain(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        return fn


def main(
    platform: Platform,
    /,
    rows: tuple[str, ...] = (),
    out: Path = Path("runs/dry_run"),
) -> None:
    """Prints a table with a line for each model.

    Args:
        platform: The compiler to use.
        rows: Models of Table 1, such as opt-66b; all by default.
        out: Directory with the results as JSON.
    """
    out.mkdir(parents=True, exist_ok=True)
    # Results of `dry_run.py --table1` need not be compiled again.
    known = {(c["model"], c["target"]): c for c in read_cells(out / "table1.json") if paper(c)}
    for row in choose_rows(rows):
        target = TARGETS[platform][row.model]
        cell = measure(row, target, known.get((row.model, target)))
        write_cell(out / "megatron.json", cell | {"column": platform})
        print(*line(cell), sep="  ", file=sys.stderr, flush=True)
    print(table(in_order(read_cells(out / "megatron.json"))))


def paper(cell: dict[str, Any]) -> bool:
    return cell["column"] == "paper" and cell["compiler"] != "cpu"


def measure(row: Row, target: str, known: dict[str, Any] | None) -> dict[str, Any]:
    """Compiles the step with both shardings on the chosen mesh; `known` is an earlier result."""
    devices = rc.target_devices(target)
    workload = make_workload(row.model, row.seq)
    arguments = workload.arguments(len(devices))
    report = known or rc.dry_run(*arguments, target=target, suggest=False).report
    mesh, job = rc.make_mesh(**report["mesh"], devices=devices), make_job(*arguments)
    by_hand = compile_job(job, plan_by_hand(job, mesh), mesh)
    by_hand_bytes = None
    if not by_hand.refused:
        by_hand_bytes = sum(collective["bytes"] for collective in by_hand.traffic or ())
    ours = {name: value for name, value in report.items() if name != "plan"}
    return {
        **ours,
        "model": row.model,
        "seq": row.seq,
        "batch": job.rows,
        "by_hand": {
            "sent_bytes": by_hand_bytes,
            "peak": by_hand.peak,
            "traffic": by_hand.traffic,
        },
    }


def plan_by_hand(job: Job, mesh: Mesh) -> ByHand:
    overrides = []
    for path, x in jax.tree_util.tree_leaves_with_path(job.state.model):
        if isinstance(x, jax.ShapeDtypeStruct):
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            overrides.append((f"^{re.escape(name)}$", spec(name, x.shape, mesh)))
    plan = rc.plan_shardings(job.state, mesh, overrides=overrides)
    return ByHand(**{f.name: getattr(plan, f.name) for f in dataclasses.fields(plan)})


def spec(name: str, shape: tuple[int, ...], mesh: Mesh) -> P:
    """A parameter's sharding: Megatron's over `model`, if it divides, and then over `fsdp`."""
    *parts, last = name.split("/")
    dim = len(shape) + SHARDED.get(last, 0)
    over = mesh.shape["model"]
    entries: list[str | None] = [None] * len(shape)
    if last in SHARDED and over > 1 and shape[dim] % over == 0:
        entries[dim] = "model"
    stack = int("layers" in parts)
    return also_shard(P(*entries), shape, stack, "fsdp", mesh.shape["fsdp"])


def table(cells: list[dict[str, Any]]) -> str:
    heads = ["fp32, AdamW", "on", "mesh"]
    heads += ["GB communicated", "by hand", "of that", "peak, GiB", "by hand"]
    return markdown(heads, [line(cell) for cell in cells])


def line(cell: dict[str, Any]) -> list[str]:
    ours, by_hand = sent_bytes(cell), cell["by_hand"]["sent_bytes"]
    ratio, peak_by_hand = "-", in_gib(cell["by_hand"]["peak"])
    if ours and by_hand:
        ratio = f"{ours / by_hand:.2f}"
    if by_hand is None:  # the program was rejected, and the peak is a lower bound
        peak_by_hand = f"at least {peak_by_hand}"
    return [
        f"{cell['model']} ({cell['seq']})",
        cell["target"],
        mesh_text(cell["mesh"]),
        gigabytes(ours),
        gigabytes(by_hand),
        ratio,
        peak_gib(cell),
        peak_by_hand,
    ]


if __name__ == "__main__":
    tyro.cli(main)
