"""Moving averages of weights."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree


def moving_average(old: PyTree, new: PyTree, decay: float | Float[Array, ""]) -> PyTree:
    """Returns `decay * old + (1 - decay) * new`, for averages of weights and target networks.

    **Arguments:**

    - `old`: the average so far.
    - `new`: a tree of the same structure.
    - `decay`: a number between 0 and 1; with 1, the result is `old`.

    **Returns:**

    A tree with the dtypes of `old`. Leaves that are not floating arrays are taken from `new`.

    **Raises:**

    `ValueError` if the trees differ, or if `decay` is a number outside [0, 1].

    !!! Example

        ```python
        target = rc.moving_average(target, state.model, 0.995)
        ```
    """
    if isinstance(decay, int | float) and not 0 <= decay <= 1:
        raise ValueError(f"`decay` is {decay}. It must be between 0 and 1.")
    if jax.tree.structure(old) != jax.tree.structure(new):
        raise ValueError("`old` and `new` have different structures; average trees of one kind.")

    def mix(a: PyTree, b: PyTree) -> PyTree:
        if not eqx.is_inexact_array(a):
            return b
        # Subtracted in double precision: a decay of 0.9999 is 1 in bfloat16.
        share = jnp.asarray(1 - decay, a.real.dtype)
        # Where both are equal, the result is the same to the last bit.
        return a + share * (b.astype(a.dtype) - a)

    return jax.tree.map(mix, old, new)
