"""The matrices of a model in stacks, which the devices of a mesh divide.

What optimizers compute with a matrix needs all of it. Matrices of the same shape are stacked, and
the stack is sharded over all axes of the mesh: each device has some matrices.
"""

import functools as ft
from collections.abc import Hashable
from math import prod
from numbers import Real

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, PyTree

from ..core._errors import check_kind, check_optimizer
from ..core._tracing import sizes_of_axes
from ._labels import labels_like

Numbers = optax.contrib.MuonDimensionNumbers
NUMBER = (Real, jax.Array)
Matrices = Float[Array, "_ _ _"]  # (matrices, rows, columns)


def by_label(
    name: str,
    dimensions: PyTree[Numbers | None],
    matrices: optax.GradientTransformation,
    others: optax.GradientTransformation,
) -> optax.GradientTransformation:
    """An optimizer of the matrices and another one of the other arrays. `name` is the public
    function's, for messages."""
    check_optimizer(others, name="others")
    check_dimensions(dimensions)
    label = lambda numbers: "matrix" if is_numbers(numbers) else "other"
    labels = jax.tree.map(label, dimensions, is_leaf=lambda x: x is None or is_numbers(x))
    transformations: dict[Hashable, optax.GradientTransformation] = {
        "matrix": matrices,
        "other": others,
    }
    # A function, since optax would call a tree that is a callable module.
    return optax.partition(transformations, ft.partial(_labels_of, name, labels))


def check_rates(**rates: object) -> None:
    """Raises `TypeError` or `ValueError` unless all are numbers from 0 to 1, without 1."""
    for name, rate in rates.items():
        check_kind(name, rate, NUMBER, "a number")
        if not 0 <= rate < 1:  # pyright: ignore[reportOperatorIssue]
            raise ValueError(f"`{name}` must be at least 0 and less than 1, but is {rate}.")


def check_learning_rate(rate: object) -> None:
    if not callable(rate):
        check_kind("learning_rate", rate, NUMBER, "a number or an optax schedule")


def check_dimensions(dimensions: PyTree[Numbers | None]) -> None:
    """Raises `ValueError` if there is no matrix."""
    if not any(map(is_numbers, jax.tree.leaves(dimensions, is_leaf=is_numbers))):
        raise ValueError(
            "`dimensions` has no matrix. Pass the result of `rc.matrix_dimensions(model, loss_fn, "
            "batch, key)`."
        )


def _labels_of(name: str, labels: PyTree[str], params: PyTree) -> PyTree[str]:
    try:
        return labels_like(labels, params)
    except ValueError as error:
        raise ValueError(
            f"`dimensions` of `rc.{name}` is not shaped like the parameters. Pass the result of "
            "`rc.matrix_dimensions` for the model that is trained."
        ) from error


def is_numbers(x: PyTree) -> bool:
    return isinstance(x, Numbers)


def numbers_of(dimensions: PyTree[Numbers | None]) -> list[Numbers]:
    """The dimension numbers of all matrices, in the order of the tree."""
    return [x for x in jax.tree.leaves(dimensions, is_leaf=is_numbers) if is_numbers(x)]


def divided(stack: Matrices) -> Matrices:
    """A stack with a number of matrices that divides over all devices, and is sharded so."""
    axes = dividing_axes()
    if not axes:
        return stack
    # Matrices of zeros stay zeros, and are cut off.
    padded = jnp.pad(stack, ((0, missing_matrices(stack.shape[0])), (0, 0), (0, 0)))
    return jax.lax.with_sharding_constraint(padded, P(axes))


def dividing_axes() -> tuple[str, ...]:
    """The axes of the mesh that the current trace is for which divide anything."""
    return tuple(axis for axis, size in sizes_of_axes().items() if size > 1)


def missing_matrices(count: int) -> int:
    """How many matrices a stack lacks to be divided over all devices."""
    return -count % prod(sizes_of_axes().values())


def _order(x: Array, numbers: Numbers) -> tuple[tuple[int, ...], int, int]:
    """The dimensions in the order (matrices, rows, columns), and the numbers of rows and columns.

    The larger side is that of the columns: the transpose of an orthogonal matrix is orthogonal.
    """
    rows, columns = sides_of(x, numbers)
    sizes = size_along(x, rows), size_along(x, columns)
    # Optimizers multiply the smaller side with itself.
    if sizes[0] > sizes[1]:
        rows, columns = columns, rows
    # All dimensions that are on neither side, such as layers and experts.
    stacked = tuple(d for d in range(x.ndim) if d not in (*rows, *columns))
    return (*stacked, *rows, *columns), min(sizes), max(sizes)


def sides_of(x: Array, numbers: Numbers) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The dimensions of the inputs and of the outputs; `optax` lets each be a number."""
    sides: list[tuple[int, ...]] = []
    for dims in numbers:
        if isinstance(dims, int):
            dims = (dims,)
        sides.append(tuple(d % x.ndim for d in dims))
    if set(sides[0]) & set(sides[1]):
        raise ValueError(
            f"{numbers} has a dimension on both sides of a matrix of shape {x.shape}. The "
            "dimensions of inputs and of outputs must differ."
        )
    return sides[0], sides[1]


def size_along(x: Array, dims: tuple[int, ...]) -> int:
    return prod(x.shape[d] for d in dims)


def as_matrices(x: Array, numbers: Numbers) -> Matrices:
    order, rows, columns = _order(x, numbers)
    return x.transpose(order).reshape(-1, rows, columns)


def from_matrices(matrices: Matrices, like: Array, numbers: Numbers) -> Array:
    """The inverse of `as_matrices`."""
    order, _, _ = _order(like, numbers)
    inverse = sorted(range(like.ndim), key=order.__getitem__)
    return matrices.reshape([like.shape[d] for d in order]).transpose(inverse)
