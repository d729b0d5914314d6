"""The arithmetic and the communication of optimizers of matrices, on each device.

    python experiments/benchmarks/muon.py --page docs/measured/muon.md

A step of a LLaMA with stacked layers is compiled for eight emulated devices, with SGD with
momentum, `rc.muon`, `optax.contrib.muon` with the same dimension numbers, `rc.soap` and
`rc.shampoo`. Operations are those of the compiled program on one device, divided by those of the
step with SGD on one device. Bytes are what a device sends: in the compiled program, and in the
plan.
"""

# pyright: reportOptionalSubscript=false

from pathlib import Path
from typing import Any

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
from traffic.measure import OPTIONS, count_collectives  # noqa: E402

from redcoast.models import Llama, LlamaConfig  # noqa: E402

CONFIG = LlamaConfig(vocab=512, width=256, layers=12, heads=4, kv_heads=4, hidden=704)
TOKENS = np.random.default_rng(0).integers(0, CONFIG.vocab, (16, 64)).astype(np.int32)
MESHES = {
    "data 8": rc.make_mesh(),
    "fsdp 8": rc.make_mesh(fsdp=8),
    "data 2, model 4": rc.make_mesh(data=2, model=4),
    "data 2, fsdp 2, model 2": rc.make_mesh(data=2, fsdp=2, model=2),
}


def make(key: jax.Array) -> Llama:
    return Llama(CONFIG, key=key)


def loss_fn(model: Llama, tokens: jax.Array, key: jax.Array) -> jax.Array:
    logits = model(tokens[:, :-1]).astype(jnp.float32)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    return losses.mean()


def main(page: Path | None = None) -> None:
    """Prints a table, and writes it into a page.

    Args:
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
        "`rc.soap`": rc.soap(3e-3, dimensions, others=adam),
        "`rc.shampoo`": rc.shampoo(1e-3, dimensions, others=adam),
    }
    table = Printed()
    table.add(
        "| mesh | optimizer | operations | MB sent | MB in the plan |",
        "| --- | --- | ---: | ---: | ---: |",
    )
    one_device = rc.make_mesh(data=1, devices=jax.devices()[:1])
    whole, _, _ = measure(optimizers["SGD with momentum"], one_device)
    for name, mesh in MESHES.items():
        for optimizer_name, optimizer in optimizers.items():
            operations, measured, planned = measure(optimizer, mesh)
            cells = f"{operations / whole:.2f} | {measured / 1e6:.1f} | {planned / 1e6:.1f}"
            table.add(f"| {name} | {optimizer_name} | {cells} |")
    table.write(page, "muon")


def measure(optimizer: optax.GradientTransformation, mesh: Mesh) -> tuple[float, int, int]:
    """The operations of one device, the bytes that it sends, and those of the plan."""
    state, step, plan = rc.prepare(
        make, optimizer, loss_fn, TOKENS, key=jax.random.key(0), mesh=mesh
    )
    lowered: Any = step.lower(state, TOKENS)
    compiled = lowered.compile(compiler_options=OPTIONS)
    operations = compiled.cost_analysis()["flops"]
    if mesh.size == 1:
        return operations, 0, 0
    measured = count_collectives(compiled.as_text() or "", mesh)["sent_bytes"]
    planned = sum(traffic.bytes for traffic in plan.report.program.traffic)
    return operations, measured, planned


if __name__ == "__main__":
    tyro.cli(main)
