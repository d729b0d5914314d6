"""Reads off a program which arrays of a model are matrices, for optimizers that orthogonalise them.

The shape of an array does not say what it is. A stack of matrices has rank 3, a stack of norm
scales rank 2 and an embedding rank 2. The program says it: a matrix is multiplied by activations,
and summed over some of its dimensions.
"""

from collections.abc import Callable
from math import prod

import jax
import optax
from jaxtyping import Array, PyTree

from ..core._errors import check_functions
from ..core._frames import hide_frames


@hide_frames
def matrix_dimensions(
    model: PyTree, fn: Callable[..., Array | tuple], *args: PyTree
) -> PyTree[optax.contrib.MuonDimensionNumbers | None]:
    """Finds the matrices of a model for Muon, from the program of its loss.

    Pass the result to `optax.contrib.muon` as `muon_weight_dimension_numbers`; without it, optax
    treats exactly the arrays of rank 2 as matrices. Here, an array is a matrix if the program
    multiplies activations by it, except embeddings, also tied ones, and the array of the last
    product before the loss (a language-model head). Norm scales and biases are not matrices either.
    Stacked layers, experts and members of an ensemble are separate matrices, and all heads are one.
    The inputs of a convolution are its window and its input channels.

    **Arguments:**

    - `model`: The model, or what of it is trained, with `None` elsewhere. Arrays may be
        `jax.ShapeDtypeStruct`s.
    - `fn`: The loss, `fn(model, *args)`, or another function. Its first result is the loss.
    - `args`: The other arguments, such as a batch and a key, which may be abstract.

    **Returns:**

    A tree like the model, with `optax.contrib.MuonDimensionNumbers` in place of each matrix and
    `None` in place of every other leaf.

    **Raises:**

    `ValueError` if the program multiplies by no array of the model.

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
        optimizer = optax.contrib.muon(1e-3, muon_weight_dimension_numbers=dimensions)
        ```
    """
    # Imported here, so that importing redcoast takes no longer for those who never plan.
    from ._weight_uses import find_uses

    check_functions(fn=fn)
    uses = find_uses(model, fn, args)
    if not uses.products:
        raise ValueError(
            "`fn` multiplies by no array of the model, so that there are no matrices. Pass the "
            "loss that is trained with, and its batch and key: "
            "`rc.matrix_dimensions(model, loss_fn, batch, key)`."
        )
    leaves, treedef = jax.tree.flatten(model)
    numbers: list[optax.contrib.MuonDimensionNumbers | None] = [None] * len(leaves)
    for place in uses.products.keys() - uses.lookups - uses.last_matrices(model):
        shape = leaves[place].shape
        summed, of_result = uses.products[place]
        # A dimension that is summed over is not a side of the result as well.
        free = of_result - summed
        rows = prod(map(shape.__getitem__, summed))
        columns = prod(map(shape.__getitem__, free))
        # A product with one row or column is one with a vector.
        if rows != 1 and columns != 1:
            sides = tuple(sorted(summed)), tuple(sorted(free))
            numbers[place] = optax.contrib.MuonDimensionNumbers(*sides)
    return jax.tree.unflatten(treedef, numbers)
