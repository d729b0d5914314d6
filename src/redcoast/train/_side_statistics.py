"""Statistics of both sides of each matrix, which optimizers such as SOAP and Shampoo keep.

The statistics of a matrix are means of products of its gradients along each side. Products with
them, and their decompositions, take most of the time: matrices of the same shape are stacked, and
each device computes with some of them.
"""

import functools as ft
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int, PyTree

from ..core._errors import check_integer, check_kind, check_number
from ..core._tracing import traced_mesh
from ._matrix_stacks import (
    NUMBER,
    Matrices,
    Numbers,
    as_matrices,
    by_label,
    check_learning_rate,
    check_rates,
    dividing_axes,
    from_matrices,
    missing_matrices,
    numbers_of,
)

# (matrices, the statistics and what follows from them, size, size)
Statistics = Float[Array, "_ 2 _ _"]

_LARGEST = 10_000  # a longer side has no statistics, as in SOAP's published implementation


class SidesState(NamedTuple):
    """The state of an optimizer with statistics of both sides.

    `mu` and `nu` are means that are shaped like the parameters, in float32. `left` and `right`
    have, for the shorter and for the longer side of each matrix, the statistics and what was last
    computed from them, `(matrices, 2, size, size)`; they are empty for sides that are too long.
    """

    step: Int[Array, ""]
    mu: PyTree[Array]
    nu: PyTree[Array]
    left: PyTree[Array]
    right: PyTree[Array]


class Stack(NamedTuple):
    """What is computed with for matrices of the same shape."""

    gradient: Matrices
    mu: Matrices
    nu: Matrices
    left: Statistics
    right: Statistics


class Side(NamedTuple):
    """The statistics of one side of matrices, and what was last computed from them."""

    statistics: Matrices
    basis: Matrices

    @property
    def is_empty(self) -> bool:
        return self.basis.shape[1] == 0


class SideOptions(NamedTuple):
    """How much of each mean is kept in a step, what is added to divisors, and after how many steps
    what follows from the statistics is computed again."""

    b1: float
    b2: float
    statistics: float
    eps: float
    frequency: int


# From the number of steps so far and a stack to the next one, with the update as its gradient.
Next = Callable[[Int[Array, ""], Stack], Stack]


def with_sides(
    name: str,
    learning_rate: optax.ScalarOrSchedule,
    dimensions: PyTree[Numbers | None],
    others: optax.GradientTransformation,
    options: SideOptions,
    weight_decay: float,
    *,
    next_stack: Callable[[SideOptions, Int[Array, ""], Stack], Stack],
) -> optax.GradientTransformation:
    """An optimizer of matrices with statistics of both sides, and another one of other arrays.

    Raises `ValueError` or `TypeError` if an argument cannot be.
    """
    check_learning_rate(learning_rate)
    check_rates(b1=options.b1, b2=options.b2, statistics=options.statistics)
    check_number("eps", options.eps, above=0)
    check_integer("frequency", options.frequency)
    check_kind("weight_decay", weight_decay, NUMBER, "a number")
    matrices = optax.chain(
        _scale_by_sides(dimensions, ft.partial(next_stack, options)),
        optax.add_decayed_weights(weight_decay),
        optax.scale_by_learning_rate(learning_rate),
    )
    return by_label(name, dimensions, matrices, others)


