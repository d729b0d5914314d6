"""Runs interpolations of split examples, as by `jax.image.resize`, in `jax.shard_map` with halos.

XLA would gather the array for a lookup, and add up products with a matrix as large as the result.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from .._mesh_axes import parts
from ..program._trace import Arrays
from ._bound_equation import BoundEquation
from ._halos import SplitWindow, in_equal_parts, of_results, split_spec, with_halo, without_rest


def run_split_interpolation(bound: BoundEquation) -> Arrays | None:
    """The result of a lookup at constant indices, or of a product with a constant matrix, along a
    split dimension; None of others, and of one whose parts depend on all of the array."""
    equation, shardings = bound.equation, bound.shardings
    if not shardings.splits_examples:
        return None
    interpolation = bound.scope.constants.interpolation(equation)
    if interpolation is None:
        return None
    value, (result,) = bound.scope.value_of(equation.invars[interpolation.place]), bound.results
    assert value is not None
    split, of_result = shardings.split_axes(value), shardings.split_axes(result)
    axes = split[interpolation.dim]
    if not axes or axes != of_result[interpolation.targets[interpolation.dim]]:
        return None
    halo = interpolation.halo(parts(axes, shardings.mesh.shape))
    if halo is None:
        return None
    windows: list[SplitWindow] = []
    split_of_result: list[tuple[str, ...]] = [()] * len(result.shape)
    for d, over in enumerate(split):
        if over:
            target = interpolation.targets[d]
            split_of_result[target] = over
            count = parts(over, shardings.mesh.shape)
            own = -(-value.shape[d] // count)  # elements, which are all that a device needs
            windows.append(
                SplitWindow(d, over, value.shape[d], result.shape[target], count, length=own)
            )
    place = [window.dim for window in windows].index(interpolation.dim)
    left, right = halo
    length = left + windows[place].own + right
    window = replace(windows[place], left=left, right=right, length=length)
    own_results = -(-window.of_result // window.count)
    missing_results = own_results * window.count - window.of_result

    def look_up(x: jax.Array, places: jax.Array) -> jax.Array:
        first = jax.lax.axis_index(axes) * window.own - window.left
        local_places = jnp.squeeze(places, -1) - first
        return jnp.take(with_halo(x, window), local_places, axis=interpolation.dim, mode="clip")

    results_dim = 1 - interpolation.summed  # of the matrix

    def multiply(x: jax.Array, matrix: jax.Array) -> jax.Array:
        device = jax.lax.axis_index(axes)
        # (elements, results), or the other way round
        part = jax.lax.dynamic_slice_in_dim(
            matrix, device * window.own, window.length, interpolation.summed
        )
        part = jax.lax.dynamic_slice_in_dim(part, device * own_results, own_results, results_dim)
        operands = [part, part]
        operands[interpolation.place] = with_halo(x, window)
        params = equation.params
        return jax.lax.dot_general(
            *operands,
            dimension_numbers=params["dimension_numbers"],
            precision=params["precision"],
            preferred_element_type=params["preferred_element_type"],
        )

    x = bound.operands[interpolation.place]
    constant = bound.operands[1 - interpolation.place]  # the indices or the matrix
    padding = [(0, 0, 0)] * constant.ndim
    if equation.primitive.name == "gather":
        local, spec_of_constant = look_up, P(axes)
        padding[0] = (0, missing_results, 0)
    else:
        local, spec_of_constant = multiply, P()
        padding[results_dim] = (0, missing_results, 0)
        missing = window.own * window.count - window.size
        padding[interpolation.summed] = (window.left, missing + window.right, 0)
    constant = jax.lax.pad(constant, jnp.zeros((), constant.dtype), padding)
    run = jax.shard_map(
        local,
        mesh=shardings.mesh,
        in_specs=(split_spec(split), spec_of_constant),
        out_specs=split_spec(split_of_result),
    )
    y = run(in_equal_parts(x, windows), constant)
    return [without_rest(y, of_results(windows, range(len(split)), interpolation.targets))]
