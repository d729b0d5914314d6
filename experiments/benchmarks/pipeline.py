"""Pipelines: exactness, and what the plan and the compilers say about bytes, memory and meshes.

    python experiments/benchmarks/pipeline.py exact
    pip install -e ".[experiments,cuda12]"
    python experiments/benchmarks/pipeline.py bytes --target a100-80gb:8

`exact` compares losses and gradients with those of one device, on eight emulated devices, with
dropout, masks and rematerialisation. `bytes` compiles LLaMA-7B's shapes in bfloat16, 32 x 1,024
tokens, full rematerialisation, for devices that need not be present: `a100-80gb:2x8` are two
machines.
"""

import math
import os

# JAX reads these when it is first imported; no accelerator is looked for.
os.environ |= {"TF_CPP_MIN_LOG_LEVEL": "2", "JAX_PLATFORMS": "cpu"}

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
import tyro
from jaxtyping import PyTree

import redcoast as rc
from redcoast.losses import cross_entropy
from redcoast.models import (
    GPT2,
    T5,
    Bert,
    BertConfig,
    GPT2Config,
    Llama,
    LlamaConfig,
    Mixtral,
    MixtralConfig,
    T5Config,
    sizes,
)

rc.emulate_devices(8)
KEY, ROWS = jax.random.key(0), 32
SMALL: dict[str, Any] = {"vocab": 256, "width": 64, "layers": 8, "heads": 4}
STAGES: list[dict[str, Any]] = [{"pipe": 4, "data": 2}, {"pipe": 8}, {"pipe": 4, "fsdp": 2}]


def decoded(model: PyTree, batch: PyTree, key: jax.Array) -> jax.Array:
    logits = model(batch["tokens"], mask=batch["mask"], key=key)
    return cross_entropy(logits[:, :-1], batch["tokens"][:, 1:], mask=batch["mask"][:, 1:])


def encoded(model: PyTree, batch: PyTree, key: jax.Array) -> jax.Array:
    return jnp.mean(jnp.tanh(model(batch["tokens"], mask=batch["mask"], key=key)))


def translated(model: PyTree, batch: PyTree, key: jax.Array) -> jax.Array:
    logits = model(batch["tokens"], batch["tokens"], mask=batch["mask"], key=key)
    return cross_entropy(logits[:, :-1], batch["tokens"][:, 1:])


def routed(model: PyTree, batch: PyTree, key: jax.Array) -> jax.Array:
    hidden, loss = model.hidden_and_router_loss(batch["tokens"], mask=batch["mask"], key=key)
    return cross_entropy(model.unembed(hidden)[:, :-1], batch["tokens"][:, 1:]) + 0.1 * loss


def models() -> dict[str, tuple[Any, Callable[..., jax.Array]]]:
    llama = LlamaConfig(**SMALL, kv_heads=2, hidden=128, remat="full")
    experts = {"kv_heads": 2, "hidden": 64, "experts": 4, "chosen": 2, "attention_dropout": 0.1}
    t5 = T5Config(**SMALL, decoder_layers=8, hidden=128, dropout=0.1)
    return {
        "GPT-2": (GPT2(GPT2Config(**SMALL, hidden=128, positions=32), key=KEY), decoded),
        "LLaMA, remat": (Llama(llama, key=KEY), decoded),
        "T5": (T5(t5, key=KEY), translated),
        "BERT": (Bert(BertConfig(**SMALL, hidden=128, positions=32), key=KEY), encoded),
        "Mixtral": (Mixtral(MixtralConfig(**SMALL, **experts), key=KEY), routed),
    }


def exact() -> None:
    """Prints the largest differences from one device."""
    tokens = jax.random.randint(KEY, (ROWS, 24), 0, 256)
    batch = {"tokens": tokens, "mask": jax.random.bernoulli(KEY, 0.8, tokens.shape)}
    print("| model | mesh | microbatches | loss | gradients |\n|---|---|---|---|---|")
    for name, (model, loss_fn) in models().items():
        for mesh in STAGES:
            plan = rc.plan_shardings(model, rc.make_mesh(**mesh), fn=loss_fn, args=(batch, KEY))
            errors = plan.verify(loss_fn, model, batch, KEY, tolerance=1e-5)
            loss_error = errors.pop("loss")
            pipeline = plan.report.program.pipeline
            assert pipeline is not None
            line = f"| {name} | {written(mesh)} | {pipeline.microbatches} |"
            print(f"{line} {loss_error:.1e} | {max(errors.values()):.1e} |", flush=True)


def bytes_(target: str) -> None:
    """Prints what a device sends and needs, by the plan and by the compiler."""
    init_fn = lambda key: jax.tree.map(lambda x: x.astype(jnp.bfloat16), llama(key))
    llama = lambda key: sizes.llama_7b(key=key, remat="full")
    loss_fn = lambda model, tokens, key: cross_entropy(model(tokens)[:, :-1], tokens[:, 1:])
    batch = jax.ShapeDtypeStruct((ROWS, 1024), jnp.int32)
    print(
        "| mesh | microbatches | bubble | GB sent, plan | GB sent | by `pipe`, plan | by `pipe` "
        "| GB, plan | peak GB |\n|---|---|---|---|---|---|---|---|---|"
    )
    for mesh in meshes_of(math.prod(map(int, target.partition(":")[2].split("x")))):
        options: Any = {"target": target, "mesh": {"data": 1} | mesh, "suggest": False}
        run = rc.dry_run(init_fn, loss_fn, batch, optax.sgd(1e-3), **options)
        program = run.plan.report.program
        planned = [(each.axes, each.bytes) for each in program.traffic]
        compiled = [(each["axis"].split("+"), each["bytes"]) for each in run.report["traffic"]]
        stages = "- | -"
        if program.pipeline:
            stages = f"{program.pipeline.microbatches} | {program.pipeline.bubble:.0%}"
        cells = [written(mesh), stages]
        for axis in (None, "pipe"):
            cells += [gigabytes_sent(planned, axis), gigabytes_sent(compiled, axis)]
        cells += [f"{program.memory.total / 1e9:.1f}", f"{run.memory['peak'] / 1e9:.1f}"]
        print(f"| {' | '.join(cells)} |", flush=True)


def gigabytes_sent(collectives: list[tuple[Any, int]], axis: str | None) -> str:
    """What a device sends along an axis, or along all."""
    total = 0
    for axes, size in collectives:
        if axis is None or axis in axes:
            total += size
    return f"{total / 1e9:.2f}"


def meshes_of(count: int) -> list[dict[str, int]]:
    """Two meshes without stages, and four with them, all of `count` devices."""
    meshes = [
        {"fsdp": count},
        {"data": count // 4, "model": 4},
        {"pipe": 4, "data": count // 4},
        {"pipe": 8, "data": count // 8},
        {"pipe": 4, "fsdp": count // 4},
        {"pipe": 2, "data": 2, "model": count // 4},
    ]
    return [{axis: size for axis, size in mesh.items() if size > 1} for mesh in meshes]


def written(mesh: dict[str, int]) -> str:
    return " x ".join(f"{axis} {size}" for axis, size in mesh.items())


def main(
    what: tyro.conf.Positional[Literal["exact", "bytes"]] = "exact", target: str = "a100-80gb:8"
) -> None:
    """Prints one of the tables.

    Args:
        what: The table.
        target: The devices of `bytes`, as for `redcoast.dry_run`.
    """
    if what == "exact":
        exact()
    else:
        bytes_(target)


if __name__ == "__main__":
    tyro.cli(main)
