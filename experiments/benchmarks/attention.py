"""Temporaries of attention in blocks and of attention with the scores of all pairs.

    pip install -e ".[experiments,cuda12]"
    python experiments/benchmarks/attention.py h100

The compiler comes with JAX and needs no device: the programs are compiled but not run. On a CPU
(`cpu`) they are also run, and the processor time is printed.
"""

import os

# JAX reads these when it is first imported; no accelerator is looked for.
os.environ |= {"TF_CPP_MIN_LOG_LEVEL": "2", "JAX_PLATFORMS": "cpu"}

from typing import Any

import jax
import jax.numpy as jnp
import tyro
from _timing import elapsed
from jaxtyping import PyTree
from traffic.targets import Platform, target_devices

from redcoast.core._target import compiling_for, target_of
from redcoast.dryrun.hlo import temporary_bytes
from redcoast.models._attention import attend
from redcoast.models._blockwise import attend_in_blocks
from redcoast.models._view import View


def all_pairs(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return attend(q, k, v, visible=jnp.tril(jnp.ones((1, q.shape[1], k.shape[1]), bool)))


def in_blocks(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return attend_in_blocks(q, k, v, View(causal=True), scale=q.shape[-1] ** -0.5)


def gradients(fn: Any) -> Any:
    return jax.grad(lambda *arrays: jnp.sum(jnp.square(fn(*arrays))), argnums=(0, 1, 2))


def main(
    platform: Platform,
    /,
    tokens: tuple[int, ...] = (2048, 8192),
    heads: int = 8,
    kv_heads: int = 8,
    head_dim: int = 64,
) -> None:
    """Prints MiB of temporaries for one causal row in float32, forward and with the gradients."""
    device = target_devices(platform)[0]
    print("| tokens | attention | forward | with gradients |" + " s |" * (platform == "cpu"))
    print("|---|---|---|---|" + "---|" * (platform == "cpu"))
    for count in tokens:
        shapes = [(1, count, n, head_dim) for n in (heads, kv_heads, kv_heads)]
        for name, fn in (("all pairs", all_pairs), ("in blocks", in_blocks)):
            with compiling_for(target_of(device)):
                compiled = [
                    compile_for(device, function, shapes) for function in (fn, gradients(fn))
                ]
            sizes: list[float] = []
            for program in compiled:
                memory = program.memory_analysis()
                sizes.append(temporary_bytes(memory, device.platform) / 2**20)
            line = f"| {count:,} | {name} | {sizes[0]:,.0f} | {sizes[1]:,.0f} |"
            if platform == "cpu":
                line += f" {second_call(compiled[1], shapes):.2f} |"
            print(line)


def compile_for(device: Any, fn: Any, shapes: PyTree) -> Any:
    place = jax.sharding.SingleDeviceSharding(device)
    arrays = [jax.ShapeDtypeStruct(shape, jnp.float32, sharding=place) for shape in shapes]
    return jax.jit(fn).lower(*arrays).compile()


def second_call(compiled: Any, shapes: PyTree) -> float:
    """Processor time of one call, after a first one."""
    keys = jax.random.split(jax.random.key(0), len(shapes))
    arrays = [jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True)]
    jax.block_until_ready(compiled(*arrays))
    return elapsed(lambda: compiled(*arrays))


if __name__ == "__main__":
    tyro.cli(main)
