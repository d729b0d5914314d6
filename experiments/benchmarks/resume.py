"""The time to resume a run at step 10 million of 100 million examples.

The examples are a function of their index, like those of a memory map. The script measures the time
from the call of `rc.fit` to the end of the first step, minus the time of the same run from step 0,
which compiles the same programs. It also measures the memory that is allocated in that time.

    python experiments/benchmarks/resume.py
"""

import resource
import statistics
import time

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from _complete import complete
from jaxtyping import PyTree

import redcoast as rc


class Examples:
    """A hundred million examples that take no memory."""

    def __init__(self, count: int):
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> np.ndarray:
        return np.full(32, index % 7, np.float32)


def loss_fn(model: PyTree, batch: PyTree, key: jax.Array) -> jax.Array:
    return jnp.mean(jax.vmap(model)(batch) ** 2)


def seconds_to_first_step(step: int, examples: Examples, batch_size: int) -> float:
    """Seconds from the call of `fit` to the metrics of its first step."""
    model = lambda key: eqx.nn.MLP(32, 10, 64, 1, key=key)
    state = rc.init_state(model, optax.adamw(1e-3), key=jax.random.key(0))
    state = eqx.tree_at(lambda s: s.step, state, jnp.asarray(step, jnp.int32))
    times: list[float] = []
    begin = time.perf_counter()
    state = rc.fit(
        state,
        optax.adamw(1e-3),
        examples,
        collate_fn=np.stack,
        loss_fn=loss_fn,
        batch_size=batch_size,
        steps=step + 3,
        log=[rc.progress_logger(False), lambda metrics, step: times.append(time.perf_counter())],
    )
    complete(state, step + 3)
    return times[0] - begin


def peak_megabytes() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main(step: int = 10_000_000, count: int = 100_000_000, batch_size: int = 32) -> None:
    """Prints time and memory, and fails if they exceed 2 s or 50 MB.

    Args:
        step: The step to resume at.
        count: The number of examples.
        batch_size: The number of examples in a step.
    """
    examples = Examples(count)
    seconds_to_first_step(0, examples, batch_size)  # warms up imports and the first compilation
    fresh = statistics.median(seconds_to_first_step(0, examples, batch_size) for _ in range(5))
    before = peak_megabytes()
    late = statistics.median(seconds_to_first_step(step, examples, batch_size) for _ in range(5))
    grown = peak_megabytes() - before
    print(f"from step 0:           {fresh:.3f} s to the first step, compilation included")
    print(f"from step {step:,}:  {late:.3f} s, {late - fresh:+.3f} s")
    print(f"memory: {grown:.1f} MB more, for {count:,} examples")
    if late - fresh > 2.0 or grown > 50.0:
        raise SystemExit("Resuming costs more than 2 s or 50 MB.")


if __name__ == "__main__":
    tyro.cli(main)
