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

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import tyro
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from traffic.measure import count_collectives
from traffic.targets import Platform, target_devices

import redcoast as rc
from redcoast import models
from redcoast.core._target import compiling_for, target_of

SIZES: dict[str, Any] = {"vocab": 32000, "width": 768, "layers": 6, "heads": 12, "hidden": 3072}
SHAPE = (8, 512)
CONFIGS = {
    "GPT-2": models.GPT2Config(**SIZES, positions=SHAPE[1]),
    "LLaMA": models.LlamaConfig(**SIZES, kv_heads=12),
    "LLaMA, grouped": models.LlamaConfig(**SIZES, kv_heads=6),
}


def main(platforms: tuple[Platform, ...], /) -> None:
    """Prints a table.

    Args:
        platforms: The compilers to use.
    """
    heads = ("device", "mesh", "model", "dtype", "MB of temporaries", "GB accessed", "collectives")
    print(f"| {' | '.join(heads)} |\n| --- | --- | --- | --- | ---: | ---: | ---: |")
    for name in platforms:
        devices = target_devices(name)
        for data, model in ((1, 1), (2, 2)):
            mesh = rc.make_mesh(data=data, model=model, devices=devices[: data * model])
            for family, config in CONFIGS.items():
                for dtype in ("float32", "bfloat16"):
                    row = (name, f"{data}x{model}", family, dtype, *measure(config, mesh, dtype))
                    print("|", " | ".join(row), "|", flush=True)


def measure(config: Any, mesh: Mesh, dtype: str) -> tuple[str, str, str]:
    kind = getattr(models, type(config).__name__.removesuffix("Config"))
    abstract = eqx.filter_eval_shape(lambda key: kind(config, key=key), jax.random.key(0))
    tokens = jax.ShapeDtypeStruct(SHAPE, jnp.int32)
    plan = rc.plan_shardings(abstract, mesh, fn=loss_of(dtype), args=(tokens,))
    compiled = compile_step(plan, loss_of(dtype), abstract, tokens, mesh)
    costs: Any = compiled.cost_analysis() or {}
    accessed = f"{costs['bytes accessed'] / 1e9:.2f}" if costs else "-"
    kept = f"{compiled.memory_analysis().temp_size_in_bytes / 1e6:,.0f}"
    return kept, accessed, str(count_collectives(compiled.as_text(), mesh)["collectives"])


def loss_of(dtype: str) -> Any:
    def loss_fn(model: Any, tokens: Any) -> Any:
        cast = lambda x: x.astype(dtype) if eqx.is_inexact_array(x) else x
        logits = jax.tree.map(cast, model)(tokens).astype(jnp.float32)
        return rc.losses.cross_entropy(logits, tokens)

    return loss_fn


def compile_step(plan: Any, loss_fn: Any, abstract: Any, tokens: Any, mesh: Mesh) -> Any:
    is_abstract = lambda x: isinstance(x, jax.ShapeDtypeStruct)
    arrays, static = eqx.partition(abstract, is_abstract)
    shardings = eqx.filter(plan.shardings, lambda x: isinstance(x, NamedSharding))
    place = lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
    constrained = plan.constrain(loss_fn)
    step = jax.value_and_grad(lambda arrays, rows: constrained(eqx.combine(arrays, static), rows))
    rows = place(tokens, NamedSharding(mesh, P(("data", "fsdp"))))
    jitted = jax.jit(step, out_shardings=(None, shardings))
    # The constrained function of one device is the function itself, which would choose the
    # operations of the CPU that it is traced on.
    with compiling_for(target_of(mesh.devices.flat[0])):
        return jitted.lower(jax.tree.map(place, arrays, shardings), rows).compile()


if __name__ == "__main__":
    tyro.cli(main)
