"""Compiled programs that keep activations in the memory of the host, by JAX's policies for it.

    pip install -e ".[experiments,cuda12,tpu]"
    python experiments/benchmarks/offload_ahead.py --page docs/measured/memory_plan.md

The program is the gradient of 8 layers, each a product of 8,192 rows with a matrix of width 4,096
in bfloat16, in a loop or unrolled. Its products, 64 MiB in each layer, are kept on the device or
offloaded with `jax.checkpoint_policies.save_and_offload_only_these_names`. Nothing is run.
"""

import os

# JAX reads these when it is first imported; no accelerator is looked for.
os.environ |= {"TF_CPP_MIN_LOG_LEVEL": "2", "JAX_PLATFORMS": "cpu"}

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import tyro
from _pages import Printed
from accelerators import compiling_ahead
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from redcoast.dryrun.hlo import temporary_bytes

LAYERS, WIDTH, ROWS = 8, 4096, 8192
TARGETS = "h100:1", "a100-80gb:1", "v5e:1x1"
MIB = 2**20
KEPT = jax.checkpoint_policies.save_only_these_names("product")
OFFLOADED = jax.checkpoint_policies.save_and_offload_only_these_names(
    names_which_can_be_saved=[],
    names_which_can_be_offloaded=["product"],
    offload_src="device",
    offload_dst="pinned_host",
)


def main(page: Path | None = None, targets: tuple[str, ...] = TARGETS) -> None:
    """Prints the temporaries of each program.

    Args:
        page: A page with the marks `offload`.
        targets: Single devices, whose compilers are installed.
    """
    table = Printed()
    table.add(
        "| target | layers | products | MiB of temporaries | MiB on the host |",
        "| --- | --- | --- | ---: | ---: |",
    )
    for target in targets:
        for layers, unroll in (("loop", 1), ("unrolled", LAYERS)):
            for products, policy in (("kept", KEPT), ("offloaded", OFFLOADED)):
                sizes = compiled_memory(target, policy, unroll)
                cells = " | ".join(f"{size / MIB:,.0f}" for size in sizes)
                table.add(f"| {target} | {layers} | {products} | {cells} |")
    table.write(page, "offload")


def compiled_memory(
    target: str, policy: Callable[..., bool] | None, unroll: int
) -> tuple[int, int]:
    """The bytes of temporaries on the device and on the host."""

    def layer(x: Array, w: Array) -> tuple[Array, None]:
        y = checkpoint_name(x @ w, "product")
        return jnp.tanh(y) * x, None

    def loss(weights: Float[Array, "layers width width"], x: Float[Array, "rows width"]) -> Array:
        body = jax.checkpoint(layer, policy=policy)
        x, _ = jax.lax.scan(body, x, weights, unroll=unroll)
        return jnp.mean(x.astype(jnp.float32) ** 2)

    with compiling_ahead(target) as place:
        whole = NamedSharding(place.mesh({"data": 1}), P())
        weights = jax.ShapeDtypeStruct((LAYERS, WIDTH, WIDTH), jnp.bfloat16, sharding=whole)
        x = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.bfloat16, sharding=whole)
        lowered = jax.jit(jax.grad(loss), out_shardings=whole).lower(weights, x)
    memory: Any = lowered.compile().memory_analysis()
    return temporary_bytes(memory, place.devices[0].platform), memory.host_temp_size_in_bytes


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
