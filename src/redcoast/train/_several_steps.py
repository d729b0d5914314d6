"""Several steps in one program, for steps that take less time than the call of a program.

The program is a loop over batches that are stacked, with as many iterations as it is told. So one
program serves every number of steps, and where the calls of a run begin and end changes no result.
"""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int, PyTree

from ..core._pytree import Arrays, join, split
from ..distributed._mesh import batch_sharding
from ..tracking._metrics import PackedMetrics
from ._one_thread import in_one_thread

PackedStep = Callable[..., tuple[PyTree, PackedMetrics]]


class StepsTaken(eqx.Module):
    """What the program returns beside the new state.

    - `before`: a copy of the arrays of the state before the first step, which was donated. With it,
        the state after any of the steps can be computed again.
    - `names`, `values`: the metrics of each step; the rows after the last step are zero.
    """

    before: list[Array]
    names: tuple[str, ...] = eqx.field(static=True)
    values: Float[Array, "most metrics"]


def several_steps(step: PackedStep, shardings: PyTree, mesh: Mesh) -> Callable[..., PyTree]:
    """Converts a step on a batch to several steps on stacked batches.

    Returns `several(state, batches, count) -> (state, StepsTaken)`: takes a step on each of the
    first `count` of the batches, which are stacked along a new first dimension. It raises
    `ValueError` if the step does not keep the types of the state.
    """
    places = jax.tree.leaves(shardings)

    def several(state: PyTree, batches: PyTree, count: Int[Array, ""]) -> tuple[PyTree, StepsTaken]:
        arrays, static = split(state)
        names: tuple[str, ...] = ()

        def step_on_arrays(arrays: Arrays, batch: PyTree) -> tuple[Arrays, Array]:
            # Known after the trace: the names of metrics are no results of a program.
            nonlocal names
            state, metrics = step(join(arrays, static), batch)
            names = metrics.names
            return split(state)[0], metrics.values

        # Traced here, and not by the loop, which has to know the number of metrics.
        first_batch = jax.tree.map(lambda x: x[0], batches)
        program, (_, row) = jax.make_jaxpr(step_on_arrays, return_shape=True)(arrays, first_batch)
        run = in_one_thread(program, mesh)
        # A loop carries arrays of the same types from step to step.
        for old, new in zip(program.in_avals, program.out_avals[:-1], strict=False):
            if (old.shape, old.dtype) != (new.shape, new.dtype):
                raise ValueError(
                    f"The step changes an array of the state from {old.str_short()} to "
                    f"{new.str_short()}, so several steps cannot be taken in one call. Pass "
                    "`steps_per_call=1`."
                )

        def take(i: Array, carry: tuple[Arrays, Array]) -> tuple[Arrays, Array]:
            arrays, values = carry
            batch = [_batch_at(x, i, mesh) for x in jax.tree.leaves(batches)]
            *arrays, row = run(*arrays, *batch)
            if mesh.size > 1:
                # The compiler would choose other shardings inside of the loop than outside, and
                # move the state each time.
                arrays = list(map(jax.lax.with_sharding_constraint, arrays, places))
            return arrays, jax.lax.dynamic_update_index_in_dim(values, row, i, 0)

        most = jax.tree.leaves(batches)[0].shape[0]
        values = jnp.zeros((most, *row.shape), row.dtype)
        before = jax.lax.optimization_barrier(arrays)  # without it, JAX would return the arguments
        # `count` is an argument, so that a shorter last call runs the same program.
        arrays, values = jax.lax.fori_loop(0, count, take, (arrays, values))
        return join(arrays, static), StepsTaken(before, names, values)

    return several


def _batch_at(stacked: Array, index: Array, mesh: Mesh) -> Array:
    """An array of one of the batches, sharded as it would be alone."""
    x = jax.lax.dynamic_index_in_dim(stacked, index, keepdims=False)
    if mesh.size == 1 or x.ndim == 0:
        return x
    return jax.lax.with_sharding_constraint(x, batch_sharding(mesh, x.shape[0]))
