"""Muon, with the matrices of all layers divided over the devices.

An orthogonalisation needs a whole matrix. With `optax.contrib.muon`, each device orthogonalises the
matrices of all layers if the parameters are replicated; if they are sharded, devices send parts of
each matrix in every iteration. Here, matrices of the same shape are stacked, and the stack is
sharded over all axes of the mesh: each device has some matrices, and orthogonalises these alone.
"""

import functools as ft
from collections.abc import Callable, Hashable, Sequence
from math import prod

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, PyTree

from ..core._errors import several
from ..core._frames import warn
from ..core._pytree import show_path
from ..core._tracing import sizes_of_axes
from ..sharding import find_uses
from ._labels import labels_like

Numbers = optax.contrib.MuonDimensionNumbers
Matrices = Float[Array, "_ _ _"]  # (matrices, rows, columns)


def muon(
    learning_rate: optax.ScalarOrSchedule,
    dimensions: PyTree[Numbers | None],
    *,
    others: optax.GradientTransformation,
    momentum: float = 0.95,
    iterations: int = 5,
    weight_decay: float = 0.0,
    rms: float | None = None,
) -> optax.GradientTransformation:
    """Muon for the matrices of a model, and another optimizer for its other arrays.

    The updates are those of `optax.contrib.muon` with Nesterov momentum. In a step of redcoast on a
    mesh, the matrices are divided over all devices while they are orthogonalised, and none is
    orthogonalised twice. Each is sent once to the device that orthogonalises it, and once back.

    **Arguments:**

    - `learning_rate`: A number, or an `optax` schedule.
    - `dimensions`: Which arrays are matrices, and their dimensions, from
        [`redcoast.matrix_dimensions`][].
    - `others`: The optimizer of all other arrays, such as `optax.adamw(3e-4)`.
    - `momentum`: How much of the momentum is kept in each step, in [0, 1).
    - `iterations`: The number of Newton-Schulz iterations.
    - `weight_decay`: The matrices decay by `learning_rate * weight_decay` in each step.
    - `rms`: If given, the root mean square of an update before the learning rate, whatever the
        matrix's shape; 0.2 is usual for updates like Adam's
        ([Liu et al., 2025](https://arxiv.org/abs/2502.16982)). By default an update is scaled by
        `sqrt(max(1, outputs / inputs))`.

    **Returns:**

    An optimizer.

    **Raises:**

    `ValueError` if no array is a matrix, or a number is out of range.

    Muon is from [Jordan et al. (2024)](https://kellerjordan.github.io/posts/muon/).

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
        optimizer = rc.muon(0.02, dimensions, others=optax.adamw(3e-4))
        ```
    """
    if not 0 <= momentum < 1:
        raise ValueError(f"`momentum` must be at least 0 and less than 1, but is {momentum}.")
    if iterations < 1:
        raise ValueError(f"`iterations` must be at least 1, but is {iterations}.")
    if rms is not None and not rms > 0:
        raise ValueError(f"`rms` must be more than 0, but is {rms}.")
    if not any(map(_is_numbers, jax.tree.leaves(dimensions, is_leaf=_is_numbers))):
        raise ValueError(
            "`dimensions` has no matrix, only `None`. Pass the result of "
            "`rc.matrix_dimensions(model, loss_fn, batch, key)`."
        )
    label = lambda numbers: "matrix" if _is_numbers(numbers) else "other"
    labels = jax.tree.map(label, dimensions, is_leaf=lambda x: x is None or _is_numbers(x))
    matrices = optax.chain(
        optax.trace(momentum, nesterov=True),
        _orthogonalize(dimensions, iterations),
        _scale_by_shape(dimensions, rms),
        optax.add_decayed_weights(weight_decay),
        optax.scale_by_learning_rate(learning_rate),
    )

    # A function, since optax would call a tree that is a callable module.
    transformations: dict[Hashable, optax.GradientTransformation] = {
        "matrix": matrices,
        "other": others,
    }
    return optax.partition(transformations, ft.partial(_labels_of, labels))


def _labels_of(labels: PyTree[str], params: PyTree) -> PyTree[str]:
    try:
        return labels_like(labels, params)
    except ValueError as error:
        raise ValueError(
            "`dimensions` of `rc.muon` is not shaped like the parameters. Pass the result of "
            "`rc.matrix_dimensions` for the model that is trained."
        ) from error


def warn_of_wrong_matrices(
    opt_state: PyTree,
    model: PyTree,
    loss_fn: Callable[..., Array | tuple],
    args: Sequence[PyTree],
    mesh: Mesh | AbstractMesh,
) -> None:
    """Warns if `optax.contrib.muon` is to find the matrices by their rank, and does not."""
    is_muon = lambda x: isinstance(x, optax.contrib.MuonState)
    states = [x for x in jax.tree.leaves(opt_state, is_leaf=is_muon) if is_muon(x)]
    if not states:
        return
    momentum = {path for path, _ in jax.tree_util.tree_leaves_with_path(states[0].mu)}
    leaves = jax.tree_util.tree_leaves_with_path(model)
    if any(path in momentum and x.ndim != 2 for path, x in leaves):
        return  # the user has chosen dimension numbers
    uses = find_uses(model, loss_fn, args, mesh)
    others: list[str] = []
    hidden: list[str] = []
    for place, (path, x) in enumerate(leaves):
        # An embedding that is also the head is looked up, and Muon is not for it.
        is_matrix = place in uses.products and place not in uses.lookups
        if path in momentum and not is_matrix:
            others.append(show_path(path))
        if is_matrix and x.ndim > 2 and place not in uses.last:
            hidden.append(show_path(path))
    sentences = ["`optax.contrib.muon` treats all arrays of rank 2 as matrices, and no others."]
    if others:
        sentences.append(
            f"It orthogonalises {several(others)}, which are not matrices of the loss."
        )
    if hidden:
        sentences.append(f"It leaves matrices of a higher rank to Adam: {several(hidden)}.")
    if others or hidden:
        sentences.append(
            "Pass it `muon_weight_dimension_numbers=rc.matrix_dimensions(model, loss_fn, batch, "
            "key)`, or use `rc.muon`."
        )
        warn(" ".join(sentences))


