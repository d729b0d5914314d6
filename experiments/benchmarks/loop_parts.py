"""What the parts of `fit` add to the time of a short step.

    python experiments/benchmarks/loop_parts.py

Each row is the loop of the row above it with one more part of `fit`, except for those that leave
something out of the row of `train_step`. All train the small MLP of
`loop.py` on one device, and take turns. The times are those of the processor: of the thread that
trains, and of all threads.
"""

import functools as ft
import itertools as it
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from _complete import complete
from _pages import Printed
from jaxtyping import PyTree
from loop import CASES, OPTIMIZER, collate_fn, loss_fn, make_examples

import redcoast as rc
from redcoast.tracking._metrics import pack_metrics

SIZE = CASES[0].batch_size
STEP = ft.partial(rc.train_step, loss_fn=loss_fn, optimizer=OPTIMIZER)
LOG: Any = [rc.progress_logger(False), lambda metrics, step: None]
Seconds = tuple[float, float]
Loop = Callable[[Any, list[Any], int], Iterator[Any]]


def collated(examples: list[Any], steps: int) -> Iterator[Any]:
    """Batches made by hand."""
    order = np.random.default_rng(0).permutation(len(examples))
    for i in range(steps):
        rows = order[np.arange(i * SIZE, (i + 1) * SIZE) % len(order)]
        yield collate_fn([examples[j] for j in rows])


