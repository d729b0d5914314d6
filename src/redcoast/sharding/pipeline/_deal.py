"""Divides rows into parts and microbatches and layers into stages, and joins them again."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ...distributed._mesh import PIPE
from ._row_states import SUM
from ._stages import Pipeline, Place


@dataclass(frozen=True)
class Deal:
    """How many stages, parts and microbatches there are, and what they are sharded over.

    `rows` below are the dimension that counts rows, before the array is divided.
    """

    pipeline: Pipeline
    mesh: Mesh | AbstractMesh
    batch_axes: tuple[str, ...]

    def staged(self, x: Any) -> Any:
        """Shards an array of `(stages, parts, ...)`."""
        return self._with_spec(x, PIPE, self.batch_axes, *[P.UNCONSTRAINED] * (x.ndim - 2))

    def _with_spec(self, x: Any, *entries: Any) -> Any:
        spec = P(*(None if entry == () else entry for entry in entries))
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, spec))

    def numbers(self, part: Any, at: Any) -> Any:
        """The numbers in the batch of the rows of microbatch `at` of a part."""
        of, count = self.pipeline, self.pipeline.microbatches
        each = of.rows // (of.parts * count)
        return (part * each + jnp.arange(each)) * count + at

    def constant(self, x: Any, rows: int | None, spec: P) -> Any:
        """An array for all layers, as `(stages, parts, ...)`."""
        if rows is None:
            return self._copies(jnp.broadcast_to(x[None], (self.pipeline.stages, *x.shape)), spec)
        x = self._divide(x, rows)
        return self.staged(jnp.broadcast_to(x[None], (self.pipeline.stages, *x.shape)))

    def layers(self, x: Any, rows: int | None, spec: P) -> Any:
        """A stack of layers, as `(stages, parts, layers, ...)`, or with microbatches as third."""
        stages = self.pipeline.stages
        x = jnp.reshape(x, (stages, x.shape[0] // stages, *x.shape[1:]))
        if rows is None:
            # Gradients are summed over the copies to the sharding of the parameters, which with
            # `fsdp` takes a reduce-scatter. A constraint without `fsdp` would take an all-reduce.
            x = self._with_spec(x, PIPE, *[P.UNCONSTRAINED] * (x.ndim - 1))
            return self._copies(x, (None, *spec))
        # (parts, microbatches, stages, ...)
        return self.staged(jnp.moveaxis(self._divide(x, rows + 1), 2, 0))

    def carry(self, x: Any, rows: Place) -> Any:
        """The microbatches of an array, as `(microbatches, parts, ...)`."""
        count, parts = self.pipeline.microbatches, self.pipeline.parts
        if rows is SUM:  # the first microbatch of the first part adds to what was there before
            return jnp.zeros((count, parts, *x.shape), x.dtype).at[0, 0].set(x)
        if rows is None:
            return jnp.broadcast_to(x, (count, parts, *x.shape))
        x = jnp.swapaxes(self._divide(x, rows), 0, 1)
        return self._with_spec(x, None, self.batch_axes, *[P.UNCONSTRAINED] * (x.ndim - 2))

    def collect(self, x: Any, rows: Place) -> Any:
        """The carry after the last stage, of `(ticks, stages, parts, ...)`."""
        x = x[self.pipeline.stages - 1 :]
        # A masked sum becomes one all-reduce. A slice is sent to the first stage before.
        stage = jax.lax.broadcasted_iota(jnp.int32, x.shape, 1)
        alone = jnp.where(stage == x.shape[1] - 1, x, jnp.zeros((), x.dtype))
        x = jnp.any(alone, 1) if x.dtype == bool else jnp.sum(alone, 1, dtype=x.dtype)
        if rows is SUM:
            return jnp.sum(x, (0, 1), dtype=x.dtype)
        return x[-1, 0] if rows is None else self._join(jnp.swapaxes(x, 0, 1), rows)

    def stacked(self, x: Any, rows: Place) -> Any:
        """The results of all layers, of `(ticks, stages, parts, layers, ...)`."""
        # A microbatch is at a stage as many ticks after the first one as the stage's number.
        count, stages = self.pipeline.microbatches, self.pipeline.stages
        own = lambda x, stage: jax.lax.dynamic_slice_in_dim(x, stage, count, 0)
        x = jax.vmap(own, in_axes=(1, 0), spmd_axis_name=PIPE)(x, jnp.arange(stages))
        if rows is SUM:
            x = jnp.sum(x, (1, 2), dtype=x.dtype)
        elif rows is None:
            x = x[:, 0, 0]
        else:  # (parts, microbatches, stages, layers, ...)
            x = self._join(jnp.moveaxis(x, (2, 1), (0, 1)), rows + 1)
        return jnp.reshape(x, (-1, *x.shape[2:]))

    def _copies(self, x: Any, spec: Iterable[Any]) -> Any:
        """A copy of an array of stages for each part of the batch."""
        copies = jnp.broadcast_to(x[:, None], (x.shape[0], self.pipeline.parts, *x.shape[1:]))
        return self._with_spec(copies, PIPE, self.batch_axes, *spec)

    def _divide(self, x: Any, d: int) -> Any:
        """Moves the rows of dimension `d` to `(parts, microbatches, ..., rows, ...)`."""
        parts, count = self.pipeline.parts, self.pipeline.microbatches
        each = x.shape[d] // (parts * count)
        # Each part keeps its rows: those of a microbatch are as far apart as there are of these.
        shape = (*x.shape[:d], parts, each, count, *x.shape[d + 1 :])
        return jnp.moveaxis(jnp.reshape(x, shape), (d, d + 2), (0, 1))

    def _join(self, x: Any, d: int) -> Any:
        """The inverse of `_divide`."""
        x = jnp.moveaxis(x, (0, 1), (d, d + 2))
        return jnp.reshape(x, (*x.shape[:d], -1, *x.shape[d + 3 :]))
