"""SOAP: Adam in the eigenbasis of Shampoo's statistics, for the matrices of all layers.

The eigenvectors are computed anew every few steps, by one step of orthogonal iteration.
"""

import functools as ft
from dataclasses import replace

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Int, PyTree

from ..core._frames import hide_frames
from ._divide import StoredMatrices, compute_divided
from ._matrix_stacks import Matrices, Numbers
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


@hide_frames
def soap(
    learning_rate: optax.ScalarOrSchedule,
    dimensions: PyTree[Numbers | None],
    *,
    others: optax.GradientTransformation,
    b1: float = 0.95,
    b2: float = 0.95,
    statistics: float = 0.95,
    eps: float = 1e-8,
    frequency: int = 10,
    weight_decay: float = 0.0,
) -> optax.GradientTransformation:
    """SOAP for the matrices of a model, and another optimizer for its other arrays.

    In a step of redcoast on a mesh, the matrices are divided over all devices, and no product or
    decomposition is computed twice. Each device stores the statistics of its own matrices, if the
    layers are stacked.

    **Arguments:**

    - `learning_rate`: A number, or an `optax` schedule.
    - `dimensions`: Which arrays are matrices, and their dimensions, from
        [`redcoast.matrix_dimensions`][].
    - `others`: The optimizer of all other arrays, such as `optax.adamw(3e-4)`.
    - `b1`, `b2`: The decays of the moving averages of the gradients and of their squares, in
        [0, 1).
    - `statistics`: The decay of the moving average of the statistics of each side, in [0, 1).
    - `eps`: Added to the root of the squares.
    - `frequency`: The number of steps between computations of the eigenvectors.
    - `weight_decay`: The matrices decay by `learning_rate * weight_decay` in each step.

    **Returns:**

    An optimizer. Its first update of the matrices is zero, and initialises the statistics. A side
    with more than 10,000 elements has no statistics.

    **Raises:**

    `ValueError` if no array is a matrix, or a number is out of range; `TypeError` if an argument
    has another type.

    SOAP is from [Vyas et al. (2024)](https://arxiv.org/abs/2409.11321).

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
        optimizer = rc.soap(3e-3, dimensions, others=optax.adamw(3e-4))
        ```
    """
    options = SideOptions(b1, b2, statistics, eps, frequency)
    return optimizer_with_sides(
        "soap", learning_rate, dimensions, others, options, weight_decay, update=_update_states
    )


def _update_states(
    options: SideOptions, count: Int[Array, ""], states: list[ArrayState]
) -> list[ArrayState]:
    members: list[list[StoredMatrices]] = []
    means: list[Array] = []
    for x in states:
        gradient, mu, nu = x.moments
        mu = options.b1 * mu + (1 - options.b1) * gradient
        means.append(mu)
        members.append(x.as_matrices(gradient, mu, nu))
    update_stacks = ft.partial(_update_stacks, options)
    results = compute_divided(update_stacks, count, members, like=(0, 2, 3, 4))
    updated: list[ArrayState] = []
    for x, mu, (update, nu, left, right) in zip(states, means, results, strict=True):
        # The first gradient only begins the statistics.
        mu = jnp.where(count == 0, 0, mu)
        updated.append(replace(x, moments=Moments(update, mu, nu), left=left, right=right))
    return updated


def _update_stacks(
    options: SideOptions,
    count: Int[Array, ""],
    gradient: Matrices,
    mu: Matrices,
    nu: Matrices,
    left_statistics: Statistics,
    right_statistics: Statistics,
) -> list[Array]:
    """The updates, the means of squares in the basis, and the statistics of both sides."""
    left, right = side_of(left_statistics), side_of(right_statistics)
    rotated = _rotate(gradient, left.basis, right.basis)
    nu = options.b2 * nu + (1 - options.b2) * rotated**2
    # How many gradients the means are of, without the first.
    steps = jnp.maximum(count, 1)
    unbiased_mu = _rotate(mu, left.basis, right.basis) / (1 - options.b1**steps)
    unbiased_nu = nu / (1 - options.b2**steps)
    parts = unbiased_mu / (jnp.sqrt(unbiased_nu) + options.eps)
    update = _rotate(parts, left.basis.mT, right.basis.mT)  # back
    is_first = count == 0
    nu = jnp.where(is_first, 0, nu)
    update = jnp.where(is_first, 0, update)
    left = add_gradient(left, gradient, options.statistics)
    right = add_gradient(right, gradient.mT, options.statistics)
    is_due = count % options.frequency == 0
    branch = jnp.where(is_first, 2, jnp.where(is_due, 1, 0))
    branches = [lambda *state: state, _iterate, _decompose]
    left, right, nu = jax.lax.switch(branch, branches, left, right, nu)
    return [update, nu, as_statistics(left), as_statistics(right)]


def _rotate(x: Matrices, left: Matrices, right: Matrices) -> Matrices:
    """Matrices in the basis of the eigenvectors."""
    if left.shape[1]:
        x = left.mT @ x
    if right.shape[1]:
        x = x @ right
    return x


def _decompose(left: Side, right: Side, nu: Matrices) -> tuple[Side, Side, Matrices]:
    """The eigenvectors of the first statistics, those of the largest values first."""
    sides: list[Side] = []
    for side in (left, right):
        if not side.is_empty:
            # The smallest values are first.
            vectors = jnp.linalg.eigh(side.statistics)[1]
            side = side._replace(basis=vectors[:, :, ::-1])
        sides.append(side)
    return sides[0], sides[1], nu


def _iterate(left: Side, right: Side, nu: Matrices) -> tuple[Side, Side, Matrices]:
    """One step of orthogonal iteration, of columns in the order of their values."""
    # The squares of gradients are in this basis, and move with its vectors.
    if not left.is_empty:
        left, order = _next_basis(left)
        nu = jnp.take_along_axis(nu, order[:, :, None], axis=1)
    if not right.is_empty:
        right, order = _next_basis(right)
        nu = jnp.take_along_axis(nu, order[:, None, :], axis=2)
    return left, right, nu


def _next_basis(side: Side) -> tuple[Side, Int[Array, "_ _"]]:
    product = side.statistics @ side.basis
    # Rayleigh quotients, which estimate the eigenvalues: (matrices, size).
    values = jnp.sum(side.basis * product, axis=1)
    order = jnp.argsort(-values, axis=1)
    # The vectors of larger values come first, and are changed the least.
    ordered = jnp.take_along_axis(product, order[:, None, :], axis=2)
    return side._replace(basis=jnp.linalg.qr(ordered)[0]), order
