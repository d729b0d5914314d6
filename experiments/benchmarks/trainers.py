"""The processor time of training steps on eight emulated devices, compared with Redco's trainer.

    nox -s bench_redco

`rc.fit` and `redco.Trainer` train models of the same size, in float32 with AdamW, and take turns in
one process. Each turn is a later call, which compiles nothing, of a few steps and of more: the
difference is the time of steps alone, without the start and the end of a call, in which `fit`
traces the loss again. A ratio above 1 means that redcoast takes longer. Needs redco, and flax and
transformers in the versions of `step.py`.
"""

# pyright: reportMissingImports=false

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import optax
import redco
import tyro
from _complete import complete
from jaxtyping import PyTree
from rivals import VOCAB, flax_model
from step import OURS, deepen

import redcoast as rc

# Model shards of Redco, and the mesh here.
MESHES = {"data=8": 1, "data=2,model=4": 4}


def main(
    families: tuple[str, ...] = ("gpt2", "llama"),
    layers: int = 4,
    batch_size: int = 16,
    seq: int = 128,
    steps: int = 4,
    more: int = 8,
    turns: int = 5,
    meshes: tuple[str, ...] = ("data=8", "data=2,model=4"),
) -> None:
    """Prints a table of ratios.

    Args:
        families: The families of models to compare; no encoder-decoders.
        layers: The number of layers.
        batch_size: The number of sequences in a batch, over all devices.
        seq: The sequence length in tokens.
        steps: The number of steps in a short turn.
        more: The number of steps that a long turn has more.
        turns: The number of turns of each.
        meshes: The meshes, of which Redco has those with `data` and `model`.
    """
    rc.emulate_devices(8)
    count = batch_size * (steps + more)
    rows = list(np.random.default_rng(0).integers(3, VOCAB, (count, seq), np.int32))
    short = batch_size * steps
    print("| family | mesh | a call | least and most | steps alone | least and most |")
    print("| --- | --- | ---: | ---: | ---: | ---: |")
    for family in families:
        for mesh in meshes:
            shards = MESHES[mesh]
            if batch_size * shards % 8:  # Redco gives each data-parallel device whole sequences
                continue
            ours = with_fit(family, layers, mesh, rows, batch_size)
            theirs = with_redco(family, layers, shards, rows, batch_size)
            of_call: list[float] = []
            of_steps: list[float] = []
            for turn in range(turns + 1):
                before = ours(short), theirs(short)
                after = ours(count), theirs(count)
                if turn:  # the first turn compiles
                    of_call.append(before[0] / before[1])
                    of_steps.append((after[0] - before[0]) / (after[1] - before[1]))
            print(f"| {family} | {mesh} | {cells(of_call)} | {cells(of_steps)} |", flush=True)


def cells(ratios: list[float]) -> str:
    """The median, and the least and the most."""
    return f"{statistics.median(ratios):.2f} | {min(ratios):.2f} {max(ratios):.2f}"


def with_fit(
    family: str, layers: int, mesh: str, rows: list[Any], batch_size: int
) -> Callable[..., float]:
    """A function that trains for an epoch of the first rows and returns the processor time."""
    config = deepen(OURS[family], layers)
    model = getattr(rc.models, type(config).__name__.removesuffix("Config"))
    sizes: dict[str, Any] = {
        name: int(size) for name, size in (part.split("=") for part in mesh.split(","))
    }
    options: dict[str, Any] = {"collate_fn": np.stack, "loss_fn": loss_fn, "log": False}
    options |= {"batch_size": batch_size, "mesh": rc.make_mesh(**sizes)}
    optimizer = optax.adamw(1e-4)
    state: Any = lambda key: model(config, key=key)

    def epoch(count: int = len(rows)) -> float:
        nonlocal state
        steps = count // batch_size + (0 if callable(state) else int(state.step))
        begin = time.process_time()
        state = rc.fit(state, optimizer, rows[:count], steps=steps, **options)
        complete(state, steps)
        return time.process_time() - begin

    return epoch


def loss_fn(model: PyTree, batch: PyTree, key: Any) -> PyTree:
    return rc.losses.cross_entropy(model(batch), batch)


def with_redco(
    family: str, layers: int, shards: int, rows: list[Any], batch_size: int
) -> Callable[..., float]:
    """The same with `redco.Trainer`."""
    model = flax_model(family, layers)

    def their_loss(
        rng: Any, state: PyTree, params: PyTree, batch: PyTree, is_training: bool
    ) -> Any:
        logits = state.apply_fn(input_ids=batch["tokens"], params=params, train=False).logits
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["tokens"]).mean()

    deployer = redco.Deployer(jax_seed=0, n_model_shards=shards, verbose=False)
    rules = deployer.get_sharding_rules(params_shape_or_params=model.params)
    trainer = redco.Trainer(
        deployer=deployer,
        collate_fn=lambda examples: {"tokens": np.stack(examples)},
        apply_fn=model,
        loss_fn=their_loss,
        params=model.params,
        optimizer=optax.adamw(1e-4),
        params_sharding_rules=rules,
    )

    def epoch(count: int = len(rows)) -> float:
        begin = time.process_time()
        trainer.train(rows[:count], per_device_batch_size=batch_size * shards // 8)
        assert trainer.step  # waits for the last step
        return time.process_time() - begin

    return epoch


if __name__ == "__main__":
    tyro.cli(main)
