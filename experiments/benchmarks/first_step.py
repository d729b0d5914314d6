"""The processor time until a large model's first step, in parts.

The model is a LLaMA of 24 layers and width 1024, on eight emulated devices as data 2 x model 4.
Each part is what `fit` does before its first step: planning, tracing the step, which constrains its
activations, lowering and compiling it, and rehearsing the evaluation, which traces its loss and
computes the weight of a batch. What the constraints take is the difference from tracing the step
without them. The last two rows come after the first step.

    python experiments/benchmarks/first_step.py
"""

import functools as ft
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import numpy as np
import optax
import tyro

import redcoast as rc

sys.path.append(str(Path(__file__).parents[1]))
from _cells import markdown
from jax.sharding import Mesh
from jaxtyping import PyTree

OPTIMIZER = optax.adamw(3e-4)
OURS = ("plan", "constrain", "rehearse the evaluation")
LATER = ("compile the evaluation", "evaluate one batch")


def main(layers: int = 24, width: int = 1024, seq: int = 16, batch: int = 8) -> None:
    """Prints a table.

    Args:
        layers: Number of layers.
        width: Size of the residual stream.
        seq: Number of tokens in a sequence.
        batch: Number of sequences in a batch.
    """
    rc.emulate_devices(8)
    mesh = rc.make_mesh(data=2, model=4)
    sizes: dict[str, Any] = {"vocab": 4096, "heads": 16, "kv_heads": 16, "hidden": 11 * width // 4}
    config = rc.models.LlamaConfig(width=width, layers=layers, **sizes)
    seconds = measure(config, mesh, jax.ShapeDtypeStruct((batch, seq), np.int32))
    later = {name: seconds.pop(name) for name in LATER}
    total = sum(seconds.values())
    rows = [[name, f"{x:.2f}", f"{x / total:.1%}"] for name, x in seconds.items()]
    ours = sum(seconds[name] for name in OURS)
    rows += [["all", f"{total:.2f}", ""], [", ".join(OURS), f"{ours:.2f}", f"{ours / total:.1%}"]]
    rows += [[f"later: {name}", f"{x:.2f}", ""] for name, x in later.items()]
    print(markdown(["part", "s", "share"], rows))


def measure(config: Any, mesh: Mesh, tokens: jax.ShapeDtypeStruct) -> dict[str, float]:
    """Processor seconds of each part."""

    def init_fn(key: jax.Array) -> PyTree:
        return rc.models.Llama(config, key=key)

    def loss_fn(model: PyTree, tokens: jax.Array, key: jax.Array) -> jax.Array:
        return rc.losses.cross_entropy(model(tokens)[:, :-1], tokens[:, 1:])

    seconds_of: dict[str, float] = {}

    def timed(name: str, run: Callable[[], Any]) -> Any:
        begin = time.process_time()
        result = jax.block_until_ready(run())
        seconds_of[name] = time.process_time() - begin
        return result

    def trace(loss_fn: Any) -> Any:
        step = ft.partial(rc.train_step, loss_fn=loss_fn, optimizer=OPTIMIZER)
        return rc.compile_step(step, plan.shardings).trace(state, tokens)

    make = ft.partial(rc.init_state, init_fn, OPTIMIZER, key=jax.random.key(0))
    state = eqx.filter_eval_shape(make)
    plan = timed("plan", lambda: rc.plan_step(state, loss_fn, tokens, mesh))
    constrained = plan.constrain(loss_fn)
    traced = timed("trace", lambda: trace(constrained))
    # What JAX has cached by now, a trace need not do again, so two later ones are compared.
    timed("plain", lambda: trace(loss_fn))
    timed("constrain", lambda: trace(constrained))
    seconds_of["constrain"] -= seconds_of.pop("plain")
    seconds_of["trace"] -= seconds_of["constrain"]
    lowered = timed("lower", traced.lower)
    timed("compile", lowered.compile)
    create = jax.jit(init_fn, out_shardings=plan.shardings.model)
    model = jax.block_until_ready(create(jax.random.key(0)))
    rows = list(np.zeros(tokens.shape, np.int32))
    options: Any = {"collate_fn": np.stack, "loss_fn": loss_fn, "batch_size": len(rows)}
    evaluation = rc.compile_evaluation(rc.Evaluation(rows, **options), plan)
    timed("rehearse the evaluation", lambda: evaluation.rehearse(model))
    timed("compile the evaluation", lambda: evaluation.try_loss(model))
    timed("evaluate one batch", lambda: evaluation.try_loss(model))
    seconds_of["compile the evaluation"] -= seconds_of["evaluate one batch"]
    return seconds_of


if __name__ == "__main__":
    tyro.cli(main)
