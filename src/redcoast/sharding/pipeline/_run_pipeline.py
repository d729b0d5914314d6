"""Runs a scan over layers as a pipeline.

The stages are the first dimension of all arrays, which is split over `pipe` (arXiv:2105.04663,
section 3.3). In each tick, every stage runs its layers on one microbatch. Then the rows move on by
one stage. Each shard of the batch has its own copy of the weights as a second dimension: gradients
are then summed over shards once, and not in every tick.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import cast

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Int

from ...core._jaxpr import is_inexact
from ...distributed._mesh import PIPE
from ._row_rules import ROW_SUM
from ._stages import LayerRows, Pipeline, PipelinedScan

Arrays = list[Array]
# `layer(inputs, rows)` returns the results of one layer; `rows` are the numbers of its rows.
Layer = Callable[[Sequence[Array], Array], Arrays]
# `run(carry, microbatches)` of all stages returns the carry and the stacked results of layers.
Stages = Callable[[Arrays, Array], tuple[Arrays, Arrays]]
KeyTypes = Sequence[object]  # the generator of each array of PRNG keys, None for other arrays


@dataclass(frozen=True)
class PipelineLayout:
    """Divides rows into shards and microbatches and layers into stages, and joins them again.

    `rows` below are the dimension that counts rows, before the array is divided.
    """

    pipeline: Pipeline
    mesh: Mesh | AbstractMesh
    batch_axes: tuple[str, ...]

    def staged(self, x: Array) -> Array:
        """Shards an array of `(stages, shards, ...)`."""
        return self._with_spec(x, PIPE, self.batch_axes, *[P.UNCONSTRAINED] * (x.ndim - 2))

    def _with_spec(self, x: Array, *entries: object) -> Array:
        # A batch that is split over no axes has the entry `()`.
        spec = P(*(entry or None for entry in entries))
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, spec))

    def row_numbers(self, shard: Array, microbatch: Array) -> Int[Array, " rows"]:
        """The numbers in the batch of the rows that a shard has of a microbatch."""
        shards, count = self.pipeline.shards, self.pipeline.microbatches
        rows = self.pipeline.rows // (shards * count)
        return (shard * rows + jnp.arange(rows)) * count + microbatch

    def constant(self, x: Array, rows: int | None, spec: P) -> Array:
        """An array for all layers, as `(stages, shards, ...)`."""
        stages = self.pipeline.stages
        if rows is None:
            return self._copies(_repeat(x, stages), spec)
        return self.staged(_repeat(self._divide(x, rows), stages))

    def layers(self, x: Array, rows: int | None, spec: P) -> Array:
        """A stack of layers, as `(stages, shards, layers, ...)`, or with microbatches as third."""
        stages = self.pipeline.stages
        x = jnp.reshape(x, (stages, x.shape[0] // stages, *x.shape[1:]))
        if rows is None:
            # Gradients are summed over the copies to the sharding of the parameters, which with
            # `fsdp` takes a reduce-scatter. A constraint without `fsdp` would take an all-reduce.
            x = self._with_spec(x, PIPE, *[P.UNCONSTRAINED] * (x.ndim - 1))
            return self._copies(x, (None, *spec))
        x = self._divide(x, rows + 1)  # (shards, microbatches, stages, layers, ...)
        return self.staged(jnp.moveaxis(x, 2, 0))

    def carry(self, x: Array, rows: LayerRows) -> Array:
        """The microbatches of an array, as `(microbatches, shards, ...)`."""
        count, shards = self.pipeline.microbatches, self.pipeline.shards
        if rows is ROW_SUM:  # the first microbatch of the first shard adds to what was there before
            return jnp.zeros((count, shards, *x.shape), x.dtype).at[0, 0].set(x)
        if rows is None:
            return jnp.broadcast_to(x, (count, shards, *x.shape))
        x = jnp.swapaxes(self._divide(x, rows), 0, 1)
        return self._with_spec(x, None, self.batch_axes, *[P.UNCONSTRAINED] * (x.ndim - 2))

    def collect(self, x: Array, rows: LayerRows) -> Array:
        """The carry after the last stage, of `(ticks, stages, shards, ...)`."""
        x = x[self.pipeline.stages - 1 :]  # (microbatches, stages, shards, ...)
        # A masked sum becomes one all-reduce. A slice is sent to the first stage before.
        stage = jax.lax.broadcasted_iota(jnp.int32, x.shape, 1)
        x = jnp.where(stage == x.shape[1] - 1, x, jnp.zeros((), x.dtype))
        if x.dtype == bool:
            x = jnp.any(x, 1)
        else:
            x = jnp.sum(x, 1, dtype=x.dtype)
        # (microbatches, shards, ...)
        if rows is ROW_SUM:
            return jnp.sum(x, (0, 1), dtype=x.dtype)
        if rows is None:
            return x[-1, 0]
        return self._join(jnp.swapaxes(x, 0, 1), rows)

    def stacked(self, x: Array, rows: LayerRows) -> Array:
        """The results of all layers, of `(ticks, stages, shards, layers, ...)`."""
        count, stages = self.pipeline.microbatches, self.pipeline.stages

        def ticks_of_stage(x: Array, stage: Array) -> Array:
            # The first microbatch is at stage `n` in tick `n`.
            return jax.lax.dynamic_slice_in_dim(x, stage, count, 0)

        of_stages = jax.vmap(ticks_of_stage, in_axes=(1, 0), spmd_axis_name=PIPE)
        x = of_stages(x, jnp.arange(stages))  # (stages, microbatches, shards, layers, ...)
        if rows is ROW_SUM:
            x = jnp.sum(x, (1, 2), dtype=x.dtype)
        elif rows is None:
            x = x[:, 0, 0]
        else:
            x = jnp.moveaxis(x, (2, 1), (0, 1))  # (shards, microbatches, stages, layers, ...)
            x = self._join(x, rows + 1)
        return jnp.reshape(x, (-1, *x.shape[2:]))  # (stages * layers, ...)

    def _copies(self, x: Array, spec: Iterable[object]) -> Array:
        """A copy of an array of stages for each shard of the batch."""
        copies = jnp.broadcast_to(x[:, None], (x.shape[0], self.pipeline.shards, *x.shape[1:]))
        return self._with_spec(copies, PIPE, self.batch_axes, *spec)

    def _divide(self, x: Array, d: int) -> Array:
        """Moves the rows of dimension `d` to `(shards, microbatches, ..., rows, ...)`."""
        shards, count = self.pipeline.shards, self.pipeline.microbatches
        rows = x.shape[d] // (shards * count)
        # A shard keeps its rows, of which every `count`-th is in the same microbatch.
        x = jnp.reshape(x, (*x.shape[:d], shards, rows, count, *x.shape[d + 1 :]))
        return jnp.moveaxis(x, (d, d + 2), (0, 1))

    def _join(self, x: Array, d: int) -> Array:
        """The inverse of `_divide`."""
        x = jnp.moveaxis(x, (0, 1), (d, d + 2))
        return jnp.reshape(x, (*x.shape[:d], -1, *x.shape[d + 3 :]))


def run_pipeline(
    scan: PipelinedScan, layout: PipelineLayout, operands: Arrays, layer: Layer, specs: Sequence[P]
) -> Arrays:
    """The results of a scan over layers.

    `specs` are the shardings of the inputs of one layer without those over the batch.
    """
    stages, count = layout.pipeline.stages, layout.pipeline.microbatches
    run = _run_stages(scan, layout, operands, layer, specs)
    _, carry_rows, _ = scan.loop.split(scan.inputs)
    _, carry, _ = scan.loop.split(operands)
    carry, key_types = _key_data(carry)
    microbatches = list(map(layout.carry, carry, carry_rows))

    def tick(buffer: Arrays, xs: Arrays) -> tuple[Arrays, tuple[Arrays, Arrays]]:
        time, *entering = xs
        inputs = [layout.staged(_enter(x, new)) for x, new in zip(buffer, entering, strict=True)]
        # In tick `t`, stage `n` has microbatch `t - n`, or waits for its first.
        of_stages = jnp.clip(time - jnp.arange(stages), 0, count - 1)
        carry, ys = run(inputs, of_stages)
        carry, ys = list(map(layout.staged, carry)), list(map(layout.staged, ys))
        return carry, (carry, ys)

    # What stages compute before their first microbatch is not used. It must be finite, since its
    # gradient is multiplied by zero, so the buffer is filled with a microbatch.
    buffer: Arrays = []
    entering = [jnp.arange(count + stages - 1)]
    for x in microbatches:
        first = jax.lax.stop_gradient(x[0])
        buffer.append(layout.staged(_repeat(first, stages)))
        entering.append(jnp.concatenate([x, _repeat(first, stages - 1)]))
    _, (carry, ys) = jax.lax.scan(tick, buffer, entering)
    carry_rows, y_rows = scan.outputs[: len(carry)], scan.outputs[len(carry) :]
    last = list(map(layout.collect, carry, carry_rows))
    return [*_as_keys(last, key_types), *map(layout.stacked, ys, y_rows)]


def _run_stages(
    scan: PipelinedScan, layout: PipelineLayout, operands: Arrays, layer: Layer, specs: Sequence[P]
) -> Stages:
    """A function `run(carry, microbatches)` of all stages at once, each on its microbatch."""
    # Only carries are sums.
    const_rows, _, x_rows = scan.loop.split(cast(tuple[int | None, ...], scan.inputs))
    const_specs, _, x_specs = scan.loop.split(specs)
    (consts, const_keys), (_, carry_keys), (xs, x_keys) = map(_key_data, scan.loop.split(operands))
    all_consts = list(consts)
    const_axes: list[int | None] = [None] * len(consts)  # for `jax.vmap`
    for i, (rows, spec) in enumerate(zip(const_rows, const_specs, strict=True)):
        # An array that all rows share needs copies only for its gradient.
        if rows is not None or is_inexact(consts[i]):
            all_consts[i], const_axes[i] = layout.constant(consts[i], rows, spec), 0
    all_layers = list(map(layout.layers, xs, x_rows, x_specs))
    length = scan.loop.length // layout.pipeline.stages
    unroll = min(scan.loop.unroll, length)

    def stage(
        consts: Arrays, layers: Arrays, carry: Arrays, microbatch: Array, shard: Array
    ) -> tuple[Arrays, Arrays]:
        consts = _as_keys(_of_microbatch(consts, const_rows, microbatch), const_keys)
        layers = _of_microbatch(layers, x_rows, microbatch)
        rows = layout.row_numbers(shard, microbatch)

        def body(carry: Arrays, xs: Arrays) -> tuple[Arrays, Arrays]:
            inputs = [*consts, *_as_keys(carry, carry_keys), *_as_keys(xs, x_keys)]
            results = layer(inputs, rows)
            carry, _ = _key_data(results[: len(carry)])
            return carry, results[len(carry) :]

        return jax.lax.scan(body, carry, layers, length=length, unroll=unroll)

    over = layout.batch_axes or None
    of_shards = jax.vmap(stage, in_axes=(const_axes, 0, 0, None, 0), spmd_axis_name=over)
    of_stages = jax.vmap(of_shards, in_axes=(const_axes, 0, 0, 0, None), spmd_axis_name=PIPE)
    shards = jnp.arange(layout.pipeline.shards)
    return lambda carry, at: of_stages(all_consts, all_layers, carry, at, shards)


def _of_microbatch(arrays: Arrays, rows: Sequence[int | None], microbatch: Array) -> Arrays:
    """One microbatch of the arrays that have rows, whose first dimension are microbatches."""
    selected = list(arrays)
    for i, dim in enumerate(rows):
        if dim is not None:
            selected[i] = jax.lax.dynamic_index_in_dim(arrays[i], microbatch, 0, keepdims=False)
    return selected


def _repeat(x: Array, times: int) -> Array:
    """Repeats an array along a new leading dimension."""
    return jnp.broadcast_to(x[None], (times, *x.shape))


def _enter(buffer: Array, entering: Array) -> Array:
    """Moves rows on by one stage; `entering` ones go to the first.

    `buffer` is `(stages, ...)`, and `entering` is `(...)`.
    """
    # This becomes a permute between neighbours, unlike a roll or a concatenation.
    zero = jnp.zeros((), buffer.dtype)
    moved = jax.lax.pad(buffer, zero, [(1, -1, 0), *[(0, 0, 0)] * (buffer.ndim - 1)])
    is_first = jax.lax.broadcasted_iota(jnp.int32, buffer.shape, 0) == 0
    return jnp.where(is_first, _repeat(entering, buffer.shape[0]), moved)


def _key_data(arrays: Sequence[Array]) -> tuple[Arrays, KeyTypes]:
    """Replaces PRNG keys by their data, since `lax.pad` takes none; also returns their types."""
    data = list(arrays)
    key_types: list[object] = [None] * len(data)
    for i, x in enumerate(arrays):
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            data[i], key_types[i] = jax.random.key_data(x), jax.random.key_impl(x)
    return data, key_types


def _as_keys(arrays: Sequence[Array], key_types: KeyTypes) -> Arrays:
    """The inverse of `_key_data`."""
    results = list(arrays)
    for i, key_type in enumerate(key_types):
        if key_type is not None:
            results[i] = jax.random.wrap_key_data(arrays[i], impl=key_type)
    return results
