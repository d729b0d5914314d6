"""SOAP: Adam in the eigenbasis of Shampoo's statistics, for the matrices of all layers.

The statistics of a matrix are products of its gradients along each side. Adam runs in the basis of
their eigenvectors, which are computed anew every few steps, by one step of orthogonal iteration.
Products with these bases, and the decompositions, take most of the time: matrices of the same shape
are stacked, and each device computes with some of them.
"""

from collections.abc import Hashable, Sequence
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

Statistics = Float[Array, "_ 2 _ _"]  # (matrices, statistics and eigenvectors, size, size)

_LARGEST = 10_000  # a longer side has no statistics, as in the published implementation


class SoapState(NamedTuple):
    """The state of SOAP.

    `mu` and `nu` are the means of the gradients and, in the eigenbasis, of their squares. `left`
    and `right` have, for the shorter and for the longer side of each matrix, the statistics and
    their eigenvectors, `(matrices, 2, size, size)`; they are empty for sides that are too long.
    """

    step: Int[Array, ""]
    mu: PyTree[Array]
    nu: PyTree[Array]
    left: PyTree[Array]
    right: PyTree[Array]


class _Stack(NamedTuple):
    """What is computed with for matrices of the same shape."""

    gradient: Matrices
    mu: Matrices
    nu: Matrices
    left: Statistics
    right: Statistics


class _Options(NamedTuple):
    b1: float
    b2: float
    statistics: float
    eps: float
    frequency: int


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
    decomposition is computed twice. The statistics of stacked layers are stored so.

    **Arguments:**

    - `learning_rate`: A number, or an `optax` schedule.
    - `dimensions`: Which arrays are matrices, and their dimensions, from
        [`redcoast.matrix_dimensions`][].
    - `others`: The optimizer of all other arrays, such as `optax.adamw(3e-4)`.
    - `b1`, `b2`: How much of the mean of the gradients, and of their squares, is kept in each step,
        in [0, 1).
    - `statistics`: How much of the statistics of each side is kept in each step, in [0, 1).
    - `eps`: Added to the root of the squares.
    - `frequency`: The eigenvectors are computed every so many steps.
    - `weight_decay`: The matrices decay by `learning_rate * weight_decay` in each step.

    **Returns:**

    An optimizer. Its first update of the matrices is zero: it begins the statistics. A side with
    more than 10,000 elements has no statistics.

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
    check_learning_rate(learning_rate)
    check_rates(b1=b1, b2=b2, statistics=statistics)
    check_number("eps", eps, above=0)
    check_integer("frequency", frequency)
    check_kind("weight_decay", weight_decay, NUMBER, "a number")
    matrices = optax.chain(
        _scale_by_soap(dimensions, _Options(b1, b2, statistics, eps, frequency)),
        optax.add_decayed_weights(weight_decay),
        optax.scale_by_learning_rate(learning_rate),
    )
    return by_label("soap", dimensions, matrices, others)


def _scale_by_soap(
    dimensions: PyTree[Numbers | None], options: _Options
) -> optax.GradientTransformation:
    numbers = numbers_of(dimensions)

    def init(params: PyTree) -> SoapState:
        arrays, treedef = jax.tree.flatten(params)
        left: list[Statistics] = []
        right: list[Statistics] = []
        for x, n in zip(arrays, numbers, strict=True):
            # (matrices, rows, columns)
            shape = jax.eval_shape(lambda x, n=n: as_matrices(x, n), x).shape
            left.append(_statistics(shape, 1))
            right.append(_statistics(shape, 2))
        # Two trees: a step donates its state, and no array may be donated twice.
        mu = jax.tree.map(_float32_zeros, params)
        nu = jax.tree.map(_float32_zeros, params)
        step = jnp.zeros((), jnp.int32)
        return SoapState(step, mu, nu, treedef.unflatten(left), treedef.unflatten(right))

    def update(
        updates: PyTree, state: PyTree, params: PyTree | None = None
    ) -> tuple[PyTree, SoapState]:
        treedef = jax.tree.structure(updates)
        stacks: list[_Stack] = []
        for *arrays, n in zip(*map(jax.tree.leaves, (updates, *state[1:])), numbers, strict=True):
            shaped = [as_matrices(x.astype(jnp.float32), n) for x in arrays[:3]]
            stacks.append(_Stack(*shaped, *arrays[3:]))  # the statistics are stacks already
        results = _together(options, state.step, stacks)
        new: list[list[Array]] = []
        for stack, x, n in zip(results, jax.tree.leaves(updates), numbers, strict=True):
            shaped = [from_matrices(y, x, n) for y in stack[:3]]
            new.append([shaped[0].astype(x.dtype), *shaped[1:], *stack[3:]])
        step = jnp.asarray(optax.safe_increment(state.step))
        trees = [treedef.unflatten(part) for part in zip(*new, strict=True)]
        return trees[0], SoapState(step, *trees[1:])

    return optax.GradientTransformation(init, update)


def _float32_zeros(x: Array) -> Float[Array, "..."]:
    return jnp.zeros_like(x, dtype=jnp.float32)


def _statistics(shape: tuple[int, ...], side: int) -> Statistics:
    size = shape[side]
    if size > _LARGEST:
        size = 0  # the arrays are empty
    return jnp.zeros((shape[0], 2, size, size))


