"""Muon, with the matrices of all layers divided over the devices.

An orthogonalisation needs a whole matrix. With `optax.contrib.muon`, each device orthogonalises the
matrices of all layers if the parameters are replicated; if they are sharded, devices send parts of
each matrix in every iteration. Here, matrices of the same shape are stacked, and the stack is
divided over all axes of the mesh: each device has some matrices, and orthogonalises these alone.
"""

from collections.abc import Callable, Sequence

import jax
import optax
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import Array, PyTree

from ..core._errors import check_integer, check_kind, check_number, several
from ..core._frames import hide_frames, warn
from ..core._pytree import show_path
from ._divide import StoredMatrices, compute_divided
from ._matrix_stacks import (
    NUMBER,
    Matrices,
    Numbers,
    by_label,
    check_learning_rate,
    check_rates,
    numbers_of,
    sides_of,
    size_along,
    stored_matrices,
)


@hide_frames
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
    - `momentum`: The decay of the momentum in each step, in [0, 1).
    - `iterations`: The number of Newton-Schulz iterations.
    - `weight_decay`: The matrices decay by `learning_rate * weight_decay` in each step.
    - `rms`: If given, the root mean square of an update before the learning rate, whatever the
        matrix's shape; 0.2 is usual for updates like Adam's
        ([Liu et al., 2025](https://arxiv.org/abs/2502.16982)). By default an update is scaled by
        `sqrt(max(1, outputs / inputs))`.

    **Returns:**

    An optimizer.

    **Raises:**

    `ValueError` if no array is a matrix, or a number is out of range; `TypeError` if an argument
    has another type.

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
    check_learning_rate(learning_rate)
    check_rates(momentum=momentum)
    check_integer("iterations", iterations)
    check_kind("weight_decay", weight_decay, NUMBER, "a number")
    if rms is not None:
        check_number("rms", rms, above=0)
    matrices = optax.chain(
        optax.trace(momentum, nesterov=True),
        _orthogonalize(dimensions, iterations),
        _scale_by_shape(dimensions, rms),
        optax.add_decayed_weights(weight_decay),
        optax.scale_by_learning_rate(learning_rate),
    )
    return by_label("muon", dimensions, matrices, others)


def _is_muon_state(x: object) -> bool:
    return isinstance(x, optax.contrib.MuonState)


def warn_of_wrong_matrices(
    opt_state: PyTree,
    model: PyTree,
    loss_fn: Callable[..., Array | tuple],
    args: Sequence[PyTree],
    mesh: Mesh | AbstractMesh,
) -> None:
    """Warns if `optax.contrib.muon` is to find the matrices by their rank, and does not."""
    states = list(filter(_is_muon_state, jax.tree.leaves(opt_state, is_leaf=_is_muon_state)))
    if not states:
        return
    momentum = {path for path, _ in jax.tree_util.tree_leaves_with_path(states[0].mu)}
    leaves = jax.tree_util.tree_leaves_with_path(model)
    if any(path in momentum and x.ndim != 2 for path, x in leaves):
        return  # the user has chosen dimension numbers
    # Imported here, so that importing redcoast takes no longer for other runs.
    from ..sharding._weight_uses import find_uses

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


def _orthogonalize(
    dimensions: PyTree[Numbers | None], iterations: int
) -> optax.GradientTransformation:
    """Replaces each matrix by the nearest orthogonal one, up to the error of the iterations."""
    numbers = numbers_of(dimensions)

    def update(updates: PyTree, params: PyTree) -> PyTree:
        leaves, treedef = jax.tree.flatten_with_path(updates)
        members: list[list[StoredMatrices]] = []
        for (path, x), n in zip(leaves, numbers, strict=True):
            members.append([stored_matrices(x, n, path)])
        results = compute_divided(orthogonalize, (), members)
        return treedef.unflatten([orthogonal for (orthogonal,) in results])

    def orthogonalize(shared: tuple[()], stack: Matrices) -> list[Matrices]:
        return [_newton_schulz(stack, iterations)]

    return optax.stateless(update)


def _newton_schulz(stack: Matrices, iterations: int) -> Matrices:
    # Without momentum, this is the orthogonalisation alone.
    transformation = optax.contrib.scale_by_muon(
        ns_steps=iterations, beta=0.0, nesterov=False, weight_dimension_numbers=[Numbers(1, 2)]
    )
    orthogonal, _ = transformation.update([stack], transformation.init([stack]))
    return jax.tree.leaves(orthogonal)[0]


def _scale_by_shape(
    dimensions: PyTree[Numbers | None], rms: float | None
) -> optax.GradientTransformation:
    numbers = numbers_of(dimensions)

    def scaled(x: Array, n: Numbers) -> Array:
        sides = sides_of(x, n)
        inputs, outputs = size_along(x, sides[0]), size_along(x, sides[1])
        if rms is not None:
            # The root mean square of an orthogonal matrix is 1 / sqrt(max(inputs, outputs)).
            return x * (rms * max(inputs, outputs) ** 0.5)
        # As in the author's implementation: more outputs than inputs get larger updates.
        return x * max(1, outputs / inputs) ** 0.5

    def update(updates: PyTree, params: PyTree) -> PyTree:
        arrays, treedef = jax.tree.flatten(updates)
        return jax.tree.unflatten(treedef, map(scaled, arrays, numbers))

    return optax.stateless(update)
