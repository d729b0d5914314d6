"""How far the probabilities of sampled tokens are from those of the loss, with `exact` and without,
and what `exact` costs.

A rollout is sampled, and its log-probabilities are compared with those that the loss computes in a
compiled training step, in minibatches of other rows. The figures of each mesh are the number of
tokens, the largest difference, and the processor seconds of a rollout and of the updates on it; the
medians of a few turns, in which both modes take turns.

    python experiments/benchmarks/exact.py --meshes 1 8 2x4
"""

import os
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro

import redcoast as rc
from redcoast import losses
from redcoast.models import Llama, LlamaConfig

sys.path.append(str(Path(__file__).parents[1]))
from _cells import markdown
from _options import mesh_sizes
from _timing import elapsed
from jaxtyping import PyTree

HEAD = ["mesh", "tokens", "difference", "exact", "rollout, s", "exact, s", "updates, s", "exact, s"]


@dataclass(frozen=True)
class Config:
    meshes: tuple[str, ...] = ("1", "8", "2x4")  # the meshes to compare on
    vocab: int = 97  # size of the vocabulary
    width: int = 128  # width of the model
    layers: int = 2  # number of layers
    prompts: int = 128  # number of rows of a rollout
    prompt: int = 6  # number of tokens of the longest prompt
    new: int = 16  # maximum number of tokens of an answer
    minibatches: int = 4  # number of updates on a rollout
    rounds: int = 5  # number of measurements of each


class Mode(NamedTuple):
    """A rollout and the updates on it, exact or not."""

    roll_out: Callable[[], dict[str, np.ndarray]]
    update: Callable[[dict[str, np.ndarray]], float]


def main(c: Config) -> None:
    """Prints a table with a line for each mesh."""
    rc.emulate_devices(8)
    rows: list[list[str]] = []
    for name in c.meshes:
        modes = [make_mode(c, name, exact) for exact in (False, True)]
        data = [mode.roll_out() for mode in modes]
        off = [mode.update(batch) for mode, batch in zip(modes, data, strict=True)]
        rollout, update = measure(c, modes, data)
        tokens = int(data[1]["answer"].sum())
        times = [f"{x:.3f}" for x in (*rollout, *update)]
        rows.append([name, str(tokens), f"{off[0]:.1e}", f"{off[1]:.1e}", *times])
        print(markdown(HEAD, rows), flush=True)


def measure(
    c: Config, modes: list[Mode], data: list[dict[str, np.ndarray]]
) -> tuple[list[float], list[float]]:
    """Processor seconds of a rollout, and of the updates on it, of each mode."""
    rollouts: list[list[float]] = [[] for _ in modes]
    updates: list[list[float]] = [[] for _ in modes]
    for _ in range(c.rounds):
        for i, mode in enumerate(modes):
            rollouts[i].append(elapsed(mode.roll_out))
            updates[i].append(elapsed(lambda mode=mode, i=i: mode.update(data[i])))
    median = lambda times: [statistics.median(x) for x in times]
    return median(rollouts), median(updates)


def make_mode(c: Config, mesh_name: str, exact: bool) -> Mode:
    devices = None
    if mesh_name == "1":
        devices = jax.devices()[:1]
    mesh = rc.make_mesh(**mesh_sizes(mesh_name), devices=devices)
    sizes = LlamaConfig(c.vocab, c.width, c.layers, 4, 4, 3 * c.width, eos=(1,), pad=0)
    rng = np.random.default_rng(0)
    prompts = rng.integers(2, c.vocab, (c.prompts, c.prompt))
    real = np.arange(c.prompt) >= rng.integers(0, c.prompt, c.prompts)[:, None]
    real[:, -1] = True
    advantage = rng.normal(size=c.prompts).astype(np.float32)

    def loss_fn(model: PyTree, batch: PyTree, key: jax.Array) -> PyTree:
        new = rc.log_probabilities(model, batch["tokens"], mask=batch["real"], exact=exact)
        off = jnp.max(jnp.abs(jnp.where(batch["answer"], new - batch["old"], 0)))
        loss = losses.grpo(new, batch["old"], batch["advantage"], mask=batch["answer"])
        return loss, {"off": off}

    def roll_out() -> dict[str, np.ndarray]:
        answers = rc.generate(
            state.model,
            prompts,
            c.new,
            mask=real,
            key=jax.random.key(1),
            temperature=1.0,
            log_probabilities=True,
            exact=exact,
        )
        nothing = np.zeros((c.prompts, c.prompt - 1), np.float32)
        return {
            "tokens": np.concatenate([prompts, answers.tokens], axis=1).astype(np.int32),
            "real": np.concatenate([real, answers.mask], axis=1),
            "answer": np.concatenate([nothing.astype(bool), answers.mask], axis=1),
            "old": np.concatenate([nothing, answers.log_probabilities], axis=1),
            "advantage": advantage,
        }

    def part(data: dict[str, np.ndarray], number: int) -> dict[str, np.ndarray]:
        return {name: x[number :: c.minibatches] for name, x in data.items()}

    def update(data: dict[str, np.ndarray]) -> float:
        nonlocal state
        off = []
        for number in range(c.minibatches):
            state, metrics = step(state, part(data, number))
            off.append(metrics["off"])
        return max(map(float, off))

    columns, rows = c.prompt + c.new, c.prompts // c.minibatches
    shape = lambda *sizes, dtype: jax.ShapeDtypeStruct((rows, *sizes), dtype)
    batch = {
        "tokens": shape(columns, dtype=jnp.int32),
        "real": shape(columns, dtype=bool),
        "answer": shape(columns - 1, dtype=bool),
        "old": shape(columns - 1, dtype=jnp.float32),
        "advantage": shape(dtype=jnp.float32),
    }
    # Without a learning rate, all updates have the weights of the rollout.
    init_fn, key = lambda key: Llama(sizes, key=key), jax.random.key(0)
    state, step, _ = rc.prepare(init_fn, optax.sgd(0.0), loss_fn, batch, key=key, mesh=mesh)
    return Mode(roll_out, update)


if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    main(tyro.cli(Config))
