"""Memory of training adapters of LLaMA-7B: frozen weights in bfloat16, 8 bits and 4 bits.

Compiled for an absent card; with the package `redcoast[cuda12]`, by its compiler.

    python experiments/benchmarks/quantised_bases.py --target a100-40gb:1
"""

from dataclasses import dataclass

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import tyro

import redcoast as rc
from redcoast import lora, losses
from redcoast.models import Llama, LlamaConfig


@dataclass(frozen=True)
class Options:
    target: str = "a100-40gb:1"
    layers: int = 32
    tokens: int = 2048
    rank: int = 16


def loss_fn(model, batch, key):
    hidden = model.hidden(batch[:, :-1], key=key)
    return losses.chunked_cross_entropy(hidden, model.unembed, batch[:, 1:])


def measure(numbers: str, options: Options) -> rc.DryRun:
    config = LlamaConfig(
        vocab=32000,
        width=4096,
        layers=options.layers,
        heads=32,
        kv_heads=32,
        hidden=11008,
        remat="full",
    )

    def init_fn(key):
        model = jax.tree.map(lambda x: x.astype(jnp.bfloat16), Llama(config, key=key))
        if numbers != "bfloat16":
            model = lora.quantise(model, numbers)
        return lora.add_adapters(model, options.rank, targets="layers", key=key)

    return rc.dry_run(
        init_fn,
        loss_fn,
        jax.ShapeDtypeStruct((1, options.tokens + 1), jnp.int32),
        optax.adamw(1e-4),
        target=options.target,
        compute_dtype="bfloat16",
        trainable=lora.trainable(eqx.filter_eval_shape(init_fn, jax.random.key(0))),
    )


def main(options: Options) -> None:
    print("| frozen weights | GiB of arrays | GiB of temporaries | GiB at the peak |")
    print("|---|---|---|---|")
    for numbers in ("bfloat16", "int8", "nf4"):
        memory = measure(numbers, options).memory
        figures = [memory[name] for name in ("parameters", "temporaries", "peak")]
        print(f"| {numbers} | {' | '.join(f'{x / 2**30:.2f}' for x in figures)} |")


if __name__ == "__main__":
    main(tyro.cli(Options))
