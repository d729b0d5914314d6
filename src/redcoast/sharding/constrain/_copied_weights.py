"""Evaluates loops with one copy of a loop-invariant weight for each shard of the batch.

The gradient of such a weight is summed over the devices that the batch is split over, and XLA does
so in every iteration. Here each shard of the batch is multiplied by its own copy of the weight. The
copies are one array with a leading dimension that is sharded like the batch, so no device holds
more than before. The gradients of the copies are accumulated locally over the iterations and summed
over the devices once, after the loop.
"""

from collections.abc import Callable, Sequence

import jax
from jax.extend.core import JaxprEqn

from ...core._jaxpr import bind_again, is_inexact, variables
from ..operations import Atom, rule_of
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
    weight, place = copied[0], list(equation.invars).index(copied[0])
    operands = list(bound.operands)
    if rearranges(equation):
        axes: list[int | None] = [None] * len(operands)
        operands[place], axes[place] = copies[weight], 0
        copies[equation.outvars[0]] = _for_each_shard(equation, axes)(*operands)
        return None
    # Where the copies do not fit, the weight itself is used, as without them.
    if not uses(equation, weight):
        return None
    if equation.primitive.name == "dot_general":
        return _multiply(bound, place, copies[weight])
    (result,) = bound.results
    # Elementwise operations broadcast dimensions of size one implicitly.
    is_broadcast = equation.primitive.name == "broadcast_in_dim"
    dims = tuple(range(len(result.shape)))
    if is_broadcast:
        dims = equation.params["broadcast_dimensions"]
    repeated = _broadcast(copies[weight], dims, shardings.batch_dim(result), result.shape)
    if repeated is None or is_broadcast:
        return repeated
    operands[place] = repeated
    return bind_again(equation, operands)[0]


def _for_each_shard(
    equation: JaxprEqn, axes: Sequence[int | None], of_result: int = 0
) -> Callable[..., jax.Array]:
    """An operation on each shard: of operands along `axes`, and of its result."""
    run = lambda *xs: bind_again(equation, xs)[0]
    return jax.vmap(run, in_axes=tuple(axes), out_axes=of_result)


def _multiply(bound: BoundEquation, place: int, copies: jax.Array) -> jax.Array | None:
    """A product of which an operand has a copy for each shard, and the other one rows.

    None if the other operand has no batch dimension that is kept.
    """
    equation, shardings, other = bound.equation, bound.shardings, 1 - place
    value, rule = bound.scope.value_of(equation.invars[other]), rule_of(equation)
    if value is None or rule is None:
        return None
    d = shardings.batch_dim(value)
    # A product that sums over the batch has no shards to be multiplied apart.
    if d is None or rule.operands[other][d] not in rule.results[0]:
        return None
    of_result = rule.results[0].index(rule.operands[other][d])
    operands, axes = [copies, copies], [0, 0]  # (shards, *weight)
    operands[other] = shardings.split_batch(bound.operands[other], value, d)
    axes[other] = d
    return _merge(_for_each_shard(equation, axes, of_result)(*operands), of_result)


def _broadcast(
    copies: jax.Array, dims: Sequence[int], batch_dim: int | None, shape: Sequence[int]
) -> jax.Array | None:
    """The copies in the shape of a result; None if it has no batch dimension that they lack.

    `dims` are the dimensions of the result that those of the weight become.
    """
    if batch_dim is None:
        return None
    if batch_dim in dims and copies.shape[1 + dims.index(batch_dim)] != 1:
        return None
    of_shard = list(shape)
    of_shard[batch_dim] //= copies.shape[0]
    run = lambda copy: jax.lax.broadcast_in_dim(copy, of_shard, dims)
    return _merge(jax.vmap(run, out_axes=batch_dim)(copies), batch_dim)


def _merge(x: jax.Array, d: int) -> jax.Array:
    """Joins the shards along dimension `d` with the rows of each, along the next one."""
    return jax.lax.reshape(x, (*x.shape[:d], x.shape[d] * x.shape[d + 1], *x.shape[d + 2 :]))
