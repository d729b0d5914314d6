"""The time of a step in `rc.fit` compared with a hand-written `jax.jit` loop.

Both loops train the same network on the same arrays, with the same collation and optimizer, on one
device. `fit` runs as it does by default, which takes several short steps in a call, and with
`steps_per_call=1`. They take turns, and the median ratio of their speeds is reported: 1 means that
`fit` has no overhead. The times are those of the processor, of all threads, so that other programs
on the machine do not count. The hand-written loop does not read metrics, save, or prefetch.

    python experiments/benchmarks/loop.py
"""

import dataclasses
import functools as ft
import operator
import resource
import statistics
import sys
import time
from collections.abc import Callable
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

import redcoast as rc
from redcoast.train import _one_thread

sys.path.append(str(Path(__file__).parents[1]))
from _cells import markdown
from jaxtyping import PyTree


@dataclasses.dataclass
class Case:
    name: str
    width: int
    depth: int
    batch_size: int
    steps: int
    target: float
    warm_up: int = 64  # steps, in which `fit` finds out how many it can take in a call


CASES = (
    Case("small MLP, 32-64-10", width=64, depth=1, batch_size=32, steps=3000, target=1.0),
    Case("a step of about 1 ms", width=256, depth=2, batch_size=128, steps=800, target=0.95),
    Case(
        "a step of about 40 ms",
        width=512,
        depth=5,
        batch_size=1024,
        steps=40,
        target=0.95,
        warm_up=8,
    ),
)
Clock = Callable[[], float]  # seconds
OPTIMIZER = optax.adamw(1e-3)


def make_examples(count: int = 20_000) -> list[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(count, 32)).astype(np.float32)
    y = rng.integers(0, 10, count).astype(np.int32)
    return list(zip(x, y, strict=True))


def collate_fn(examples: list[tuple[np.ndarray, np.ndarray]]) -> dict[str, np.ndarray]:
    return {"x": np.stack([x for x, _ in examples]), "y": np.array([y for _, y in examples])}


def loss_fn(model: PyTree, batch: PyTree, key: jax.Array | None) -> jax.Array:
    logits = jax.vmap(model)(batch["x"])
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]))


def hand_written(
    model: PyTree, examples: list[Any], case: Case, clock: Clock = time.process_time
) -> float:
    """Seconds of a step of a loop without a library."""
    params, static = eqx.partition(model, eqx.is_array)
    params = jax.tree.map(jnp.copy, params)
    opt_state = OPTIMIZER.init(params)

    @ft.partial(jax.jit, donate_argnums=(0, 1))
    def step(params: PyTree, opt_state: PyTree, batch: PyTree) -> PyTree:
        loss = lambda p: loss_fn(eqx.combine(p, static), batch, None)
        value, grads = jax.value_and_grad(loss)(params)
        updates, opt_state = OPTIMIZER.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    begin = 0.0
    order = np.random.default_rng(0).permutation(len(examples))
    for i in range(case.steps + case.warm_up):
        rows = order[np.arange(i * case.batch_size, (i + 1) * case.batch_size) % len(order)]
        batch = collate_fn([examples[j] for j in rows])
        params, opt_state, value = step(params, opt_state, batch)
        if i + 1 == case.warm_up:
            jax.block_until_ready(value)
            begin = clock()
    jax.block_until_ready(params)
    return (clock() - begin) / case.steps


def with_fit(
    model: PyTree,
    examples: list[Any],
    case: Case,
    clock: Clock = time.process_time,
    steps_per_call: int | None = None,
) -> float:
    """Seconds of a step of `rc.fit`, which also reads, checks and logs the metrics of each step."""
    times: list[float] = []
    state = rc.fit(
        model,
        OPTIMIZER,
        examples,
        collate_fn=collate_fn,
        loss_fn=loss_fn,
        batch_size=case.batch_size,
        steps=case.steps + case.warm_up,
        mesh=rc.make_mesh(devices=jax.devices()[:1]),
        steps_per_call=steps_per_call,
        log=[rc.progress_logger(False), lambda metrics, step: times.append(clock())],
    )
    complete(state, case.steps + case.warm_up)
    return (times[-1] - times[case.warm_up - 1]) / case.steps


