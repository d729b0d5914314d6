"""Checks of the arrays that a model is called with."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import PyTree

from ..core._errors import check_kind


def check_tokens(tokens: PyTree, vocab: int, *, name: str = "tokens", **beside: PyTree) -> None:
    """Raises if tokens are not integers of shape (batch, seq), if this process knows that one is
    not in the vocabulary, or if an array `beside` them, such as their mask, has another shape. It
    may have one row for all.

    - `vocab`: the size of the vocabulary.
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
    if not is_known(tokens):
        return
    ids = jax.device_get(tokens)
    outside = ids[(ids < 0) | (ids >= vocab)]
    if outside.size:
        raise ValueError(
            f"`{name}` holds {outside[0]}, but the token ids of the vocabulary are 0 to "
            f"{vocab - 1}. Replace other ids, also at padding, for example by 0."
        )


def check_floats(name: str, x: PyTree, dims: tuple[str, ...]) -> None:
    """Raises if images or sounds are not floating-point numbers with these dimensions."""
    check_kind(name, x, (jax.Array, np.ndarray), "an array of JAX or NumPy")
    if x.ndim != len(dims) or not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(
            f"`{name}` has dtype {x.dtype} and shape {x.shape}. It must have the shape "
            f"({', '.join(dims)}), and hold floating-point numbers that are normalised in the same "
            "way as in training."
        )


def refuse_mask(mask: object) -> None:
    """Raises if there is a mask of images or sounds, which would not be read."""
    if mask is not None:
        raise ValueError(
            "`mask` marks padding tokens, and the inputs of this model are images or sounds, which "
            "have none. Pass no `mask`."
        )


def is_known(x: object) -> bool:
    """Whether this process can read the values of an array now."""
    if isinstance(x, Tracer):
        return False
    return not isinstance(x, jax.Array) or x.is_fully_addressable
