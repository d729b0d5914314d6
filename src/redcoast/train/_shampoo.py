"""Shampoo with exponential averages and grafting, for the matrices of all layers.

A gradient is multiplied by a root of the inverse statistics of each side. These roots are computed
anew every few steps, from the eigenvectors of the statistics.
"""

import functools as ft
from dataclasses import replace

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Int, PyTree

from ..core._frames import hide_frames
from ._divide import compute_divided
from ._matrix_stacks import Matrices, Numbers, sides_of
from ._side_statistics import (
    ArrayState,
    Moments,
    Side,
    SideOptions,
    Statistics,
    add_gradient,
    as_statistics,
    optimizer_with_sides,
    side_of,
)

_GRAFT_EPS = 1e-8  # added to the root of the squares, as in Adam


@hide_frames
def shampoo(
    learning_rate: optax.ScalarOrSchedule,
    dimensions: PyTree[Numbers | None],
    *,
    others: optax.GradientTransformation,
    b1: float = 0.9,
    b2: float = 0.999,
    statistics: float = 0.95,
    eps: float = 1e-6,
    frequency: int = 10,
    weight_decay: float = 0.0,
) -> optax.GradientTransformation:
    """Shampoo for the matrices of a model, and another optimizer for its other arrays.

    The update of each matrix has the direction of Shampoo's and, by grafting, the norm of
    RMSProp's, so that learning rates of Adam suit it. In a step of redcoast on a mesh, the matrices
    are divided over all devices, and no product or root is computed twice. Each device
    stores the statistics of its own matrices, if the layers are stacked.

    **Arguments:**

    - `learning_rate`: A number, or an `optax` schedule.
    - `dimensions`: Which arrays are matrices, and their dimensions, from
        [`redcoast.matrix_dimensions`][].
    - `others`: The optimizer of all other arrays, such as `optax.adamw(3e-4)`.
    - `b1`: The decay of the moving average of the updates, in [0, 1).
    - `b2`: The decay of the moving average of the squared gradients, in [0, 1).
    - `statistics`: The decay of the moving average of the statistics of each side, in [0, 1).
    - `eps`: Added to the eigenvalues of the statistics, times the largest of them.
    - `frequency`: The number of steps between computations of the roots.
    - `weight_decay`: The matrices decay by `learning_rate * weight_decay` in each step.

    **Returns:**

    An optimizer. A side with more than 10,000 elements has no statistics: then the other side has
    the inverse square root in place of the fourth root.

    **Raises:**

    `ValueError` if no array is a matrix, or a number is out of range; `TypeError` if an argument
    has another type.

    Shampoo is from [Gupta et al. (2018)](https://arxiv.org/abs/1802.09568), and grafting, moments
    and one-sided roots are those of [Anil et al. (2020)](https://arxiv.org/abs/2002.09018).

    !!! Example

        ```python
        import equinox as eqx
        import jax
        import jax.numpy as jnp
        import optax
        import redcoast as rc

        model = eqx.nn.MLP(8, 2, 16, 2, key=jax.random.key(0))
        loss_fn = lambda model, x, key: jnp.mean(jax.vmap(model)(x) ** 2)
        dimensions = rc.matrix_dimensions(model, loss_fn, jnp.zeros((4, 8)), None)
        optimizer = rc.shampoo(1e-3, dimensions, others=optax.adamw(3e-4))
        ```
    """
    options = SideOptions(b1, b2, statistics, eps, frequency)
    return optimizer_with_sides(
        "shampoo", learning_rate, dimensions, others, options, weight_decay, update=_update_states
    )


def _update_states(
    options: SideOptions, count: Int[Array, ""], states: list[ArrayState]
) -> list[ArrayState]:
    members = [x.as_matrices(x.moments.gradient) for x in states]
    update_stacks = ft.partial(_update_stacks, options)
    results = compute_divided(update_stacks, count, members, like=(0, 1, 2))
    updated: list[ArrayState] = []
    for x, (direction, left, right) in zip(states, results, strict=True):
        gradient, mu, nu = x.moments
        nu = options.b2 * nu + (1 - options.b2) * gradient**2
        unbiased_nu = nu / (1 - options.b2 ** (count + 1))
        update = direction * _norms(gradient / (jnp.sqrt(unbiased_nu) + _GRAFT_EPS), x.numbers)
        mu = options.b1 * mu + (1 - options.b1) * update
        unbiased_mu = mu / (1 - options.b1 ** (count + 1))
        updated.append(replace(x, moments=Moments(unbiased_mu, mu, nu), left=left, right=right))
    return updated


def _norms(x: Array, numbers: Numbers) -> Array:
    """The norm of each matrix of an array, with dimensions of size one in place of its sides."""
    inputs, outputs = sides_of(x, numbers)
    return jnp.sqrt(jnp.sum(x**2, axis=(*inputs, *outputs), keepdims=True))


def _update_stacks(
    options: SideOptions,
    count: Int[Array, ""],
    gradient: Matrices,
    left_statistics: Statistics,
    right_statistics: Statistics,
) -> list[Array]:
    """The directions of the updates, of norm one, and the statistics of both sides."""
    left, right = side_of(left_statistics), side_of(right_statistics)
    left = add_gradient(left, gradient, options.statistics)
    right = add_gradient(right, gradient.mT, options.statistics)
    is_due = count % options.frequency == 0
    root = ft.partial(_with_roots, options)
    left, right = jax.lax.cond(is_due, root, lambda *sides: sides, left, right)
    preconditioned = gradient
    if not left.is_empty:
        preconditioned = left.basis @ preconditioned
    if not right.is_empty:
        preconditioned = preconditioned @ right.basis
    norms = jnp.sqrt(jnp.sum(preconditioned**2, axis=(1, 2), keepdims=True))
    # A gradient of zeros has an update of zeros.
    direction = jnp.where(norms > 0, preconditioned / norms, 0)
    return [direction, as_statistics(left), as_statistics(right)]


def _with_roots(options: SideOptions, left: Side, right: Side) -> tuple[Side, Side]:
    """The sides with roots of their inverse statistics, of powers that add up to -1/2."""
    power = -0.25
    if left.is_empty or right.is_empty:
        power = -0.5
    return _with_root(left, power, options.eps), _with_root(right, power, options.eps)


def _with_root(side: Side, power: float, eps: float) -> Side:
    if side.is_empty:
        return side
    values, vectors = jnp.linalg.eigh(side.statistics)  # (matrices, size), (matrices, size, size)
    # Rounding makes small values negative.
    values = jnp.maximum(values, 0) + eps * values[:, -1:]
    powers = jnp.where(values > 0, values**power, 0)
    return side._replace(basis=(vectors * powers[:, None, :]) @ vectors.mT)