def _scale_by_sides(
    dimensions: PyTree[Numbers | None], next_stack: Next
) -> optax.GradientTransformation:
    """A transformation that computes its updates on stacks, of which each device has a part."""
    numbers = numbers_of(dimensions)

    def init(params: PyTree) -> SidesState:
        arrays, treedef = jax.tree.flatten(params)
        shapes: list[tuple[int, ...]] = []
        for x, n in zip(arrays, numbers, strict=True):
            shapes.append(jax.eval_shape(lambda x, n=n: as_matrices(x, n), x).shape)
        left = [_statistics(shape, 1) for shape in shapes]
        right = [_statistics(shape, 2) for shape in shapes]
        # Two trees: a step donates its state, and no array may be donated twice.
        mu = jax.tree.map(_float32_zeros, params)
        nu = jax.tree.map(_float32_zeros, params)
        step = jnp.zeros((), jnp.int32)
        return SidesState(step, mu, nu, treedef.unflatten(left), treedef.unflatten(right))

    def update(
        updates: PyTree, state: PyTree, params: PyTree | None = None
    ) -> tuple[PyTree, SidesState]:
        treedef = jax.tree.structure(updates)
        stacks: list[Stack] = []
        for *arrays, n in zip(*map(jax.tree.leaves, (updates, *state[1:])), numbers, strict=True):
            shaped = [as_matrices(x.astype(jnp.float32), n) for x in arrays[:3]]
            stacks.append(Stack(*shaped, *arrays[3:]))  # the statistics are stacks already
        results = _together(next_stack, state.step, stacks)
        new: list[list[Array]] = []
        for stack, x, n in zip(results, jax.tree.leaves(updates), numbers, strict=True):
            shaped = [from_matrices(y, x, n) for y in stack[:3]]
            new.append([shaped[0].astype(x.dtype), *shaped[1:], *stack[3:]])
        step = jnp.asarray(optax.safe_increment(state.step))
        trees = [treedef.unflatten(part) for part in zip(*new, strict=True)]
        return trees[0], SidesState(step, *trees[1:])

    return optax.GradientTransformation(init, update)


def sides_of_stack(stack: Stack) -> tuple[Side, Side]:
    """The shorter and the longer side."""
    left, right = stack.left, stack.right
    return Side(left[:, 0], left[:, 1]), Side(right[:, 0], right[:, 1])


def add_gradient(side: Side, rows: Matrices, kept: float) -> Side:
    """Adds the products of the rows of gradients to the statistics, of which a part is kept."""
    if side.is_empty:
        return side
    product = rows @ rows.mT
    return side._replace(statistics=kept * side.statistics + (1 - kept) * product)


def as_statistics(side: Side) -> Statistics:
    return jnp.stack(side, axis=1)


def _float32_zeros(x: Array) -> Float[Array, "..."]:
    return jnp.zeros_like(x, dtype=jnp.float32)


def _statistics(shape: tuple[int, ...], side: int) -> Statistics:
    size = shape[side]
    if size > _LARGEST:
        size = 0  # the arrays are empty
    return jnp.zeros((shape[0], 2, size, size))


def _together(next_stack: Next, count: Int[Array, ""], stacks: Sequence[Stack]) -> list[Stack]:
    """The next state of all matrices, with the update in place of the gradient."""
    places: dict[Hashable, list[int]] = {}
    for place, stack in enumerate(stacks):
        alone = missing_matrices(stack.gradient.shape[0]) == 0
        shape: Hashable = stack.gradient.shape[1:]
        # A stack that all devices divide stays as it is stored.
        if alone and dividing_axes():
            shape = shape, place
        places.setdefault(shape, []).append(place)
    results: list[Stack] = list(stacks)
    for members in places.values():
        parts = zip(*(stacks[place] for place in members), strict=True)
        joined = Stack(*map(jnp.concatenate, parts))
        stack = _divide(next_stack, count, joined)
        first = 0
        for place in members:
            last = first + stacks[place].gradient.shape[0]
            results[place] = Stack(*(x[first:last] for x in stack))
            first = last
    return results


def _divide(next_stack: Next, count: Int[Array, ""], stack: Stack) -> Stack:
    """The next state of a stack, of which each device computes a part."""
    mesh, axes = traced_mesh(), dividing_axes()
    if mesh is None or not axes:
        return next_stack(count, stack)
    missing = missing_matrices(stack.gradient.shape[0])
    padded = [jnp.pad(x, ((0, missing), *[(0, 0)] * (x.ndim - 1))) for x in stack]
    # The compiler would gather the operands of decompositions.
    local = jax.shard_map(
        next_stack, mesh=mesh, in_specs=(P(), P(axes)), out_specs=P(axes), check_vma=False
    )
    return local(count, Stack(*padded))