def _together(options: _Options, count: Int[Array, ""], stacks: Sequence[_Stack]) -> list[_Stack]:
    """The next state of all matrices, with the update in place of the gradient."""
    places: dict[Hashable, list[int]] = {}
    for place, stack in enumerate(stacks):
        alone = missing_matrices(stack.gradient.shape[0]) == 0
        shape: Hashable = stack.gradient.shape[1:]
        # A stack that all devices divide stays as it is stored.
        if alone and dividing_axes():
            shape = shape, place
        places.setdefault(shape, []).append(place)
    results: list[_Stack] = list(stacks)
    for members in places.values():
        parts = zip(*(stacks[place] for place in members), strict=True)
        joined = _Stack(*map(jnp.concatenate, parts))
        stack = _divide(options, count, joined)
        first = 0
        for place in members:
            last = first + stacks[place].gradient.shape[0]
            results[place] = _Stack(*(x[first:last] for x in stack))
            first = last
    return results


def _divide(options: _Options, count: Int[Array, ""], stack: _Stack) -> _Stack:
    """The next state of a stack, of which each device computes a part."""
    run = lambda count, stack: _next(options, count, stack)
    mesh, axes = traced_mesh(), dividing_axes()
    if mesh is None or not axes:
        return run(count, stack)
    missing = missing_matrices(stack.gradient.shape[0])
    padded = [jnp.pad(x, ((0, missing), *[(0, 0)] * (x.ndim - 1))) for x in stack]
    # The compiler would gather the operands of decompositions.
    local = jax.shard_map(
        run, mesh=mesh, in_specs=(P(), P(axes)), out_specs=P(axes), check_vma=False
    )
    return local(count, _Stack(*padded))


def _next(options: _Options, count: Int[Array, ""], stack: _Stack) -> _Stack:
    gradient = stack.gradient
    left, right = _Side(*_unstack(stack.left)), _Side(*_unstack(stack.right))
    mu = options.b1 * stack.mu + (1 - options.b1) * gradient
    rotated = _rotate(gradient, left.basis, right.basis)
    nu = options.b2 * stack.nu + (1 - options.b2) * rotated**2
    # How many gradients the means are of, without the first.
    steps = jnp.maximum(count, 1)
    unbiased_mu = _rotate(mu, left.basis, right.basis) / (1 - options.b1**steps)
    unbiased_nu = nu / (1 - options.b2**steps)
    parts = unbiased_mu / (jnp.sqrt(unbiased_nu) + options.eps)
    update = _rotate_back(parts, left.basis, right.basis)
    # The first gradient only begins the statistics.
    is_first = count == 0
    mu = jnp.where(is_first, 0, mu)
    nu = jnp.where(is_first, 0, nu)
    update = jnp.where(is_first, 0, update)
    left = _add(options, left, gradient)
    right = _add(options, right, gradient.mT)
    is_due = count % options.frequency == 0
    branch = jnp.where(is_first, 2, jnp.where(is_due, 1, 0))
    branches = [lambda *state: state, _iterate, _decompose]
    left, right, nu = jax.lax.switch(branch, branches, left, right, nu)
    return _Stack(update, mu, nu, jnp.stack(left, axis=1), jnp.stack(right, axis=1))


class _Side(NamedTuple):
    """The statistics of one side of matrices, and their eigenvectors."""

    statistics: Matrices
    basis: Matrices

    @property
    def is_empty(self) -> bool:
        return self.basis.shape[1] == 0


def _unstack(x: Statistics) -> tuple[Matrices, Matrices]:
    return x[:, 0], x[:, 1]


def _add(options: _Options, side: _Side, gradient: Matrices) -> _Side:
    """Adds the products of the rows of gradients."""
    if side.is_empty:
        return side
    product = gradient @ gradient.mT
    mean = options.statistics * side.statistics + (1 - options.statistics) * product
    return side._replace(statistics=mean)


def _rotate(x: Matrices, left: Matrices, right: Matrices) -> Matrices:
    """Matrices in the basis of the eigenvectors."""
    if left.shape[1]:
        x = left.mT @ x
    if right.shape[1]:
        x = x @ right
    return x


def _rotate_back(x: Matrices, left: Matrices, right: Matrices) -> Matrices:
    if left.shape[1]:
        x = left @ x
    if right.shape[1]:
        x = x @ right.mT
    return x


def _decompose(left: _Side, right: _Side, nu: Matrices) -> tuple[_Side, _Side, Matrices]:
    """The eigenvectors of the first statistics, those of the largest values first."""
    sides: list[_Side] = []
    for side in (left, right):
        if not side.is_empty:
            # The smallest values are first.
            vectors = jnp.linalg.eigh(side.statistics)[1]
            side = side._replace(basis=vectors[:, :, ::-1])
        sides.append(side)
    return sides[0], sides[1], nu


def _iterate(left: _Side, right: _Side, nu: Matrices) -> tuple[_Side, _Side, Matrices]:
    """One step of orthogonal iteration, of columns in the order of their values."""
    # The squares of gradients are in this basis, and move with its vectors.
    if not left.is_empty:
        left, order = _next_basis(left)
        nu = jnp.take_along_axis(nu, order[:, :, None], axis=1)
    if not right.is_empty:
        right, order = _next_basis(right)
        nu = jnp.take_along_axis(nu, order[:, None, :], axis=2)
    return left, right, nu


def _next_basis(side: _Side) -> tuple[_Side, Int[Array, "_ _"]]:
    product = side.statistics @ side.basis
    # Rayleigh quotients, which estimate the eigenvalues: (matrices, size).
    values = jnp.sum(side.basis * product, axis=1)
    order = jnp.argsort(-values, axis=1)
    # The vectors of larger values come first, and are changed the least.
    ordered = jnp.take_along_axis(product, order[:, None, :], axis=2)
    return side._replace(basis=jnp.linalg.qr(ordered)[0]), order
