"""The check of the arrays that a model of tokens is called with."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from ..core._errors import check_kind


def check_tokens(tokens: PyTree, *, name: str = "tokens", **beside: PyTree) -> None:
    """Raises if tokens are not integers of shape (batch, seq), or if an array `beside` them, such
    as their mask, has another shape. It may have one row for all.

    - `beside`: the arrays by their names; None if a call has no such array.
    """
    check_kind(name, tokens, (jax.Array, np.ndarray), f"an array, such as `np.array({name})`")
    if tokens.ndim != 2 or not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise ValueError(
            f"`{name}` has dtype {tokens.dtype} and shape {tokens.shape}. It must hold integers "
            "and have the shape (batch, seq)."
        )
    rows, length = tokens.shape
    for other, x in beside.items():
        if x is not None and np.shape(x) not in ((rows, length), (1, length)):
            raise ValueError(
                f"`{other}` has shape {np.shape(x)}, but `{name}` has shape {tokens.shape}. It "
                "must have the same shape, or one row for all."
            )
