"""The time of the first and the second call of `rc.fit`, and of a process with a persistent cache.

Each call trains a small GPT-2 for two steps on eight emulated devices, and evaluates it. A process
calls `fit` three times with the same functions, shapes, mesh and options: with a model, with the
state that the first call returned, and with a model again. A trace is a call of the loss by
JAX; a compilation is one of XLA, and is also counted if JAX reads it from its persistent cache.

    python experiments/benchmarks/second_run.py
"""

import json
import subprocess
import sys
import tempfile
import time
from typing import Any

import jax
import numpy as np
import optax
import tyro
from _complete import complete
from jaxtyping import PyTree

import redcoast as rc

CONFIG = rc.models.GPT2Config(vocab=512, width=256, layers=4, heads=4, hidden=1024, positions=64)
OPTIMIZER = optax.adamw(3e-4)
CALLS = ("first call, with a model", "second call, with its state", "third call, with a model")


def measure(cache: str) -> list[list[float]]:
    """Seconds, traces and compilations of each call of `fit` in this process."""
    rc.emulate_devices(8)
    if cache:
        jax.config.update("jax_compilation_cache_dir", cache)
    traces: list[int] = []
    compiled: list[str] = []
    note: Any = lambda name, *_, **__: compiled.append(name) if "backend_compile" in name else None
    jax.monitoring.register_event_duration_secs_listener(note)

    def loss_fn(model: PyTree, batch: PyTree, key: jax.Array) -> jax.Array:
        traces.append(1)
        logits = model(batch)
        return rc.losses.cross_entropy(logits[:, :-1], batch[:, 1:])

    rows = np.random.default_rng(0).integers(0, CONFIG.vocab, (64, CONFIG.positions), np.int32)
    model = rc.models.GPT2(CONFIG, key=jax.random.key(0))
    options: dict[str, Any] = {"collate_fn": np.stack, "loss_fn": loss_fn, "batch_size": 16}
    options |= {"mesh": rc.make_mesh(data=2, fsdp=2, model=2), "log": False}
    options["evaluation"] = rc.Evaluation(list(rows[:16]))

    def call(start: PyTree, steps: int) -> tuple[Any, list[float]]:
        before, begin = (len(traces), len(compiled)), time.perf_counter()
        state = rc.fit(start, OPTIMIZER, list(rows), steps=steps, **options)
        complete(state, steps)
        seconds = time.perf_counter() - begin
        return state, [seconds, len(traces) - before[0], len(compiled) - before[1]]

    state, first = call(model, 2)
    state, second = call(state, 4)
    return [first, second, call(model, 2)[1]]


def in_a_process(cache: str = "") -> list[list[float]]:
    command = [sys.executable, __file__, "--part", cache or "none"]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)


def main(part: str = "") -> None:
    """Prints a table.

    Args:
        part: Measure in this process, with a persistent cache in this directory, or with "none".
    """
    if part:
        print(json.dumps(measure("" if part == "none" else part)))
        return
    with tempfile.TemporaryDirectory() as cache:
        plain, _, later = in_a_process(), in_a_process(cache), in_a_process(cache)
    rows: list[tuple[str, list[float]]] = list(zip(CALLS, plain, strict=True))
    rows.append(("first call, with a filled persistent cache", later[0]))
    print(f"{'':44} {'seconds':>8} {'ratio':>6} {'traces':>7} {'compilations':>13}")
    for name, (seconds, traces, compilations) in rows:
        ratio = seconds / plain[0][0]
        print(f"{name:44} {seconds:>8.2f} {ratio:>6.2f} {traces:>7} {compilations:>13}")


if __name__ == "__main__":
    tyro.cli(main)