def bare(model: PyTree, examples: list[Any], steps: int) -> Iterator[Any]:
    params, static = eqx.partition(model, eqx.is_array)

    def step(state: PyTree, batch: PyTree) -> PyTree:
        params, opt_state = state
        loss_of = lambda params: loss_fn(eqx.combine(params, static), batch, None)
        loss, gradient = jax.value_and_grad(loss_of)(params)
        updates, opt_state = OPTIMIZER.update(gradient, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    yield from jitted(step, (params, OPTIMIZER.init(params)), examples, steps)


def guarded(model: PyTree, examples: list[Any], steps: int) -> Iterator[Any]:
    arrays, static = eqx.partition(init(model), eqx.is_array)

    def step(arrays: PyTree, batch: PyTree) -> PyTree:
        state, metrics = pack_metrics(STEP)(eqx.combine(arrays, static), batch)
        return eqx.filter(state, eqx.is_array), metrics.values

    yield from jitted(step, arrays, examples, steps)


def lacking(norm: bool, guard: bool, *args: Any) -> Iterator[Any]:
    """`guarded`, with or without the norm of the gradient, and the guard against NaN."""
    parts: dict[str, Any] = {"global_norm": lambda grads: jnp.ones(())} if not norm else {}
    if not guard:
        parts["_select"] = lambda finite, new, old: new
        parts["guarded_update"] = lambda update, grads, state, finite: update(grads, state)
    with mock.patch.multiple("redcoast.train._step", **parts):
        yield from guarded(*args)


def jitted(step: Any, state: PyTree, examples: list[Any], steps: int) -> Iterator[Any]:
    step = jax.jit(step, donate_argnums=0)
    for batch in collated(examples, steps):
        state, value = step(state, batch)
        yield value


def init(model: PyTree) -> PyTree:
    return rc.init_state(lambda _: model, OPTIMIZER, key=jax.random.key(0))


def compiled(model: PyTree, examples: list[Any], steps: int) -> Iterator[Any]:
    state, step = state_and_step(model)
    for batch in collated(examples, steps):
        state, metrics = step(state, batch)
        yield metrics.values


def state_and_step(model: PyTree) -> tuple[Any, Any]:
    state = init(model)
    mesh = rc.make_mesh(devices=jax.devices()[:1])
    return state, rc.compile_step(pack_metrics(STEP), rc.infer_shardings(state, mesh))


def batched(model: PyTree, examples: list[Any], steps: int) -> Iterator[Any]:
    state, step = state_and_step(model)
    for done in rc.training_steps(state, batches(examples, steps), step):
        yield done.metrics.values


def batches(examples: list[Any], steps: int) -> Any:
    mesh = rc.make_mesh(devices=jax.devices()[:1])
    options: Any = {"batch_size": SIZE, "steps": steps, "mesh": mesh}
    return rc.batches(examples, collate_fn, key=jax.random.key(0), **options)


def read(model: PyTree, examples: list[Any], steps: int) -> Iterator[Any]:
    state, step = state_and_step(model)
    with rc.metrics_reader(LOG) as reader:
        for done in rc.training_steps(state, batches(examples, steps), step):
            reader.push(done.number, done.metrics)
            yield done.metrics.values


ROWS: dict[str, Loop] = {
    "by hand": bare,
    "`train_step`: norm of the gradient, NaN skipped": guarded,
    "the same without the norm": ft.partial(lacking, False, True),
    "the same without the guard": ft.partial(lacking, True, False),
    "the same without both": ft.partial(lacking, False, False),
    "`compile_step`: checks, state as a tree": compiled,
    "`batches`: shuffled and resumable": batched,
    "`metrics_reader`: each loss read and logged": read,
}


def timed(loop: Loop, model: PyTree, examples: list[Any], steps: int, warm_up: int = 20) -> Seconds:
    """Seconds of a step, of this thread and of all."""
    running = loop(jax.tree.map(lambda x: x, model), examples, steps + warm_up)
    jax.block_until_ready(list(it.islice(running, warm_up))[-1])
    begin, last = clocks(), None
    for value in running:
        last = value
    jax.block_until_ready(last)
    return between(begin, clocks(), steps)


def timed_fit(
    steps_per_call: int | None, model: PyTree, examples: list[Any], steps: int, warm_up: int = 64
) -> Seconds:
    times: list[Seconds] = []
    state = rc.fit(
        model,
        OPTIMIZER,
        examples,
        collate_fn=collate_fn,
        loss_fn=loss_fn,
        batch_size=SIZE,
        steps=steps + warm_up,
        mesh=rc.make_mesh(devices=jax.devices()[:1]),
        steps_per_call=steps_per_call,
        log=[rc.progress_logger(False), lambda metrics, step: times.append(clocks())],
    )
    complete(state, steps + warm_up)
    return between(times[warm_up - 1], times[-1], steps)


def clocks() -> Seconds:
    return time.thread_time(), time.process_time()


def between(begin: Seconds, end: Seconds, steps: int) -> Seconds:
    return (end[0] - begin[0]) / steps, (end[1] - begin[1]) / steps


def main(steps: int = 1000, turns: int = 7, page: Path | None = None) -> None:
    """Prints a table.

    Args:
        steps: The number of steps in a turn.
        turns: The number of turns; medians are printed.
        page: A page of `docs/measured/` to write the table into.
    """
    examples, case = make_examples(), CASES[0]
    model = eqx.nn.MLP(32, 10, case.width, case.depth, key=jax.random.key(0))
    copied = lambda: jax.tree.map(lambda x: x.copy() if eqx.is_array(x) else x, model)
    run: dict[str, Any] = {name: ft.partial(timed, loop) for name, loop in ROWS.items()}
    run["`fit`, `steps_per_call=1`"] = ft.partial(timed_fit, 1)
    run["`fit`: several steps in a call"] = ft.partial(timed_fit, None)
    times: dict[str, list[Seconds]] = {name: [] for name in run}
    for _ in range(turns):
        for name, measure in run.items():
            times[name].append(measure(copied(), examples, steps))
    table = Printed()
    table.add("| loop | us of its thread | us of all threads | speed by all threads |")
    table.add("| --- | ---: | ---: | ---: |")
    first = [total for _, total in times["by hand"]]
    for name, pairs in times.items():
        own, total = (1e6 * statistics.median(column) for column in zip(*pairs, strict=True))
        ratio = statistics.median(x / y for x, (_, y) in zip(first, pairs, strict=True))
        table.add(f"| {name} | {own:.0f} | {total:.0f} | {ratio:.2f} |")
    table.write(page, "loop_parts")


if __name__ == "__main__":
    tyro.cli(main)
