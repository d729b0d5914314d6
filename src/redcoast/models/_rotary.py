"""Rotary position embeddings (Su et al., 2021, <https://arxiv.org/abs/2104.09864>)."""

import math
from dataclasses import dataclass
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from ._checks import check_fields


@dataclass(frozen=True)
class RopeScaling:
    """How wavelengths are stretched for texts longer than those of the first training.

    **Arguments:**

    - `kind`: `"linear"` stretches all by `factor` (Chen et al., 2023); `"llama3"` stretches
        those that turn less than `low` times within `original` tokens, leaves those that turn more
        than `high` times, and blends in between (Llama team, 2024).
    - `factor`: how much longer the texts are.
    - `low`, `high`, `original`: of `"llama3"` alone; turns, turns, and tokens.
    """

    kind: Literal["linear", "llama3"]
    factor: int | float
    low: int | float = 1.0
    high: int | float = 4.0
    original: int = 8192

    def __post_init__(self):
        check_fields(self)
        if self.kind == "llama3" and not self.low < self.high:
            raise ValueError(f"`low` must be less than `high`, but {self.low} is not {self.high}.")


def rotary_frequencies(
    head_dim: int, base: int | float, scaling: RopeScaling | None = None
) -> Float[np.ndarray, " half"]:
    """The angle by which each pair of features turns from one position to the next, in radians
    (equation 15)."""
    frequencies = float(base) ** -(np.arange(0, head_dim, 2) / head_dim)
    if scaling is None:
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    turns = scaling.original * frequencies / (2 * math.pi)
    kept = np.clip((turns - scaling.low) / (scaling.high - scaling.low), 0, 1)
    return frequencies * (kept + (1 - kept) / scaling.factor)


def rotary_angles(
    positions: Int[Array, "#batch seq"], frequencies: Float[np.ndarray, " half"], dtype: Any
) -> tuple[Float[Array, "#batch seq 1 half"], Float[Array, "#batch seq 1 half"]]:
    """The cosines and sines of each position's angles."""
    angles = positions[:, :, None, None].astype(dtype)
    angles = angles * jnp.asarray(frequencies, dtype)[None, None, None]
    return jnp.cos(angles), jnp.sin(angles)


def rotate(
    x: Float[Array, "batch seq heads head_dim"],
    angles: tuple[Float[Array, "#batch seq 1 half"], Float[Array, "#batch seq 1 half"]],
) -> Float[Array, "batch seq heads head_dim"]:
    """Turns feature i with feature i + head_dim / 2, as in the weights of LLaMA's kind."""
    cos, sin = angles
    a, b = jnp.split(x.astype(cos.dtype), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def rotate_pairs(
    x: Float[Array, "batch seq heads head_dim"],
    angles: tuple[Float[Array, "#batch seq 1 half"], Float[Array, "#batch seq 1 half"]],
) -> Float[Array, "batch seq heads head_dim"]:
    """Turns feature 2 i with feature 2 i + 1, as in the weights of GPT-J's kind; features beyond
    the angles stay as they are."""
    cos, sin = angles
    turned, rest = jnp.split(x, [2 * cos.shape[-1]], axis=-1)
    a, b = (turned[..., i::2].astype(cos.dtype) for i in (0, 1))
    turned = jnp.stack([a * cos - b * sin, b * cos + a * sin], axis=-1)
    turned = turned.reshape(*x.shape[:-1], -1).astype(x.dtype)
    return jnp.concatenate([turned, rest], axis=-1)
