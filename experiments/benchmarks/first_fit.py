"""The processor time of the first call of `rc.fit` in a process, in parts.

Each row is a new process, which trains for one step: a small MLP, and GPT-2 small (124 million
parameters, 2 sequences of 64 tokens for each device), on one device, and on eight emulated ones
(data 8, and data 2 x model 4). The second time, XLA's programs come from JAX's persistent cache.

    python experiments/benchmarks/first_fit.py
"""

import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax

JAX_IMPORTED = time.process_time()

import equinox as eqx  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
from jaxtyping import PyTree  # noqa: E402

LIBRARIES_IMPORTED = time.process_time()

import redcoast as rc  # noqa: E402

IMPORTED = time.process_time()

import tyro  # noqa: E402

from redcoast.loop import _fit  # noqa: E402
from redcoast.train._compile import CompiledStep  # noqa: E402

sys.path.append(str(Path(__file__).parents[1]))
from _cells import markdown  # noqa: E402

MESHES: dict[str, dict[int, dict[str, Any]]] = {
    "MLP": {1: {}, 8: {"data": 8}},
    "GPT-2 small": {1: {}, 8: {"data": 2, "model": 4}},
}
PARTS = ("plan", "create the state", "trace the step", "compile and take it", "the rest")


class Timed:
    """Counts the processor time of functions, without that of the timed functions they call."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = dict.fromkeys(PARTS, 0.0)
        self._inner = [0.0]

    def wrap(self, owner: Any, name: str, part: str) -> None:
        fn = getattr(owner, name)

        def timed(*args: Any, **options: Any) -> Any:
            begin = time.process_time()
            self._inner.append(0.0)
            try:
                return fn(*args, **options)
            finally:
                total = time.process_time() - begin
                self.seconds[part] += total - self._inner.pop()
                self._inner[-1] += total

        setattr(owner, name, timed)


def mlp_problem(devices: int) -> tuple[Any, Any, list[Any]]:
    def init_fn(key: jax.Array) -> PyTree:
        return eqx.nn.MLP(32, 10, 64, 1, key=key)

    def loss_fn(model: PyTree, batch: PyTree, key: jax.Array) -> jax.Array:
        return jax.numpy.mean(jax.vmap(model)(batch) ** 2)

    return init_fn, loss_fn, list(np.ones((4 * devices, 32), np.float32))


def gpt2_problem(devices: int) -> tuple[Any, Any, list[Any]]:
    config = rc.models.GPT2Config(
        vocab=50257, width=768, layers=12, heads=12, hidden=3072, positions=1024
    )

    def init_fn(key: jax.Array) -> PyTree:
        return rc.models.GPT2(config, key=key)

    def loss_fn(model: PyTree, batch: PyTree, key: jax.Array) -> jax.Array:
        return rc.losses.cross_entropy(model(batch)[:, :-1], batch[:, 1:])

    return init_fn, loss_fn, list(np.zeros((2 * devices, 64), np.int32))


def measure(model: str, devices: int, cache: str) -> list[float]:
    """Processor seconds of importing JAX, other libraries and redcoast, and of the parts of a
    run."""
    jax.config.update("jax_compilation_cache_dir", cache)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    if devices > 1:
        rc.emulate_devices(devices)
    problem = {"MLP": mlp_problem, "GPT-2 small": gpt2_problem}[model]
    init_fn, loss_fn, examples = problem(devices)
    options: Any = {"collate_fn": np.stack, "loss_fn": loss_fn, "batch_size": len(examples)}
    timed = Timed()
    timed.wrap(_fit, "plan_run", "plan")
    timed.wrap(_fit, "restore_or_create", "create the state")
    timed.wrap(CompiledStep, "_trace", "trace the step")
    timed.wrap(CompiledStep, "_take", "compile and take it")
    timed.wrap(rc, "fit", "the rest")
    mesh = rc.make_mesh(**MESHES[model][devices])
    state = rc.fit(init_fn, optax.adamw(3e-4), examples, steps=1, mesh=mesh, log=False, **options)
    jax.block_until_ready(state)
    imports = [JAX_IMPORTED, LIBRARIES_IMPORTED - JAX_IMPORTED, IMPORTED - LIBRARIES_IMPORTED]
    return [*imports, *timed.seconds.values()]


def in_process(model: str, devices: int, cache: str) -> list[float]:
    command = [sys.executable, __file__, "--model", model, "--devices", str(devices)]
    done = subprocess.run([*command, "--cache", cache], check=True, capture_output=True, text=True)
    return list(map(float, done.stdout.splitlines()[-1].split()))


def main(model: str = "", devices: int = 1, cache: str = "") -> None:
    """Prints a table.

    Args:
        model: Measures only this model, in this process.
        devices: The number of devices of it.
        cache: The directory of the persistent cache.
    """
    if model:
        print(*measure(model, devices, cache))
        return
    rows: list[list[str]] = []
    for name, meshes in MESHES.items():
        for count in meshes:
            with tempfile.TemporaryDirectory() as directory:
                for programs in ("compiled", "from the cache"):
                    seconds = in_process(name, count, directory)
                    cells = [f"{x:.2f}" for x in (*seconds, sum(seconds))]
                    rows.append([name, str(count), programs, *cells])
                    print(" ".join(rows[-1]), file=sys.stderr, flush=True)
    imports = ["import JAX", "equinox, optax", "redcoast"]
    print(markdown(["model", "devices", "programs", *imports, *PARTS, "all"], rows))


if __name__ == "__main__":
    tyro.cli(main)
