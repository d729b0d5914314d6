"""The number of microbatches of a batch, also of a short last one."""

import functools as ft
from collections.abc import Callable

import jax
from jaxtyping import PyTree

from ..tracking._metrics import PackedMetrics
from ._compile import CompiledStep
from ._last_state import FlatState


def by_microbatches(
    compiled: Callable[[int], CompiledStep], batch_size: int, accumulate: int
) -> Callable[[PyTree, PyTree], tuple[FlatState, PackedMetrics]]:
    """The method `take` of `compiled(accumulate)`, with another number for a short last batch."""
    # A step for each number of microbatches, of which a run has at most two.
    compiled = ft.cache(compiled)

    def take(state: PyTree | FlatState, batch: PyTree) -> tuple[FlatState, PackedMetrics]:
        count = accumulate
        if accumulate > 1:
            rows = jax.tree.leaves(batch)[0].shape[0]
            count = microbatches(rows, batch_size=batch_size, accumulate=accumulate)
        return compiled(count).take(state, batch)

    return take


def microbatches(rows: int, *, batch_size: int, accumulate: int) -> int:
    """Returns the number of microbatches of a batch."""
    if rows == batch_size or accumulate == 1:
        return accumulate
    # A short last batch has microbatches that are no larger than those before. Their number must
    # not depend on the mesh, because the random keys of a step depend on it.
    least = -(-rows * accumulate // batch_size)
    # Microbatches of equal size, of which one row each always is a possibility.
    return next(k for k in range(least, rows + 1) if rows % k == 0)
