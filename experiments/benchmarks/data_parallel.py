"""The cost of the parts of a step of GPT-2 on eight emulated devices, each changed alone.

    nox -s bench_redco  # once, for its environment
    .nox/bench_redco/bin/python experiments/benchmarks/data_parallel.py

The rows are programs on the mesh data=8, of the sizes in `trainers.py`, and take turns in one
process. The last column is their processor time divided by that of the first, a hand-written step
of the Flax model of transformers 4.57. Needs the packages of `trainers.py`.
"""

import dataclasses
import re
import statistics
import time
from collections import Counter
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from _pages import Printed, number
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import PyTree
from rivals import RATE, VOCAB, flax_model
from step import OURS, deepen
from trainers import loss_fn, with_fit, with_redco

import redcoast as rc
from redcoast.models._by_layer import by_layer

COUNTED = ("all-reduce", "dot", "fusion", "copy", "custom-call", "scatter", "while")
OPTIMIZER = optax.adamw(RATE)


def main(
    layers: int = 4,
    batch_size: int = 16,
    seq: int = 128,
    turns: int = 7,
    page: Path | None = None,
) -> None:
    """Prints a table.

    Args:
        layers: The number of layers.
        batch_size: The number of sequences in a batch, over all devices.
        seq: The sequence length in tokens.
        turns: The number of turns of each program, of four steps.
        page: A page of `docs/measured/` to write the table into.
    """
    rc.emulate_devices(8)
    rows = np.random.default_rng(0).integers(3, VOCAB, (batch_size * 4, seq), np.int32)
    config = deepen(OURS["gpt2"], layers)
    model = rc.models.GPT2(config, key=jax.random.key(0))
    looped = dataclasses.replace(config, unroll=1)
    scanned = rc.models.GPT2(looped, key=jax.random.key(0))
    theirs = flax_model("gpt2", layers)
    logits_of = lambda params, tokens: theirs(tokens, params=params).logits
    ours = lambda model, tokens: model(tokens)
    data = list(rows), batch_size
    apart = jax.tree.map(jnp.copy, by_layer(model))
    programs = {
        "Flax, by hand": by_hand(theirs.params, logits_of, *data),
        "redcoast, by hand": by_hand(model, ours, *data),
        "redcoast, by hand, an array for each layer": by_hand(apart, ours, *data),
        "redcoast, by hand, layers scanned": by_hand(scanned, ours, *data),
        "redcoast, `train_step`, which skips NaN": with_step(model, *data),
        "redcoast, `train_step`, updated in parts": with_step(model, *data, in_parts=True),
        "Redco's trainer": (with_redco("gpt2", layers, 1, *data), "", None),
        "redcoast, `fit`": (with_fit("gpt2", layers, "data=8", *data), "", None),
    }
    times = {name: [] for name in programs}
    for _ in range(turns + 1):
        for name, (turn, _, _) in programs.items():
            times[name].append(turn())
    table = Printed()
    table.add(
        "| program | " + " | ".join(COUNTED) + " | MB of temporaries | ratio | least and most |"
    )
    table.add("| --- " + "| ---: " * (len(COUNTED) + 3) + "|")
    for name, (_, text, size) in programs.items():
        counts = Counter(re.findall(r" ([a-z\-]+)\(", text))
        cells = [str(counts[x]) if text else "" for x in COUNTED]
        if size is not None:
            size /= 1e6
        cells.append(number(size, ".0f", missing=""))
        pairs = zip(times[name][1:], times["Flax, by hand"][1:], strict=True)
        ratios = [x / y for x, y in pairs]  # the first turn compiles
        ends = f"{min(ratios):.2f} {max(ratios):.2f}"
        table.add(f"| {name} | {' | '.join(cells)} | {statistics.median(ratios):.2f} | {ends} |")
    table.write(page, "data_parallel")


def by_hand(model: PyTree, logits_of: Any, rows: list[Any], size: int) -> tuple[Any, str, int]:
    """A jitted AdamW step of arrays that all devices hold."""
    params, static = eqx.partition(model, eqx.is_inexact_array)

    def step(state: PyTree, tokens: jax.Array) -> PyTree:
        params, opt_state = state
        loss_of = lambda params: rc.losses.cross_entropy(
            logits_of(eqx.combine(params, static), tokens), tokens
        )
        loss, gradient = jax.value_and_grad(loss_of)(params)
        updates, opt_state = OPTIMIZER.update(gradient, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    return compiled(step, (params, OPTIMIZER.init(params)), rows, size)


def with_step(
    model: PyTree, rows: list[Any], size: int, *, in_parts: bool = False
) -> tuple[Any, str, int]:
    """`redcoast.train_step`, compiled in the same way, or with the shardings of its plan."""
    key = jax.random.key(0)
    state = rc.init_state(lambda _: model, OPTIMIZER, key=key)
    shardings: Any = NamedSharding(rc.make_mesh(data=8), P())
    if in_parts:
        batch = np.stack(rows[:size])
        shardings = rc.plan_step(state, loss_fn, batch, shardings.mesh).shardings
    arrays, static = eqx.partition(state, eqx.is_array)

    def step(arrays: PyTree, tokens: jax.Array) -> PyTree:
        state = eqx.combine(arrays, static)
        state, metrics = rc.train_step(state, tokens, loss_fn=loss_fn, optimizer=OPTIMIZER)
        return eqx.filter(state, eqx.is_array), metrics

    return compiled(step, arrays, rows, size, shardings)


def compiled(
    step: Any, state: PyTree, rows: list[Any], size: int, shardings: PyTree = None
) -> tuple[Any, str, int]:
    """The processor time of a turn, the text of the program, and its bytes of temporaries.

    With `shardings`, the new state has those of the state; by default, all devices hold it.
    """
    mesh = rc.make_mesh(data=8)
    shardings = shardings or NamedSharding(mesh, P())
    state = jax.device_put(jax.tree.map(jnp.copy, state), shardings)
    place = lambda i: jax.device_put(
        np.stack(rows[i * size : (i + 1) * size]), NamedSharding(mesh, P("data"))
    )
    batches = [place(i) for i in range(len(rows) // size)]
    jitted = jax.jit(step, donate_argnums=0, out_shardings=(shardings, None))
    program = jitted.lower(state, batches[0]).compile()

    def turn() -> float:
        nonlocal state
        begin = time.process_time()
        for batch in batches:
            state, _ = program(state, batch)
        jax.block_until_ready(state)
        return time.process_time() - begin

    memory = program.memory_analysis()
    return turn, program.as_text() or "", memory.temp_size_in_bytes if memory else 0


if __name__ == "__main__":
    tyro.cli(main)
