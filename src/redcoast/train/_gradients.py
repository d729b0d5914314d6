"""Custom gradients, and trees without gradients."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from ..core._errors import check_kind
from ..core._pytree import map_where, show_path


def with_gradient(loss: Float[Array, ""], model: PyTree, gradient: PyTree) -> Float[Array, ""]:
    """Returns a scalar with the value of `loss` and the gradient `gradient` for `model`.

    Return it from a `loss_fn` to train with a custom gradient: the mean update of federated
    clients, clipped and noised per-example gradients, or the estimate of an evolution strategy.

    **Arguments:**

    - `loss`: a floating scalar. Its own gradient is ignored.
    - `model`: the model that `loss_fn` was called with.
    - `gradient`: a tree like `model` with an array of the same shape for each floating array, and
        `None` or anything else at other leaves. With `None`, that array gets no gradient.

    **Returns:**

    A scalar of the dtype of `loss`. If an element of `gradient` is NaN or infinite, it is NaN.

    `gradient` is not compared with the gradient of `loss`, from which it may differ on purpose. If
    both should be equal, compare them in a test, such as with `jax.grad` or, by finite differences,
    with `jax.test_util.check_grads`.

    **Raises:**

    `ValueError` if the gradient has another structure or shape than the model. `TypeError` if
    `loss` is not an array.

    !!! Example

        ```python
        def loss_fn(model, batch, key):
            loss, gradient = jax.value_and_grad(own_loss)(model, batch)
            return rc.with_gradient(loss, model, jax.tree.map(jnp.sign, gradient))
        ```
    """
    check_kind("loss", loss, jax.Array, "a floating scalar; the model is the second argument")
    params = eqx.filter(model, eqx.is_inexact_array)
    replacement = eqx.filter(gradient, eqx.is_inexact_array)
    gradients, arrays = _by_name(replacement), _by_name(params)
    if other := [name for name in gradients if name not in arrays]:
        raise ValueError(f"`gradient` has {other[0]}, which is not a floating array of `model`.")
    # The gradient of the loss itself is replaced by the given one.
    total = jax.lax.stop_gradient(loss)
    for name, g in gradients.items():
        x = arrays[name]
        if g.shape != x.shape:
            raise ValueError(
                f"`gradient` has shape {g.shape} at {name}, where `model` has {x.shape}."
            )
        # The value is zero. The products and the sum let the planner shard a gradient like its
        # parameter.
        zero = (x - jax.lax.stop_gradient(x)) * jax.lax.stop_gradient(g.astype(x.dtype))
        total = total + jnp.sum(zero).real.astype(total.dtype)
    return total


def _by_name(tree: PyTree) -> dict[str, Array]:
    named: dict[str, Array] = {}
    for path, x in jax.tree_util.tree_leaves_with_path(tree):
        named[show_path(path, "the model")] = x
    return named


def stop_gradient(tree: PyTree) -> PyTree:
    """Returns a tree whose arrays are constants in differentiation, such as a target network.

    **Arguments:**

    - `tree`: any PyTree.

    **Returns:**

    The same tree, with `jax.lax.stop_gradient` on each array.

    !!! Example

        ```python
        target = jax.vmap(rc.stop_gradient(model))(batch["x"])
        ```
    """
    return map_where(eqx.is_array, jax.lax.stop_gradient, tree)
