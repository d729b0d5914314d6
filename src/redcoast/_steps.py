"""The compiled steps of a run: one for each number of microbatches."""

import functools as ft
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, PyTree

from ._compile import CompiledStep, compile_step
from ._reading import VOTES
from ._sharding import Plan
from ._train import TrainState


def compiled_steps(
    step: Callable[..., Any],
    pack: Callable[[dict[str, Array]], Array],
    plan: Plan,
    split: Callable[[int], int],
) -> Callable[[int], CompiledStep]:
    """The compiled step for a number of examples; `pack` makes one array of its metrics."""

    @ft.cache
    def compiled(count: int) -> CompiledStep:
        def packed(state: TrainState, batch: PyTree, votes: Any) -> tuple[TrainState, Array]:
            state, metrics = step(state, batch, accumulate=count)
            counted = {} if votes is None else {VOTES: jnp.sum(votes)}
            return state, pack(metrics | counted)

        return compile_step(packed, plan.shardings)

    return lambda rows: compiled(split(rows))


def microbatches(rows: int, *, batch_size: int, accumulate: int) -> int:
    """Into how many microbatches a batch is split."""
    if rows == batch_size:
        return accumulate
    # A short last batch: microbatches no larger than those before, and, as all that a step
    # draws depends on them, as many on every mesh.
    least = -(-rows * accumulate // batch_size)
    return next(k for k in range(least, rows + 1) if rows % k == 0)
