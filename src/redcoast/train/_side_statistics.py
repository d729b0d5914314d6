"""Statistics of both sides of each matrix, which optimizers such as SOAP and Shampoo keep.

The statistics of a matrix are means of products of its gradients along each side. Products with
them, and their decompositions, take most of the time: matrices of the same shape are stacked, and
each device computes with some of them.
"""

import functools as ft
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import KeyPath
from jaxtyping import Array, Float, Int, PyTree

from ..core._errors import check_integer, check_kind, check_number
from ._divide import StoredMatrices, as_stored
from ._matrix_stacks import (
    NUMBER,
    Matrices,
    Numbers,
    by_label,
    check_learning_rate,
    check_rates,
    numbers_of,
    stored_matrices,
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


class Moments(NamedTuple):
    """A gradient and its means, in the shape of the parameter."""

    gradient: Array
    mu: Array
    nu: Array


class Side(NamedTuple):
    """The statistics of one side of matrices, and what was last computed from them."""

    statistics: Matrices
    basis: Matrices

    @property
    def is_empty(self) -> bool:
        return self.basis.shape[1] == 0


class SideOptions(NamedTuple):
    """The decay of each moving average, what is added to divisors, and after how many steps
    what follows from the statistics is computed again."""

    b1: float
    b2: float
    statistics: float
    eps: float
    frequency: int


@dataclass(frozen=True)
class ArrayState:
    """An array of matrices with its statistics, and what an optimizer computes for it.

    `moments` have the gradient at first, and the update at last.
    """

    path: KeyPath
    numbers: Numbers
    moments: Moments
    left: Statistics
    right: Statistics

    def as_matrices(self, *arrays: Array) -> list[StoredMatrices]:
        """Arrays of the parameter's shape and the statistics, as matrices."""
        members = [stored_matrices(x, self.numbers, self.path) for x in arrays]
        # The statistics are stacks already.
        for x in (self.left, self.right):
            members.append(as_stored(x, self.path, range(4), x.shape[1:], 1))
        return members


# From the number of steps so far and the states of arrays to the states after this step.
Update = Callable[[SideOptions, Int[Array, ""], list[ArrayState]], list[ArrayState]]


def optimizer_with_sides(
    name: str,
    learning_rate: optax.ScalarOrSchedule,
    dimensions: PyTree[Numbers | None],
    others: optax.GradientTransformation,
    options: SideOptions,
    weight_decay: float,
    *,
    update: Update,
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
        _scale_by_sides(dimensions, ft.partial(update, options)),
        optax.add_decayed_weights(weight_decay),
        optax.scale_by_learning_rate(learning_rate),
    )
    return by_label(name, dimensions, matrices, others)


def _scale_by_sides(
    dimensions: PyTree[Numbers | None],
    update_states: Callable[[Int[Array, ""], list[ArrayState]], list[ArrayState]],
) -> optax.GradientTransformation:
    """A transformation that computes its updates on stacks, of which each device has a part."""
    numbers = numbers_of(dimensions)

    def init(params: PyTree) -> SidesState:
        arrays, treedef = jax.tree.flatten(params)
        left: list[Array] = []
        right: list[Array] = []
        for x, n in zip(arrays, numbers, strict=True):
            layout = stored_matrices(x, n, ()).layout
            left.append(_statistics(layout.count, layout.shape[0]))
            right.append(_statistics(layout.count, layout.shape[1]))
        # Two trees: a step donates its state, and no array may be donated twice.
        mu = jax.tree.map(_float32_zeros, params)
        nu = jax.tree.map(_float32_zeros, params)
        step = jnp.zeros((), jnp.int32)
        return SidesState(step, mu, nu, treedef.unflatten(left), treedef.unflatten(right))

    def update(
        updates: PyTree, state: PyTree, params: PyTree | None = None
    ) -> tuple[PyTree, SidesState]:
        leaves, treedef = jax.tree.flatten_with_path(updates)
        states: list[ArrayState] = []
        of_state = map(jax.tree.leaves, state[1:])
        for (path, x), mu, nu, left, right, n in zip(leaves, *of_state, numbers, strict=True):
            moments = Moments(x.astype(jnp.float32), mu, nu)
            states.append(ArrayState(path, n, moments, left, right))
        new: list[list[Array]] = []
        for (_, x), updated in zip(leaves, update_states(state.step, states), strict=True):
            direction, mu, nu = updated.moments
            new.append([direction.astype(x.dtype), mu, nu, updated.left, updated.right])
        step = jnp.asarray(optax.safe_increment(state.step))
        trees = [treedef.unflatten(part) for part in zip(*new, strict=True)]
        return trees[0], SidesState(step, *trees[1:])

    return optax.GradientTransformation(init, update)


def side_of(statistics: Statistics) -> Side:
    return Side(statistics[:, 0], statistics[:, 1])


def add_gradient(side: Side, rows: Matrices, decay: float) -> Side:
    """Adds the products of the rows of gradients to the statistics, of which `decay` is kept."""
    if side.is_empty:
        return side
    product = rows @ rows.mT
    return side._replace(statistics=decay * side.statistics + (1 - decay) * product)


def as_statistics(side: Side) -> Statistics:
    return jnp.stack(side, axis=1)


def _float32_zeros(x: Array) -> Float[Array, "..."]:
    return jnp.zeros_like(x, dtype=jnp.float32)


def _statistics(count: int, size: int) -> Statistics:
    if size > _LARGEST:
        size = 0  # the arrays are empty
    return jnp.zeros((count, 2, size, size))
