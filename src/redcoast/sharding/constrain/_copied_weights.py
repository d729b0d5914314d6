"""Evaluates loops with one copy of a loop-invariant weight for each shard of the batch.

The gradient of such a weight is summed over the devices that the batch is split over, and XLA does
so in every iteration. Here each shard of the batch is multiplied by its own copy of the weight. The
copies are one array with a leading dimension that is sharded like the batch, so no device holds
more than before. The gradients of the copies are accumulated locally over the iterations and summed
over the devices once, after the loop.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from ...core._jaxpr import bind_again, is_inexact, struct_of, variables
from ..operations import Atom
from ..program._graph import Value
from ..program._loop_weights import can_hoist_gradient_sum, rearranges, uses
from ..program._walk import Scope
from ._bound_equation import BoundEquation
from ._shardings import Shardings


def copy_weights(
    scope: Scope, shardings: Shardings, consts: Sequence[object]
) -> dict[Atom, jax.Array]:
    """Returns copies of the constants of a loop for which this saves sums over the batch."""
    copies: dict[Atom, jax.Array] = {}
    if len(shardings.batch.sets) > 1:
        # The constants may have some of the split dimensions, and copies need all of the axes.
        return copies
    for x, var in zip(consts, scope.jaxpr.invars, strict=False):
        value = scope.values[var]
        if (
            shardings.batch.count > 1
            and isinstance(x, jax.Array)
            and value.shape
            and is_inexact(x)
            and shardings.batch_dim(value) is None
            and can_hoist_gradient_sum(scope.jaxpr, var)
        ):
            copies[var] = shardings.copies(shardings.constrain(x, value), value)
    return copies


def apply_copies(bound: BoundEquation, copies: dict[Atom, jax.Array]) -> jax.Array | None:
    """Returns the result computed with copies of a weight, or None if there are none.

    If the equation only rearranges the weight, the rearranged copies are added to `copies`.
    """
    equation, shardings = bound.equation, bound.shardings
    copied = [var for var in variables(equation.invars) if var in copies]
    if not copied:
        return None
    weight, out = copied[0], equation.outvars[0]
    index = list(equation.invars).index(weight)
    if rearranges(equation):
        x = copies[weight]  # (shards, *weight)
        if equation.primitive.name == "convert_element_type":
            copies[out] = jax.lax.convert_element_type(x, equation.params["new_dtype"])
        elif equation.primitive.name == "broadcast_in_dim":
            # It adds dimensions of size one.
            copies[out] = jax.lax.reshape(x, (x.shape[0], *equation.params["shape"]))
        elif equation.primitive.name == "transpose":
            permutation = _after_copies(equation.params["permutation"])
            copies[out] = jax.lax.transpose(x, (0, *permutation))
        else:
            scaled = x * bound.operands[1 - index]
            copies[out] = scaled.astype(struct_of(out).dtype)
        return None
    # Where the copies do not fit, the weight itself is used, as without them.
    if not uses(equation, weight):
        return None
    if equation.primitive.name == "dot_general":
        return _dot(bound, index, copies[weight])
    (result,) = bound.results
    batch_dim = shardings.batch_dim(result)
    # Elementwise operations broadcast dimensions of size one implicitly.
    is_broadcast = equation.primitive.name == "broadcast_in_dim"
    dims = tuple(range(len(result.shape)))
    if is_broadcast:
        dims = equation.params["broadcast_dimensions"]
    repeated = _broadcast(copies[weight], dims, batch_dim, result)
    if repeated is None or is_broadcast:
        return repeated
    inputs = list(bound.operands)
    inputs[index] = repeated
    return bind_again(equation, inputs)[0]


def _broadcast(
    copies: jax.Array, dims: tuple[int, ...], batch_dim: int | None, result: Value
) -> jax.Array | None:
    """The copies in the shape of a result; None if it has no batch dimension that they lack.

    `dims` are the dimensions of the result that those of the weight become.
    """
    if batch_dim is None:
        return None
    if batch_dim in dims:
        axis = 1 + dims.index(batch_dim)
        if copies.shape[axis] != 1:
            return None
        copies = jnp.squeeze(copies, axis=axis)
        dims = tuple(d for d in dims if d != batch_dim)
    shards, shape = copies.shape[0], result.shape
    # The batch dimension is split into two, `(shards, rest)`.
    rest = shape[batch_dim] // shards
    split = (*shape[:batch_dim], shards, rest, *shape[batch_dim + 1 :])
    places = (batch_dim, *_after_split(dims, batch_dim))
    # The derivative of `broadcast_in_dim` requires ascending dimensions.
    order = sorted(range(len(places)), key=places.__getitem__)  # of (shards, *weight)
    copies = jax.lax.broadcast_in_dim(jnp.transpose(copies, order), split, sorted(places))
    return jax.lax.reshape(copies, shape)


def _after_copies(dims: Sequence[int]) -> tuple[int, ...]:
    """The numbers of a weight's dimensions in its copies, of which the first counts shards."""
    return tuple(d + 1 for d in dims)


def _after_split(dims: Sequence[int], batch_dim: int) -> tuple[int, ...]:
    """The numbers of dimensions after the batch dimension is split into `(shards, rest)`.

    That of the batch dimension itself stays that of the shards.
    """
    return tuple(d + (d > batch_dim) for d in dims)


def _dot(bound: BoundEquation, index: int, copies: jax.Array) -> jax.Array | None:
    """A product with the copies in place of operand `index`, batched over the shards.

    None if the other operand has no batch dimension that is kept.
    """
    equation, shardings, other_index = bound.equation, bound.shardings, 1 - index
    sums, _ = equation.params["dimension_numbers"]
    value = bound.scope.value_of(equation.invars[other_index])
    if value is None:
        return None
    batch_dim = shardings.batch_dim(value)
    # A product that sums over the batch has no shards to be multiplied apart.
    if batch_dim is None or batch_dim in sums[other_index]:
        return None
    # The batch dimension of the other operand is split into two, `(shards, rest)`.
    other = shardings.split_batch(bound.operands[other_index], value, batch_dim)
    copy_sums = _after_copies(sums[index])
    other_sums = _after_split(sums[other_index], batch_dim)
    # Of the copies, and of the other operand: the array, its summed and its batched dimensions.
    sides = [(copies, copy_sums, (0,)), (other, other_sums, (batch_dim,))]
    if index == 1:
        sides.reverse()
    (left, left_sums, left_batch), (right, right_sums, right_batch) = sides
    product = jax.lax.dot_general(
        left,
        right,
        dimension_numbers=((left_sums, right_sums), (left_batch, right_batch)),
        precision=equation.params["precision"],
        preferred_element_type=equation.params["preferred_element_type"],
    )
    # The shards are the first dimension. Move them back to where the batch is in the result.
    before = len(set(range(batch_dim)).difference(sums[other_index]))
    if index == 0:
        before += copies.ndim - 1 - len(copy_sums)
    product = jnp.moveaxis(product, 0, before)  # (..., shards, rows, ...)
    shape = product.shape
    merged = (*shape[:before], shape[before] * shape[before + 1], *shape[before + 2 :])
    return jax.lax.reshape(product, merged)
