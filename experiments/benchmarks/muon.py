"""What an orthogonalising optimizer costs on each device, and what it sends.

    python experiments/benchmarks/muon.py --page docs/measured/muon.md

A step of a LLaMA with stacked layers is compiled for eight emulated devices, with SGD with
momentum, `rc.muon` and `optax.contrib.muon` with the same dimension numbers. Operations are those
of the compiled program on one device, divided by those of the step with SGD on one device. Bytes
are what a device sends. Times are medians, divided by that of the step with SGD; on a machine with
few cores, the devices share them, so that work that is repeated on each device takes longer than on
eight.
"""

# pyright: reportOptionalSubscript=false

import statistics
import time
from pathlib import Path

import redcoast as rc

rc.emulate_devices(8)

import equinox as eqx  # noqa: E402
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
import tyro  # noqa: E402
from _pages import Printed  # noqa: E402
from jax.sharding import Mesh  # noqa: E402
from traffic.measure import count_collectives  # noqa: E402

from redcoast.models import Llama, LlamaConfig  # noqa: E402

CONFIG = LlamaConfig(vocab=512, width=256, layers=12, heads=4, kv_heads=4, hidden=704)
TOKENS = np.random.default_rng(0).integers(0, CONFIG.vocab, (16, 64)).astype(np.int32)
MESHES = {
    "data 8": rc.make_mesh(),
    "fsdp 8": rc.make_mesh(fsdp=8),
    "data 2, fsdp 2, model 2": rc.make_mesh(data=2, fsdp=2, model=2),
}


def make(key: jax.Array) -> Llama:
    return Llama(CONFIG, key=key)


def loss_fn(model: Llama, tokens: jax.Array, key: jax.Array) -> jax.Array:
    logits = model(tokens[:, :-1]).astype(jnp.float32)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    return losses.mean()


def main(steps: int = 5, page: Path | None = None) -> None:
    """Prints a table, and writes it into a page.

    Args:
        steps: How many steps are timed; 0 compiles only.
        page: A page with the marks `muon`.
    """
    model = eqx.filter_eval_shape(make, jax.random.key(0))
    dimensions = rc.matrix_dimensions(model, loss_fn, TOKENS, jax.random.key(0))
    adam = optax.adamw(1e-3)
    optimizers = {
        "SGD with momentum": optax.sgd(1e-3, momentum=0.9),
        "`rc.muon`": rc.muon(0.02, dimensions, others=adam),
        "`optax.contrib.muon`": optax.contrib.muon(
            0.02, muon_weight_dimension_numbers=dimensions, adam_learning_rate=1e-3
        ),
    }
    table = Printed()
    table.add(
        "| mesh | optimizer | operations | MB sent | time |",
        "| --- | --- | ---: | ---: | ---: |",
    )
    one_device = rc.make_mesh(data=1, devices=jax.devices()[:1])
    whole, _, _ = measure(optimizers["SGD with momentum"], one_device, steps=0)
    for name, mesh in MESHES.items():
        sgd_seconds = 0.0
        for optimizer_name, optimizer in optimizers.items():
            operations, sent, seconds = measure(optimizer, mesh, steps)
            sgd_seconds = sgd_seconds or seconds
            ratio = ""
            if steps:
                ratio = f"{seconds / sgd_seconds:.2f}"
            cells = f"{operations / whole:.2f} | {sent / 1e6:.1f} | {ratio}"
            table.add(f"| {name} | {optimizer_name} | {cells} |")
    table.write(page, "muon")


def measure(
    optimizer: optax.GradientTransformation, mesh: Mesh, steps: int
) -> tuple[float, int, float]:
    """The operations of one device, the bytes that it sends, and the median time of a step."""
    state, step, _ = rc.prepare(make, optimizer, loss_fn, TOKENS, key=jax.random.key(0), mesh=mesh)
    compiled = step.lower(state, TOKENS).compile()
    operations = compiled.cost_analysis()["flops"]
    sent = 0
    if mesh.size > 1:
        sent = count_collectives(compiled.as_text() or "", mesh)["sent_bytes"]
    seconds: list[float] = []
    for _ in range(steps):
        begin = time.perf_counter()
        state, _ = step(state, TOKENS)
        jax.block_until_ready(state)
        seconds.append(time.perf_counter() - begin)
    return operations, sent, statistics.median(seconds or [0.0])


if __name__ == "__main__":
    tyro.cli(main)
