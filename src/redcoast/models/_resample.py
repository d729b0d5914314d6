"""Bicubic resampling of tables of positions, as PyTorch computes it."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ._attention import wide


def resample(
    table: Float[Array, "positions width"], side: int, grid: tuple[int, int], *, filtered: bool
) -> Float[Array, "patches width"]:
    """Returns the positions of a grid of patches, given those of `side` by `side` patches.

    **Arguments:**

    - `table`: the positions, row by row.
    - `side`: the number of patches along the height and the width of the table.
    - `grid`: the number of patches along the height and the width of the result.
    - `filtered`: whether a smaller grid averages over more positions, to avoid aliasing.
    """
    if grid == (side, side):
        return table
    dtype = wide(table.dtype)
    rows, columns = (jnp.asarray(cubic_weights(side, n, filtered), dtype) for n in grid)
    square = table.astype(dtype).reshape(side, side, -1)
    found = jnp.einsum("ri,sj,ijd->rsd", rows, columns, square)
    return found.reshape(grid[0] * grid[1], -1).astype(table.dtype)


def cubic_weights(old: int, new: int, filtered: bool) -> Float[np.ndarray, "new old"]:
    """Returns the weights of the old positions for each new one. The kernel is Keys' (1981), with
    the parameter -1/2 if filtered, and -3/4 otherwise."""
    ratio = old / new
    centres = (np.arange(new) + 0.5) * ratio - 0.5
    if filtered:
        weights = _kernel((np.arange(old)[None] - centres[:, None]) / max(ratio, 1), -0.5)
        return weights / weights.sum(axis=1, keepdims=True)
    weights = np.zeros((new, old))
    taps = np.floor(centres).astype(int)[:, None] + np.arange(-1, 3)[None]
    # Beyond the border, the outermost position repeats.
    at = np.clip(taps, 0, old - 1)
    np.add.at(weights, (np.arange(new)[:, None], at), _kernel(taps - centres[:, None], -0.75))
    return weights


def _kernel(x: Float[np.ndarray, "..."], a: float) -> Float[np.ndarray, "..."]:
    x = np.abs(x)
    near = (a + 2) * x**3 - (a + 3) * x**2 + 1
    far = a * (x**3 - 5 * x**2 + 8 * x - 4)
    return np.where(x <= 1, near, np.where(x < 2, far, 0.0))
