"""The time of a training step, compared with torch's eager mode: SmolLM2-135M on the CPU.

Both have the same weights in float32 and the same number of threads, and take turns in one process
at AdamW steps on 4 sequences of 256 tokens. A ratio above 1 means that redcoast is faster. Its
backward pass recomputes everything except products with weights (`remat="dots"`): on a CPU that
takes less time than writing the activations to memory and reading them. Needs torch, transformers
and gguf (`nox -s bench_torch`).

    python experiments/benchmarks/training.py
"""

# pyright: reportMissingImports=false

import functools as ft
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
import tyro
from reference import both_models, describe, take_turns

import redcoast as rc
from redcoast import losses


@dataclass(frozen=True)
class Config:
    batch_size: int = 4  # number of sequences in a batch
    seq: int = 256  # sequence length in tokens
    remat: Literal["none", "dots", "full"] = "dots"  # rematerialisation in redcoast's step
    rounds: int = 7  # number of measurements of each


def main(c: Config) -> None:
    ours, theirs = both_models(remat=c.remat)
    tokens = np.random.default_rng(0).integers(0, 49152, (c.batch_size, c.seq))
    print(describe())

    def loss_fn(model, batch, key):
        logits = model.unembed(model.hidden(batch)[:, :-1])
        return losses.cross_entropy(logits, batch[:, 1:])

    optimizer = optax.adamw(1e-5, weight_decay=0.01)
    mesh = rc.make_mesh(devices=jax.devices()[:1])
    state = rc.init_state(lambda key: ours, optimizer, key=jax.random.key(0))
    step = rc.compile_step(
        ft.partial(rc.train_step, loss_fn=loss_fn, optimizer=optimizer),
        rc.infer_shardings(state, mesh),
    )
    batch = jnp.asarray(tokens, jnp.int32)
    seen = {}

    def step_here():
        nonlocal state
        state, metrics = step(state, batch)
        seen.setdefault("ours", []).append(float(metrics["loss"]))

    adamw = torch.optim.AdamW(theirs.parameters(), lr=1e-5, weight_decay=0.01)
    ids = torch.tensor(tokens)

    def step_there():
        loss = theirs(input_ids=ids, labels=ids).loss
        loss.backward()
        adamw.step()
        adamw.zero_grad()
        seen.setdefault("theirs", []).append(loss.item())

    times = take_turns(step_here, step_there, c.rounds)
    print(
        f"redcoast {times['ours']:.2f} s per step, torch {times['theirs']:.2f} s, ratio "
        f"{times['ratio']:.2f} (at least 1.0); losses of the last step {seen['ours'][-1]:.4f} and "
        f"{seen['theirs'][-1]:.4f}"
    )


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