def check_asynchronous() -> tuple[float, float]:
    """Milliseconds until a compiled step returns, and until the device has finished."""

    def slow(state: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        y = jax.lax.fori_loop(0, 300, lambda _, y: jnp.tanh(y @ y), x)
        return state + 1.0, jnp.sum(y)

    state = jnp.zeros(())
    mesh = rc.make_mesh(devices=jax.devices()[:1])
    step = rc.compile_step(slow, rc.infer_shardings(state, mesh))
    x = np.full((512, 512), 0.01, np.float32)
    state, total = step(state, x)
    jax.block_until_ready(total)
    begin = time.perf_counter()
    state, total = step(state, x)
    returned = time.perf_counter() - begin
    jax.block_until_ready(total)
    done = time.perf_counter() - begin
    assert returned < 0.1 * done, f"returned after {returned:.4f} s of {done:.4f} s"
    return 1e3 * returned, 1e3 * done


class Arrays(eqx.Module):
    """A state of arrays in a module, as a `TrainState` is."""

    arrays: tuple[jax.Array, ...]


def python_per_step(arrays: int = 57, blocks: int = 30, calls: int = 100) -> dict[str, float]:
    """Microseconds of this thread in a call of a compiled step, for states of three kinds.

    They take turns, and the least of all turns counts: everything else only adds to it.
    """
    mesh = rc.make_mesh(devices=jax.devices()[:1])
    step = lambda state, x: (jax.tree.map(lambda leaf: leaf + x, state), {})
    x = jnp.ones(())
    make = lambda: tuple(jnp.full((), float(i)) for i in range(arrays))
    states: dict[str, Any] = {"module": Arrays(make()), "tuple": make()}
    states["dict"] = {str(i): leaf for i, leaf in enumerate(make())}
    steps = {name: rc.compile_step(step, rc.infer_shardings(s, mesh)) for name, s in states.items()}
    least = dict.fromkeys(states, float("inf"))
    for _ in range(blocks):
        for name, compiled in steps.items():
            begin = time.thread_time()
            for _ in range(calls):
                states[name], _ = compiled(states[name], x)
            least[name] = min(least[name], (time.thread_time() - begin) / calls * 1e6)
            jax.block_until_ready(states[name])
    return least


def threads_per_step(calls: int = 300, rounds: int = 7) -> list[list[str]]:
    """Microseconds of all threads, and voluntary context switches, in a compiled step of the small
    MLP: with the updates in one thread, and as XLA's runtime schedules them. They take turns."""
    case = CASES[0]
    model = eqx.nn.MLP(32, 10, case.width, case.depth, key=jax.random.key(0))
    batch = jax.tree.map(jnp.asarray, collate_fn(make_examples(case.batch_size)))
    options = {"key": jax.random.key(0), "mesh": rc.make_mesh(devices=jax.devices()[:1])}
    # Another loss, so that no program is used for both.
    losses = {"in one thread": loss_fn, "as XLA schedules them": lambda *args: 1.0 * loss_fn(*args)}
    ready = {"in one thread": _one_thread.READY, "as XLA schedules them": sys.maxsize}
    steps, states = {}, {}
    for name, loss in losses.items():
        with mock.patch.object(_one_thread, "READY", ready[name]):
            states[name], steps[name], _ = rc.prepare(model, OPTIMIZER, loss, batch, **options)
            states[name], _ = steps[name](states[name], batch)
    spent: dict[str, list[tuple[float, float]]] = {name: [] for name in losses}
    for _ in range(rounds):
        for name, step in steps.items():
            before = resource.getrusage(resource.RUSAGE_SELF)
            begin = time.process_time()
            for _ in range(calls):
                states[name], _ = step(states[name], batch)
            jax.block_until_ready(states[name])
            seconds = time.process_time() - begin
            switches = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw - before.ru_nvcsw
            spent[name].append((1e6 * seconds / calls, switches / calls))
    lines: list[list[str]] = []
    for name, turns in spent.items():
        micros, switches = map(statistics.median, zip(*turns, strict=True))
        lines.append([name, f"{micros:.0f}", f"{switches:.2f}"])
    return lines


def main(repeats: int = 5, check: bool = True) -> None:
    """Prints a row for each case.

    Args:
        repeats: How often to run each loop; medians are compared.
        check: Whether to fail if a ratio is below its minimum.
    """
    examples = make_examples()
    failed: list[str] = []
    rows: list[list[str]] = []
    for case in CASES:
        model = eqx.nn.MLP(32, 10, case.width, case.depth, key=jax.random.key(0))
        seconds: dict[str, list[float]] = {"by hand": [], "fit": [], "alone": []}
        for _ in range(repeats):
            seconds["by hand"].append(hand_written(model, examples, case))
            seconds["fit"].append(with_fit(model, examples, case))
            seconds["alone"].append(with_fit(model, examples, case, steps_per_call=1))
        cells = [f"{1e3 * statistics.median(seconds['by hand']):.3f}"]
        for name in ("fit", "alone"):
            ratios = map(operator.truediv, seconds["by hand"], seconds[name])
            cells.append(f"{1e3 * statistics.median(seconds[name]):.3f}")
            cells.append(f"{statistics.median(ratios):.2f}")
        rows.append([case.name, *cells])
        if float(cells[2]) < case.target:
            failed.append(case.name)
    head = ["model", "by hand, ms", "`fit`, ms", "speed", "`steps_per_call=1`, ms", "speed"]
    print(markdown(head, rows))
    returned, done = check_asynchronous()
    print(f"compile_step: a call returned after {returned:.2f} ms of {done:.1f} ms")
    kinds = python_per_step()
    print("57 arrays, a call: " + ", ".join(f"{name} {x:.0f} us" for name, x in kinds.items()))
    head = ["updates of the small MLP", "all threads, us", "voluntary context switches"]
    print(markdown(head, threads_per_step()))
    if check and failed:
        raise SystemExit(f"Below the minimum ratio: {', '.join(failed)}")


if __name__ == "__main__":
    tyro.cli(main)
