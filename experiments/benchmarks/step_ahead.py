"""Temporaries and bytes accessed of a training step, by the compilers for GPUs and TPUs.

    pip install -e ".[experiments,cuda12,tpu]"
    python experiments/benchmarks/step_ahead.py h100 v4

The compilers come with JAX and need no device: the programs are compiled but not run. Each computes
the loss and its gradients on one device, and with the plan for data 2 x model 2. The compilers for
GPUs do not count the bytes accessed; that for TPUs counts the body of a loop once.
"""

import os

# JAX reads these when it is first imported; no accelerator is looked for.
os.environ |= {"TF_CPP_MIN_LOG_LEVEL": "2", "JAX_PLATFORMS": "cpu"}

import dataclasses
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import tyro
from _pages import Printed
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import PyTree
from traffic.measure import count_collectives
from traffic.targets import Platform, target_devices

import redcoast as rc
from redcoast import lora, models
from redcoast.core._target import compiling_for, target_of
from redcoast.dryrun.hlo import temporary_bytes

SIZES: dict[str, Any] = {"vocab": 32000, "width": 768, "layers": 6, "heads": 12, "hidden": 3072}
SHAPE = (8, 512)
GPT2 = models.GPT2Config(**SIZES, positions=SHAPE[1])
LLAMA = models.LlamaConfig(**SIZES, kv_heads=12, attention_dropout=0.1)


@dataclasses.dataclass(frozen=True)
class Program:
    """The configuration of a model, and what its loss uses."""

    config: Any
    adapters: bool = False
    segments: bool = False
    dropout: bool = False
    dtypes: tuple[str, ...] = ("bfloat16",)


PROGRAMS = {
    "GPT-2": Program(GPT2, dtypes=("float32", "bfloat16")),
    "LLaMA": Program(LLAMA, dtypes=("float32", "bfloat16")),
    "LLaMA, grouped": Program(
        dataclasses.replace(LLAMA, kv_heads=6), dtypes=("float32", "bfloat16")
    ),
    "GPT-2, LoRA": Program(GPT2, adapters=True),
    "GPT-2, segments": Program(GPT2, segments=True),
    "GPT-2, dropout": Program(GPT2, dropout=True),
    "GPT-2, remat": Program(dataclasses.replace(GPT2, remat="full")),
    "LLaMA, LoRA": Program(LLAMA, adapters=True),
    "LLaMA, segments": Program(LLAMA, segments=True),
    "LLaMA, dropout": Program(LLAMA, dropout=True),
    "LLaMA, remat": Program(dataclasses.replace(LLAMA, remat="full")),
}


def main(platforms: tuple[Platform, ...], /, page: Path | None = None) -> None:
    """Prints a table for each platform.

    Args:
        platforms: The compilers to use.
        page: A page of `docs/measured/` to write the tables into.
    """
    for platform in platforms:
        devices = target_devices(platform)
        table = Printed()
        table.add(
            f"| on {platform} | mesh | dtype | MB of temporaries | GB accessed | collectives |",
            "| --- | --- | --- | ---: | ---: | ---: |",
        )
        for data, model in ((1, 1), (2, 2)):
            mesh = rc.make_mesh(data=data, model=model, devices=devices[: data * model])
            for name, program in PROGRAMS.items():
                for dtype in program.dtypes:
                    row = (name, f"{data}x{model}", dtype, *measure(program, mesh, dtype))
                    table.row(*row)
        table.write(page, platform)


def measure(program: Program, mesh: Mesh, dtype: str) -> tuple[str, str, str]:
    compiled = compile_step(program, mesh, dtype)
    costs: Any = compiled.cost_analysis() or {}
    accessed = "-"
    if costs:
        accessed = f"{costs['bytes accessed'] / 1e9:.2f}"
    platform = mesh.devices.flat[0].platform
    kept = f"{temporary_bytes(compiled.memory_analysis(), platform) / 1e6:,.0f}"
    return kept, accessed, str(count_collectives(compiled.as_text(), mesh)["collectives"])


def compile_step(program: Program, mesh: Mesh, dtype: str) -> Any:
    model, batch = eqx.filter_eval_shape(lambda key: inputs_of(program, key), jax.random.key(0))
    trainable = lora.trainable(model) if program.adapters else True
    loss_fn = lambda model, batch: loss_of(model, batch, dtype)
    plan = rc.plan_shardings(model, mesh, fn=loss_fn, args=(batch,), trainable=trainable)
    constrained = plan.constrain(loss_fn)
    place = lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
    shardings = eqx.filter(plan.shardings, lambda x: isinstance(x, NamedSharding))
    arrays, static = eqx.partition(model, lambda x: isinstance(x, jax.ShapeDtypeStruct))
    trained, frozen = eqx.partition(jax.tree.map(place, arrays, shardings), trainable)
    rows = NamedSharding(mesh, P(("data", "fsdp")))
    batch = {name: place(x, rows if x.ndim else None) for name, x in batch.items()}
    step = jax.value_and_grad(
        lambda trained, frozen, batch: constrained(eqx.combine(trained, frozen, static), batch)
    )
    jitted = jax.jit(step, out_shardings=(None, eqx.filter(shardings, trainable)))
    # The constrained function of one device is the function itself, which would choose the
    # operations of the CPU that it is traced on.
    with compiling_for(target_of(mesh.devices.flat[0])):
        return jitted.lower(trained, frozen, batch).compile()


def inputs_of(program: Program, key: jax.Array) -> tuple[Any, dict[str, Any]]:
    kind = getattr(models, type(program.config).__name__.removesuffix("Config"))
    model = kind(program.config, key=key)
    batch = {"tokens": jnp.zeros(SHAPE, jnp.int32)}
    if program.adapters:
        model = lora.add_adapters(model, 8, targets=".", key=key)
    if program.segments:
        batch["segments"] = jnp.zeros(SHAPE, jnp.int32)
    if program.dropout:
        batch["key"] = key
    return model, batch


def loss_of(model: PyTree, batch: dict[str, Any], dtype: str) -> jax.Array:
    cast = lambda x: x.astype(dtype) if eqx.is_inexact_array(x) else x
    logits = jax.tree.map(cast, model)(**batch).astype(jnp.float32)
    return rc.losses.cross_entropy(logits, batch["tokens"])


if __name__ == "__main__":
    tyro.cli(main)
