"""The matrices of a model, by the dimension numbers of each array."""

import functools as ft
from collections.abc import Hashable
from math import prod
from numbers import Real

import jax
import optax
from jax.tree_util import KeyPath
from jaxtyping import Array, Float, PyTree

from ..core._errors import check_kind, check_optimizer
from ._divide import StoredMatrices, as_stored
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
    labels = jax.tree.map(_label, dimensions, is_leaf=lambda x: x is None or is_numbers(x))
    transformations: dict[Hashable, optax.GradientTransformation] = {
        "matrix": matrices,
        "other": others,
    }
    # A function, since optax would call a tree that is a callable module.
    return optax.partition(transformations, ft.partial(_labels_of, name, labels))


def _label(numbers: Numbers | None) -> str:
    if is_numbers(numbers):
        return "matrix"
    return "other"


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


def stored_matrices(x: Array, numbers: Numbers, path: KeyPath) -> StoredMatrices:
    """An array of a tree with a path, as the matrices that the dimension numbers say it is."""
    order, rows, columns = _order(x, numbers)
    stacked = x.ndim - sum(map(len, sides_of(x, numbers)))
    return as_stored(x, path, order, (rows, columns), stacked)
