"""Gate and up of a gated layer as two products, and as one with joined weights, compiled for GPUs.

    pip install -e ".[experiments,cuda12]"
    python experiments/benchmarks/gate_up_ahead.py --page docs/measured/ahead.md

The programs are the gradient of one layer of a 1.1B LLaMA with 16,384 tokens in bfloat16. They are
compiled, and not run; times are the estimates of a dry run.
"""

from pathlib import Path
from typing import Any, Literal

# This import sets the platform before JAX is imported.
from accelerators import LLAMA_1B, Figures, compile_lowered

# isort: split
import jax
import jax.numpy as jnp
import tyro
from _pages import Printed
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

import redcoast as rc

TOKENS = 16384
Form = Literal["two products", "one product"]


def main(targets: tuple[str, ...] = ("h100:1", "a100-40gb:1"), page: Path | None = None) -> None:
    """Prints a row for each target and form.

    Args:
        targets: Single devices, as for `redcoast.dry_run`.
        page: A page of `docs/measured/` to write the table into.
    """
    table = Printed()
    table.add("| target | gate and up | kernels | temporaries MB | other MB | ms |")
    table.add("| --- | --- | ---: | ---: | ---: | ---: |")
    forms: tuple[Form, ...] = ("two products", "one product")
    for target in targets:
        for form in forms:
            figures = measure(target, form)
            sizes = f"{figures.temporaries / 1e6:,.0f} | {figures.other_bytes / 1e6:,.0f}"
            milliseconds = f"{1e3 * figures.seconds:.2f}"
            table.add(f"| {target} | {form} | {figures.kernels:.0f} | {sizes} | {milliseconds} |")
    table.write(page, "gate_up")


def measure(target: str, form: Form) -> Figures:
    mesh = rc.make_mesh(data=1, devices=rc.target_devices(target))
    width, hidden = LLAMA_1B.width, LLAMA_1B.hidden

    def shape(*dims: int) -> Any:
        return jax.ShapeDtypeStruct(dims, jnp.bfloat16, sharding=NamedSharding(mesh, P()))

    def loss(weights: tuple[Array, Array, Array], x: Array) -> Float[Array, ""]:
        gate, up, down = weights
        if form == "two products":
            inner = jax.nn.silu(x @ gate) * (x @ up)
        else:
            both = x @ jnp.concatenate([gate, up], axis=1)  # (tokens, 2 * hidden)
            inner = jax.nn.silu(both[:, :hidden]) * both[:, hidden:]
        return jnp.mean((x + inner @ down).astype(jnp.float32) ** 2)

    weights = shape(width, hidden), shape(width, hidden), shape(hidden, width)
    gradient = jax.jit(jax.grad(loss, argnums=(0, 1)))
    return compile_lowered(gradient.lower(weights, shape(TOKENS, width)), target, mesh)


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
