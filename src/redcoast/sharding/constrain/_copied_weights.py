"""Evaluates loops with one copy of a loop-invariant weight for each shard of the batch.

The gradient of such a weight is summed over the devices that the batch is split over, and XLA does
so in every iteration. Here each shard of the batch is multiplied by its own copy of the weight. The
copies are one array with a leading dimension that is sharded like the batch, so no device holds
more than before. The gradients of the copies are accumulated locally over the iterations and summed
over the devices once, after the loop.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn, Literal

from ...core._jaxpr import bind_again, is_inexact
from ..program._graph import Value
from ..program._loop_weights import can_hoist_gradient_sum, rearranges, uses
from ..program._walk import Scope
from ._shardings import Shardings


def copy_weights(scope: Scope, shardings: Shardings, consts: Sequence[Any]) -> dict[Any, Any]:
    """Returns copies of the constants of a loop for which this saves sums over the batch."""
    copies = {}
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


def apply_copies(
    equation: JaxprEqn,
    scope: Scope,
    shardings: Shardings,
    operands: Sequence[Any],
    copies: dict[Any, Any],
) -> Any:
    """Returns the result computed with copies of a weight, or None if there are none.

    If the equation only rearranges the weight, the rearranged copies are added to `copies`.
    """
    atoms = equation.invars
    index = next(
        (i for i, a in enumerate(atoms) if not isinstance(a, Literal) and a in copies), None
    )
    if index is None:
        return None
    weight, out = atoms[index], equation.outvars[0]
    if rearranges(equation):
        copies[out] = _rearrange(equation, copies[weight])
        return None
    if not uses(equation, weight):
        return None
    if equation.primitive.name == "dot_general":
        return _dot(equation, scope, shardings, operands, index, copies[weight])
    result = scope.values[out]
    at = shardings.batch_dim(result)
    if equation.primitive.name == "broadcast_in_dim":
        return _broadcast(copies[weight], equation.params["broadcast_dimensions"], at, result)
    # Elementwise operations broadcast dimensions of size one implicitly.
    repeated = _broadcast(copies[weight], tuple(range(len(result.shape))), at, result)
    inputs = [repeated if i == index else x for i, x in enumerate(operands)]
    return None if repeated is None else bind_again(equation, inputs)[0]


def _rearrange(equation: JaxprEqn, copies: Any) -> Any:
    if equation.primitive.name == "convert_element_type":
        return jax.lax.convert_element_type(copies, equation.params["new_dtype"])
    if equation.primitive.name == "broadcast_in_dim":
        return jax.lax.reshape(copies, (copies.shape[0], *equation.params["shape"]))
    return jax.lax.transpose(copies, (0, *(d + 1 for d in equation.params["permutation"])))


def _broadcast(copies: Any, dims: tuple[int, ...], at: int | None, result: Value) -> Any:
    """The copies in the shape of a result; None if it has no batch dimension `at`."""
    if at is not None and at in dims and copies.shape[1 + dims.index(at)] == 1:
        copies = jnp.squeeze(copies, axis=1 + dims.index(at))
        dims = tuple(d for d in dims if d != at)
    if at is None or at in dims:
        return None
    shards, shape = copies.shape[0], result.shape
    split = (*shape[:at], shards, shape[at] // shards, *shape[at + 1 :])
    into = (at, *(d + (d > at) for d in dims))
    # The derivative of `broadcast_in_dim` requires ascending dimensions.
    order = sorted(range(len(into)), key=into.__getitem__)
    copies = jax.lax.broadcast_in_dim(jnp.transpose(copies, order), split, sorted(into))
    return jax.lax.reshape(copies, shape)


def _dot(
    equation: JaxprEqn,
    scope: Scope,
    shardings: Shardings,
    operands: Sequence[Any],
    index: int,
    copies: Any,
) -> Any:
    """A product with the copies in place of operand `index`, batched over the shards.

    None if the other operand has no batch dimension that is kept.
    """
    atom, params = equation.invars[1 - index], equation.params
    sums, _ = params["dimension_numbers"]
    value = None if isinstance(atom, Literal) else scope.values.get(atom)
    at = None if value is None else shardings.batch_dim(value)
    if value is None or at is None or at in sums[1 - index]:
        return None
    # Its dimension `at` is split into two, `(shards, rest)`.
    other = shardings.split_batch(operands[1 - index], value, at)
    mine, theirs = tuple(d + 1 for d in sums[index]), tuple(d + (d > at) for d in sums[1 - index])
    operands, contracted, batch = [copies, other], [mine, theirs], [(0,), (at,)]
    if index == 1:
        operands, contracted, batch = operands[::-1], contracted[::-1], batch[::-1]
    found = jax.lax.dot_general(
        *operands,
        dimension_numbers=((contracted[0], contracted[1]), (batch[0], batch[1])),
        precision=params["precision"],
        preferred_element_type=params["preferred_element_type"],
    )
    # The shards are the first dimension. Move them back to where the batch is in the result.
    before = sum(1 for d in range(at) if d not in sums[1 - index])
    if index == 0:
        before += copies.ndim - 1 - len(mine)
    found = jnp.moveaxis(found, 0, before)
    shape = found.shape
    merged = (*shape[:before], shape[before] * shape[before + 1], *shape[before + 2 :])
    return jax.lax.reshape(found, merged)