def _is_numbers(x: PyTree) -> bool:
    return isinstance(x, Numbers)


def _numbers(dimensions: PyTree[Numbers | None]) -> list[Numbers]:
    """The dimension numbers of all matrices, in the order of the tree."""
    return [x for x in jax.tree.leaves(dimensions, is_leaf=_is_numbers) if _is_numbers(x)]


def _orthogonalize(
    dimensions: PyTree[Numbers | None], iterations: int
) -> optax.GradientTransformation:
    """Replaces each matrix by the nearest orthogonal one, up to the error of the iterations."""
    numbers = _numbers(dimensions)

    def update(updates: PyTree, params: PyTree) -> PyTree:
        arrays, treedef = jax.tree.flatten(updates)
        # (matrices, rows, columns) each, with the layers as matrices
        views = [_as_matrices(x, n) for x, n in zip(arrays, numbers, strict=True)]
        # Matrices of the same shape are one stack, whichever arrays they are from.
        places: dict[Hashable, list[int]] = {}
        for place, view in enumerate(views):
            places.setdefault((*view.shape[1:], str(view.dtype)), []).append(place)
        stacks: list[Matrices] = []
        for members in places.values():
            stack = jnp.concatenate([views[place] for place in members])
            # Each device iterates on its own matrices, which needs no communication until the end.
            stacks.append(_divided(stack))
        orthogonal = _newton_schulz(stacks, iterations)
        for stack, members in zip(orthogonal, places.values(), strict=True):
            first = 0
            for place in members:
                count = views[place].shape[0]
                views[place] = stack[first : first + count]
                first += count
        pairs = zip(views, arrays, numbers, strict=True)
        return jax.tree.unflatten(treedef, [_as_array(*pair) for pair in pairs])

    return optax.stateless(update)


def _newton_schulz(stacks: list[Matrices], iterations: int) -> list[Matrices]:
    # Without momentum, this is the orthogonalisation alone.
    transformation = optax.contrib.scale_by_muon(
        ns_steps=iterations,
        beta=0.0,
        nesterov=False,
        weight_dimension_numbers=[Numbers(1, 2)] * len(stacks),
    )
    orthogonal, _ = transformation.update(stacks, transformation.init(stacks))
    return list(jax.tree.leaves(orthogonal))


def _divided(stack: Matrices) -> Matrices:
    """A stack with a number of matrices that divides over all devices, and is sharded so."""
    axes = {axis: size for axis, size in sizes_of_axes().items() if size > 1}
    if not axes:
        return stack
    # Matrices of zeros stay zeros, and are cut off.
    missing = -stack.shape[0] % prod(axes.values())
    padded = jnp.pad(stack, ((0, missing), (0, 0), (0, 0)))
    return jax.lax.with_sharding_constraint(padded, P(tuple(axes)))


def _order(x: Array, numbers: Numbers) -> tuple[tuple[int, ...], int, int]:
    """The dimensions in the order (matrices, rows, columns), and the numbers of rows and columns.

    The larger side is that of the columns: the transpose of an orthogonal matrix is orthogonal.
    """
    rows, columns = _sides(x, numbers)
    sizes = [prod(x.shape[d] for d in dims) for dims in (rows, columns)]
    # The iteration multiplies the smaller side with itself.
    if sizes[0] > sizes[1]:
        rows, columns = columns, rows
    # All dimensions that are on neither side, such as layers and experts.
    stacked = tuple(d for d in range(x.ndim) if d not in (*rows, *columns))
    return (*stacked, *rows, *columns), min(sizes), max(sizes)


def _sides(x: Array, numbers: Numbers) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The dimensions of the inputs and of the outputs; `optax` lets each be a number."""
    sides = []
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


def _as_matrices(x: Array, numbers: Numbers) -> Matrices:
    order, rows, columns = _order(x, numbers)
    return x.transpose(order).reshape(-1, rows, columns)


def _as_array(matrices: Matrices, like: Array, numbers: Numbers) -> Array:
    """The inverse of `_as_matrices`."""
    order, _, _ = _order(like, numbers)
    inverse = sorted(range(like.ndim), key=order.__getitem__)
    return matrices.reshape([like.shape[d] for d in order]).transpose(inverse)


def _scale_by_shape(
    dimensions: PyTree[Numbers | None], rms: float | None
) -> optax.GradientTransformation:
    numbers = _numbers(dimensions)

    def scaled(x: Array, n: Numbers) -> Array:
        inputs, outputs = (prod(x.shape[d] for d in dims) for dims in _sides(x, n))
        if rms is not None:
            # An orthogonal matrix has this root mean square times `rms`.
            return x * (rms * max(inputs, outputs) ** 0.5)
        # As in the author's implementation: more outputs than inputs get larger updates.
        return x * max(1, outputs / inputs) ** 0.5

    def update(updates: PyTree, params: PyTree) -> PyTree:
        arrays, treedef = jax.tree.flatten(updates)
        return jax.tree.unflatten(treedef, map(scaled, arrays, numbers))

    return optax.stateless(update)
