"""Weights that a loop closes over, one copy for each part of the batch.

The gradient of such a weight is summed over the devices that the batch is split over, and the
compiler does so in every iteration. Here each part of the batch is multiplied by a copy of its own:
an array with one more dimension, split as the batch is, so that no device holds more than before.
The copies' gradients are added up over the iterations where they are, and summed over the devices
once, behind the loop.
"""

from collections.abc import Sequence
from math import prod
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn, Literal

from ...core._jaxpr import bind_again
from ._elementwise import ELEMENTWISE
from ._graph import Value, output

# What may happen to a weight before it is used, and how it may be used.
_ON_THE_WAY = frozenset(["transpose", "convert_element_type"])
_USES = frozenset(["dot_general", "broadcast_in_dim"])


def can_be_lifted(jaxpr: Jaxpr, var: Any) -> bool:
    """Whether all that a jaxpr does with one of its inputs is to multiply and to add it."""
    users = [equation for equation in jaxpr.eqns if var in _variables(equation.invars)]
    return (
        var not in _variables(jaxpr.outvars)
        and all(_fits(equation, var) for equation in users)
        and all(can_be_lifted(jaxpr, e.outvars[0]) for e in users if is_on_the_way(e))
    )


def is_on_the_way(equation: JaxprEqn) -> bool:
    """Whether this turns a weight into the same weight, in another form."""
    if equation.primitive.name != "broadcast_in_dim":
        return equation.primitive.name in _ON_THE_WAY
    operand: Any = equation.invars[0].aval
    return prod(operand.shape) == prod(output(equation).shape)


def is_use(equation: JaxprEqn, var: Any) -> bool:
    """Whether this multiplies by a weight, or repeats it along a dimension."""
    if equation.primitive.name in ELEMENTWISE:
        return var.aval.shape != output(equation).shape and len(var.aval.shape) > 0
    return equation.primitive.name in _USES and not is_on_the_way(equation)


def _variables(atoms: Sequence[Any]) -> list[Any]:
    return [atom for atom in atoms if not isinstance(atom, Literal)]


def _fits(equation: JaxprEqn, var: Any) -> bool:
    if equation.primitive.name == "dot_general":
        _, (batch, _) = equation.params["dimension_numbers"]
        return not batch and _variables(equation.invars).count(var) == 1
    return is_on_the_way(equation) or is_use(equation, var)


@runtime_checkable
class Parts(Protocol):
    """The parts of the batch: how many there are, and where it is in an array."""

    @property
    def count(self) -> int: ...

    def batch_dim(self, value: Value) -> int | None: ...

    def in_parts(self, x: Any, value: Value, at: int) -> Any:
        """The array with its batch as two dimensions, parts and what is in each."""
        ...

    def copies(self, x: Any, value: Value) -> Any:
        """The array as many times as there are parts, each where its part is."""
        ...


def on_the_way(equation: JaxprEqn, copies: Any) -> Any:
    """The copies of a weight that is transposed, cast, or given dimensions of one."""
    if equation.primitive.name == "convert_element_type":
        return jax.lax.convert_element_type(copies, equation.params["new_dtype"])
    if equation.primitive.name == "broadcast_in_dim":
        return jax.lax.reshape(copies, (copies.shape[0], *equation.params["shape"]))
    order = equation.params["permutation"]
    return jax.lax.transpose(copies, (0, *(d + 1 for d in order)))


def use(
    equation: JaxprEqn,
    given: Sequence[Any],
    place: int,
    copies: Any,
    values: Sequence[Value | None],
    result: Value,
    parts: Parts,
) -> Any:
    """The result by the copies of operand `place`; None where there is no batch to go by."""
    if equation.primitive.name == "broadcast_in_dim":
        dims = equation.params["broadcast_dimensions"]
        return _broadcast(copies, dims, parts.batch_dim(result), result)
    if equation.primitive.name in ELEMENTWISE:
        # Dimensions of one are repeated without a word.
        dims = tuple(range(len(result.shape)))
        repeated = _broadcast(copies, dims, parts.batch_dim(result), result)
        operands = [repeated if i == place else x for i, x in enumerate(given)]
        return None if repeated is None else bind_again(equation, operands)[0]
    value = values[1 - place]
    at = None if value is None else parts.batch_dim(value)
    sums, _ = equation.params["dimension_numbers"]
    if value is None or at is None or at in sums[1 - place]:
        return None
    return _dot(equation, parts.in_parts(given[1 - place], value, at), place, at, copies)


def _broadcast(copies: Any, dims: tuple[int, ...], at: int | None, result: Value) -> Any:
    if at is not None and at in dims and copies.shape[1 + dims.index(at)] == 1:
        copies = jnp.squeeze(copies, axis=1 + dims.index(at))
        dims = tuple(d for d in dims if d != at)
    if at is None or at in dims:
        return None
    parts, shape = copies.shape[0], result.shape
    finer = (*shape[:at], parts, shape[at] // parts, *shape[at + 1 :])
    into = (at, *(d + (d > at) for d in dims))
    # In rising order: the derivative of `broadcast_in_dim` knows no other.
    order = sorted(range(len(into)), key=into.__getitem__)
    copies = jax.lax.broadcast_in_dim(jnp.transpose(copies, order), finer, sorted(into))
    return jax.lax.reshape(copies, shape)


def _dot(equation: JaxprEqn, other: Any, place: int, at: int, copies: Any) -> Any:
    """`other` has its dimension `at` in parts: `(parts, rest)`."""
    params = equation.params
    sums, _ = params["dimension_numbers"]
    mine, theirs = tuple(d + 1 for d in sums[place]), tuple(d + (d > at) for d in sums[1 - place])
    operands, summed, batch = [copies, other], [mine, theirs], [(0,), (at,)]
    if place == 1:
        operands, summed, batch = operands[::-1], summed[::-1], batch[::-1]
    found = jax.lax.dot_general(
        *operands,
        dimension_numbers=((summed[0], summed[1]), (batch[0], batch[1])),
        precision=params["precision"],
        preferred_element_type=params["preferred_element_type"],
    )
    # The parts came first; back to where the batch is among the other free dimensions.
    before = sum(1 for d in range(at) if d not in sums[1 - place])
    if place == 0:
        before += copies.ndim - 1 - len(mine)
    found = jnp.moveaxis(found, 0, before)
    shape = found.shape
    merged = (*shape[:before], shape[before] * shape[before + 1], *shape[before + 2 :])
    return jax.lax.reshape(found, merged)
