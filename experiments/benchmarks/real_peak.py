"""Compares the peak memory that a dry run predicts with the peak that a GPU reports.

    pip install "redcoast[cuda12]" && python experiments/benchmarks/real_peak.py

Each model takes one training step (fp32, AdamW) in a separate process, because a device reports the
peak of a process. Without a GPU, the script prints a message and measures nothing.
"""

import functools as ft
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import tyro

import redcoast as rc

sys.path.insert(0, str(Path(__file__).parents[1]))
from _cells import in_gib, markdown

from redcoast_cli._workload import Workload, make_workload

MODELS = ("gpt2-small", "gpt2-medium", "gpt2-large")


def main(
    models: tuple[str, ...] = MODELS,
    seq: int = 512,
    batch: int = 4,
    target: str | None = None,
    out: Path = Path("runs/dry_run"),
    task: Literal["measure", "predict"] | None = None,
) -> None:
    """Prints a table with a line for each model.

    Args:
        models: Names of models, as for `dry_run.py`.
        seq: The sequence length in tokens.
        batch: The number of sequences in the step.
        target: The target of the dry run, such as a100-80gb:1; by default from the GPU's name.
        out: Directory for the results as JSON.
        task: Only measure or predict the first model, and print JSON; used for child processes.
    """
    if task is not None:
        workload = make_workload(models[0], seq)
        do = measure if task == "measure" else ft.partial(predict, target=target)
        print(json.dumps(do(workload, batch)))
        return
    results = []
    for model in models:
        real = apart("measure", model, seq, batch)
        if "kind" not in real:
            print("This machine has no GPU that JAX can use: nothing was measured.")
            return
        name = target or target_of(real["kind"])
        predicted = apart("predict", model, seq, batch, name, JAX_PLATFORMS="cpu")
        sizes = {"model": model, "seq": seq, "batch": batch, "target": name}
        results.append(sizes | real | predicted)
    out.mkdir(parents=True, exist_ok=True)
    (out / "real_peak.json").write_text(json.dumps(results, indent=1))
    print(table(results))


def apart(
    task: str, model: str, seq: int, batch: int, target: str | None = None, **variables: str
) -> dict[str, Any]:
    """Runs a task in a separate process, without preallocation of memory."""
    command = [sys.executable, __file__, "--task", task, "--models", model]
    command += ["--seq", str(seq), "--batch", str(batch)]
    command += [] if target is None else ["--target", target]
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"} | variables
    result = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True)
    if result.returncode:
        raise SystemExit(f"{' '.join(command)} failed; see its output above.")
    return json.loads(result.stdout.splitlines()[-1])


def measure(workload: Workload, batch: int) -> dict[str, Any]:
    """The peak that the device reports after one step; an empty dict without a GPU."""
    device = jax.devices()[0]
    if device.platform != "gpu":
        return {}
    init_fn, loss_fn, shapes, optimizer = workload.arguments(batch)
    make = ft.partial(rc.init_state, init_fn, optimizer, key=jax.random.key(0))
    state_shapes = eqx.filter_eval_shape(make)
    mesh = rc.make_mesh(devices=[device])
    shardings = rc.infer_shardings(state_shapes, mesh)
    step = ft.partial(rc.train_step, loss_fn=loss_fn, optimizer=optimizer)
    # Compiled before the state exists: memory for autotuning kernels does not belong to the step.
    compiled = rc.compile_step(step, shardings).lower(state_shapes, shapes).compile()
    arrays = jax.tree.leaves(eqx.filter(make(shardings=shardings), eqx.is_array))
    tokens = jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), shapes)
    jax.block_until_ready(compiled(arrays, jax.tree.leaves(tokens)))
    stats = device.memory_stats()
    return {"kind": device.device_kind, "reported": stats["peak_bytes_in_use"]}


def predict(workload: Workload, batch: int, *, target: str | None) -> dict[str, Any]:
    if target is None:
        raise SystemExit("A dry run needs a --target.")
    run = rc.dry_run(*workload.arguments(batch), target=target, suggest=False)
    return {"predicted": run.memory["peak"], "compiler": run.compiler, "notes": list(run.notes)}


def target_of(kind: str) -> str:
    """The target of one GPU of this kind."""
    squeezed = re.sub(r"[^a-z0-9]", "", kind.lower())
    names = [name for name in rc.CHIPS if all(part in squeezed for part in name.split("-"))]
    if not names:
        raise SystemExit(
            f"{kind!r} is none of {', '.join(rc.CHIPS)}. Choose the most similar with --target."
        )
    return f"{max(names, key=len)}:1"


def table(results: list[dict[str, Any]]) -> str:
    heads = ["one step, fp32, AdamW", "GPU", "predicted, GiB", "reported", "off by"]
    return markdown(heads, [line(result) for result in results])


def line(result: dict[str, Any]) -> list[str]:
    predicted, reported = result["predicted"], result["reported"]
    sizes = [in_gib(predicted), in_gib(reported), f"{predicted / reported - 1:+.1%}"]
    model = f"{result['model']} ({result['batch']} x {result['seq']})"
    return [model, result["kind"], *sizes]


if __name__ == "__main__":
    tyro.cli(main)
