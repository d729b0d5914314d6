"""Runs a scan over layers as a pipeline.

The stages are the first dimension of all arrays, which is split over `pipe` (arXiv:2105.04663,
section 3.3). In each tick, every stage runs its layers on one microbatch. Then the rows move on by
one stage. Each part of the batch has its own copy of the weights as a second dimension: gradients
are then summed over parts once, and not in every tick.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ...distributed._mesh import PIPE
from ._row_states import SUM
from ._stages import Pipeline, Pipelined, Place

# `layer(inputs, rows)` returns the results of one layer; `rows` are the numbers of its rows.
Layer = Callable[[Sequence[Any], Any], list[Any]]
Arrays = list[Any]


@dataclass(frozen=True)
class Deal:
    """Divides rows into parts and microbatches and layers into stages, and joins them again.

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
        x = x if rows is None else self._divide(x, rows)
        x = jnp.broadcast_to(x[None], (self.pipeline.stages, *x.shape))
        return self._copies(x, spec) if rows is None else self.staged(x)

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


def run_pipeline(
    scan: Pipelined, deal: Deal, operands: Sequence[Any], layer: Layer, specs: Sequence[P]
) -> Arrays:
    """The results of a scan over layers.

    `specs` are the shardings of the inputs of one layer without those over the batch.
    """
    _, carry_rows, _ = scan.loop.split(scan.inputs)
    _, carry, _ = scan.loop.split(operands)
    run = _run_stages(scan, deal, operands, layer, specs)
    stages, count = deal.pipeline.stages, deal.pipeline.microbatches
    carry, keys = _key_data(carry)
    fresh = list(map(deal.carry, carry, carry_rows))

    def tick(buffer: Arrays, given: Arrays) -> tuple[Arrays, Any]:
        time, *fresh = given
        states = [deal.staged(_enter(x, new)) for x, new in zip(buffer, fresh, strict=True)]
        at = jnp.clip(time - jnp.arange(stages), 0, count - 1)
        found, ys = run(states, at)
        found, ys = list(map(deal.staged, found)), list(map(deal.staged, ys))
        return found, (found, ys)

    # What stages compute before their first microbatch is not used. It must be finite, since its
    # gradient is multiplied by zero, so the buffer is filled with a microbatch.
    first = [jax.lax.stop_gradient(x[0]) for x in fresh]
    repeated = lambda x, times: jnp.broadcast_to(x[None], (times, *x.shape))
    buffer = [deal.staged(repeated(x, stages)) for x in first]
    pairs = zip(fresh, first, strict=True)
    filled = [jnp.concatenate([x, repeated(one, stages - 1)]) for x, one in pairs]
    _, (out, ys) = jax.lax.scan(tick, buffer, [jnp.arange(count + stages - 1), *filled])
    out_rows, y_rows = scan.outputs[: len(carry)], scan.outputs[len(carry) :]
    last = list(map(deal.collect, out, out_rows))
    return [*_as_keys(last, keys), *map(deal.stacked, ys, y_rows)]


def _run_stages(
    scan: Pipelined, deal: Deal, operands: Sequence[Any], layer: Layer, specs: Sequence[P]
) -> Callable[[Arrays, Any], tuple[Arrays, Arrays]]:
    """A function `run(carry, at)` of all stages at once; `at` are their microbatches."""
    # Only carries are sums.
    const_rows, _, x_rows = scan.loop.split(cast(tuple[int | None, ...], scan.inputs))
    const_specs, _, x_specs = scan.loop.split(specs)
    parts = [_key_data(arrays) for arrays in scan.loop.split(operands)]
    (consts, const_keys), (_, keys), (xs, x_keys) = parts
    # An array that all rows share needs copies only for its gradient.
    pairs = zip(consts, const_rows, strict=True)
    shared = [rows is None and not jnp.issubdtype(x.dtype, jnp.inexact) for x, rows in pairs]
    each = zip(consts, const_rows, const_specs, shared, strict=True)
    consts = [x if one else deal.constant(x, rows, spec) for x, rows, spec, one in each]
    xs = list(map(deal.layers, xs, x_rows, x_specs))
    length = scan.loop.length // deal.pipeline.stages
    unroll = min(scan.loop.unroll, length)
    take = lambda x, rows, at: x if rows is None else jax.lax.dynamic_index_in_dim(x, at, 0, False)

    def stage(consts: Arrays, xs: Arrays, carry: Arrays, at: Any, part: Any) -> Any:
        own = [take(x, rows, at) for x, rows in zip(consts, const_rows, strict=True)]
        xs = [take(x, rows, at) for x, rows in zip(xs, x_rows, strict=True)]
        own, rows = _as_keys(own, const_keys), deal.numbers(part, at)

        def body(carry: Arrays, xs: Arrays) -> tuple[Arrays, Arrays]:
            found = layer([*own, *_as_keys(carry, keys), *_as_keys(xs, x_keys)], rows)
            return _key_data(found[: len(carry)])[0], found[len(carry) :]

        return jax.lax.scan(body, carry, xs, length=length, unroll=unroll)

    of = [None if one else 0 for one in shared]
    over = deal.batch_axes or None
    of_parts = jax.vmap(stage, in_axes=(of, 0, 0, None, 0), spmd_axis_name=over)
    of_stages = jax.vmap(of_parts, in_axes=(of, 0, 0, 0, None), spmd_axis_name=PIPE)
    numbers = jnp.arange(deal.pipeline.parts)
    return lambda carry, at: of_stages(consts, xs, carry, at, numbers)


def _enter(buffer: Any, fresh: Any) -> Any:
    """Moves rows on by one stage; `fresh` ones enter the first."""
    # This becomes a permute between neighbours, unlike a roll or a concatenation.
    zero = jnp.zeros((), buffer.dtype)
    moved = jax.lax.pad(buffer, zero, [(1, -1, 0), *[(0, 0, 0)] * (buffer.ndim - 1)])
    first = jax.lax.broadcasted_iota(jnp.int32, buffer.shape, 0) == 0
    return jnp.where(first, jnp.broadcast_to(fresh[None], buffer.shape), moved)


def _key_data(arrays: Sequence[Any]) -> tuple[Arrays, Arrays]:
    """Replaces PRNG keys by their data; also returns the kind of each key."""
    is_key = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    kinds = [jax.random.key_impl(x) if is_key(x) else None for x in arrays]
    pairs = zip(arrays, kinds, strict=True)
    return [x if kind is None else jax.random.key_data(x) for x, kind in pairs], kinds


def _as_keys(arrays: Sequence[Any], kinds: Sequence[Any]) -> Arrays:
    """The inverse of `_key_data`."""
    pairs = zip(arrays, kinds, strict=True)
    return [x if k is None else jax.random.wrap_key_data(x, impl=k) for x, k in pairs]
