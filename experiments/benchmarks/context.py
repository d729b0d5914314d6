"""Memory and communication of training on one long sequence, by the compiler for the H100.

    pip install -e ".[experiments,cuda12]"
    python experiments/benchmarks/context.py --model llama-7b --tokens 131072
    python experiments/benchmarks/context.py --model llama-7b --tokens 1048576
    python experiments/benchmarks/context.py --model llama3-8b --tokens 131072

AdamW in float32, compute in bfloat16, full rematerialisation, the loss in chunks. The compiler
comes with JAX and needs no device: the programs are compiled but not run. Each takes a minute.
"""

import os

# JAX reads these when it is first imported; no accelerator is looked for.
os.environ |= {"TF_CPP_MIN_LOG_LEVEL": "2", "JAX_PLATFORMS": "cpu"}

from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
import tyro
from jaxtyping import PyTree

import redcoast as rc
from redcoast.losses import chunked_cross_entropy
from redcoast.models import sizes

MODELS: dict[str, Any] = {
    "llama-7b": sizes.llama_7b,
    "llama3-8b": sizes.llama3_8b,
    "tiny": partial(sizes.llama_7b, width=64, layers=2, heads=4, kv_heads=2, hidden=128, vocab=64),
}


def loss_fn(model: PyTree, batch: jax.Array, key: jax.Array) -> jax.Array:
    hidden = model.hidden(batch[:, :-1])
    return chunked_cross_entropy(hidden, model.unembed, batch[:, 1:])


def main(
    model: Literal["llama-7b", "llama3-8b", "tiny"] = "llama-7b",
    tokens: tuple[int, ...] = (131072,),
    rows: int = 1,
    mesh: tuple[int, int, int] = (1, 8, 1),
    target: str = "h100:8",
) -> None:
    """Prints the peak of a device and the bytes that it sends in a step.

    Args:
        model: The shapes.
        tokens: Lengths of the sequence.
        rows: Sequences in a batch.
        mesh: The sizes of data, fsdp and model.
        target: The devices, as for `redcoast.dry_run`.
    """
    print("| model | tokens | peak GiB | usable GiB | GB sent | compiled in s |")
    print("|---|---|---|---|---|---|")
    for count in tokens:
        run = rc.dry_run(
            lambda key: MODELS[model](key=key, remat="full"),
            loss_fn,
            jax.ShapeDtypeStruct((rows, count + 1), jnp.int32),
            optax.adamw(1e-4),
            target=target,
            mesh=dict(zip(("data", "fsdp", "model"), mesh, strict=True)),
            compute_dtype=jnp.bfloat16,
            suggest=False,
        )
        peak, usable = (run.memory[name] / 2**30 for name in ("peak", "usable"))
        sent = "refused" if run.sent_bytes is None else f"{run.sent_bytes / 1e9:,.1f}"
        line = f"| {model} | {count:,} | {peak:,.1f} | {usable:,.1f} | {sent} |"
        print(f"{line} {run.compile_seconds:,.0f} |", flush=True)
        print(f"\n{run.plan.report.program.batch}\n\n{run}", flush=True)


if __name__ == "__main__":
    tyro.cli(main)
