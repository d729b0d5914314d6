"""Prompts: padded to lengths that few compilations cover, and with their ends aligned."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, Integer

Mask = Bool[Array, "batch seq"] | Integer[Array, "batch seq"]


def bucket(length: int) -> int:
    """The least of 16, 32, 48, ..., 128, 160, 192, ..., 256, 320, ... that holds `length`.

    From 64 on there are four lengths for each doubling: a program is compiled for few of them,
    and does at most a quarter more than is needed.
    """
    step = max(16, (1 << (length - 1).bit_length()) // 8)
    return -(-length // step) * step


def pad_columns(x: Any, length: int, *, left: bool) -> Any:
    """A matrix, of NumPy or JAX, with columns of zeros up to `length`."""
    free = length - x.shape[1]
    xp = np if isinstance(x, np.ndarray) else jnp
    return xp.pad(x, ((0, 0), (free, 0) if left else (0, free)))


def align_right(
    tokens: Integer[Array, "batch seq"], mask: Mask | None
) -> tuple[Int[Array, "batch seq"], Bool[Array, "batch seq"] | None]:
    """Prompts that all end in the last column, and what of them is real.

    The new tokens follow the last column, so padding on the right is rolled to the left.
    """
    tokens = tokens.astype(jnp.int32)
    if mask is None:
        return tokens, None
    real = mask.astype(bool)
    after = jnp.argmax(real[:, ::-1], axis=1)
    columns = (jnp.arange(tokens.shape[1])[None] - after[:, None]) % tokens.shape[1]
    real = jnp.take_along_axis(real, columns, axis=1)
    return blank(jnp.take_along_axis(tokens, columns, axis=1), real), real


def blank(tokens: Integer[Array, "batch seq"], mask: Mask) -> Integer[Array, "batch seq"]:
    """Zeros for padding, which may be no token of the vocabulary and would give NaN."""
    return jnp.where(mask.astype(bool), tokens, jnp.zeros((), tokens.dtype))
