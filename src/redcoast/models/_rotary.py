"""Rotary position embeddings (Su et al., 2021, <https://arxiv.org/abs/2104.09864>)."""

import math
from dataclasses import dataclass
from typing import Literal

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from ._check_config import check_fields
from ._inputs import Positions

# The cosines and sines of the angles at each position.
Angles = tuple[Float[Array, "#batch seq 1 half"], Float[Array, "#batch seq 1 half"]]


@dataclass(frozen=True)
class RopeScaling:
    """Scales the wavelengths of rotary embeddings for contexts longer than in pretraining.

    **Arguments:**

    - `kind`: `"linear"` scales all wavelengths by `factor` (Chen et al., 2023). `"llama3"` scales
        wavelengths with fewer than `low` rotations in `original` tokens, keeps wavelengths with
        more than `high` rotations, and interpolates in between (Llama team, 2024). `"dynamic"`
        raises the base with the length of rows of more than `original` tokens. Tokens in a cache
        keep their base. Gemma does not support `"dynamic"`.
    - `factor`: the ratio of the new context length to the original one.
    - `low`, `high`: numbers of rotations, only used for `"llama3"`.
    - `original`: the original context length in tokens, for `"llama3"` and `"dynamic"`.
    """

    kind: Literal["linear", "llama3", "dynamic"]
    factor: int | float
    low: int | float = 1.0
    high: int | float = 4.0
    original: int = 8192

    def __post_init__(self):
        check_fields(self)
        if self.kind == "llama3" and not self.low < self.high:
            raise ValueError(f"`low` must be less than `high`, but {self.low} is not {self.high}.")


@dataclass(frozen=True)
class LongRope:
    """Divides the frequencies of rotary embeddings, each by its own factor (LongRoPE, Ding et al.,
    2024, <https://arxiv.org/abs/2402.13753>).

    **Arguments:**

    - `short`, `long`: the factors of rows of at most `original` tokens and of longer ones, one for
        each pair of rotated features. Tokens in a cache keep their factors, chosen by `generate`
        from the maximum length of a row.
    - `original`: the original context length in tokens.
    - `factor`: the cosines and sines are multiplied by it.
    """

    short: tuple[int | float, ...]
    long: tuple[int | float, ...]
    original: int
    factor: int | float = 1.0

    def __post_init__(self):
        check_fields(self)

    def check_pairs(self, pairs: int) -> None:
        """Raises if there is not one factor for each pair of rotated features."""
        for name, factors in (("short", self.short), ("long", self.long)):
            if len(factors) != pairs:
                raise ValueError(
                    f"`rope_scaling` has {len(factors)} factors in `{name}`, but there are {pairs} "
                    "pairs of rotated features. It must have one for each."
                )


@dataclass(frozen=True)
class Yarn:
    """Scales the wavelengths of rotary embeddings, and their size (YaRN, Peng et al., 2023,
    <https://arxiv.org/abs/2309.00071>).

    **Arguments:**

    - `factor`: the ratio of the new context length to the original one.
    - `original`: the original context length in tokens.
    - `fast`, `slow`: numbers of rotations in the original context. Wavelengths with at least `fast`
        are kept, wavelengths with at most `slow` are scaled by `factor`, and others are
        interpolated.
    - `rounded`: whether the bounds of the interpolated range are rounded to whole features.
    - `amplitude`: the cosines and sines are multiplied by it.
    """

    factor: int | float
    original: int
    fast: int | float = 32.0
    slow: int | float = 1.0
    rounded: bool = True
    amplitude: int | float = 1.0

    def __post_init__(self):
        check_fields(self)
        if not 0 < self.slow <= self.fast:
            raise ValueError(
                f"`slow` must be positive, and equal to or less than `fast`, but they are "
                f"{self.slow} and {self.fast}."
            )


def yarn_frequencies(head_dim: int, base: int | float, scaling: Yarn) -> Float[np.ndarray, " half"]:
    """Returns `rotary_frequencies`, scaled."""
    frequencies = rotary_frequencies(head_dim, base)
    first = _pair_with_turns(scaling.fast, head_dim, base, scaling.original)
    last = _pair_with_turns(scaling.slow, head_dim, base, scaling.original)
    if scaling.rounded:
        first, last = math.floor(first), math.ceil(last)
    # As published: the bound is the number of features, not of their pairs.
    first, last = max(first, 0), min(last, head_dim - 1)
    # A step instead of a ramp if both are the same.
    ramp = (np.arange(head_dim // 2) - first) / (last - first or 0.001)
    scaled = np.clip(ramp, 0, 1)  # 0 where a wavelength is kept, 1 where it is scaled
    return frequencies * (1 - scaled + scaled / scaling.factor)


def _pair_with_turns(turns: float, head_dim: int, base: int | float, original: int) -> float:
    """The pair of features that rotates this many times in the original context."""
    return head_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))


def scaled_angles(
    positions: Positions,
    head_dim: int,
    base: int | float,
    scaling: RopeScaling | Yarn | LongRope | None,
    dtype: DTypeLike,
    lengths: Int[Array, " batch"] | None = None,
) -> Angles:
    """Returns the cosines and sines of the angles at each position, which may be scaled. `lengths`
    are the final lengths of rows, for `LongRope`; by default, their current lengths."""
    if isinstance(scaling, Yarn):
        cos, sin = rotary_angles(positions, yarn_frequencies(head_dim, base, scaling), dtype)
        return cos * scaling.amplitude, sin * scaling.amplitude
    if isinstance(scaling, LongRope):
        frequencies = rotary_frequencies(head_dim, base)
        # Both are computed, because one batch may have short and long rows.
        short = rotary_angles(positions, frequencies / np.asarray(scaling.short, float), dtype)
        long = rotary_angles(positions, frequencies / np.asarray(scaling.long, float), dtype)
        is_long = jnp.max(positions, axis=1) >= scaling.original  # (batch,)
        if lengths is not None:
            is_long = is_long | (lengths > scaling.original)
        is_long = is_long[:, None, None, None]
        cos = jnp.where(is_long, long[0], short[0]) * scaling.factor
        return cos, jnp.where(is_long, long[1], short[1]) * scaling.factor
    if scaling is None or scaling.kind != "dynamic":
        return rotary_angles(positions, rotary_frequencies(head_dim, base, scaling), dtype)
    # The base grows with the length of a row: a factor for each pair of features.
    lengths = jnp.max(jnp.asarray(positions), axis=1) + 1  # (batch,)
    beyond = jnp.maximum(lengths / scaling.original, 1).astype(dtype) * scaling.factor
    growth = beyond - (scaling.factor - 1)  # (batch,)
    powers = jnp.asarray(np.arange(0, head_dim, 2) / max(head_dim - 2, 1), dtype)  # (half,)
    frequencies = jnp.asarray(rotary_frequencies(head_dim, base), dtype)[None]
    frequencies = frequencies * growth[:, None] ** -powers[None]  # (batch, half)
    angles = positions[:, :, None, None].astype(dtype) * frequencies[:, None, None]
    return jnp.cos(angles), jnp.sin(angles)


def rotary_frequencies(
    head_dim: int, base: int | float, scaling: RopeScaling | None = None
) -> Float[np.ndarray, " half"]:
    """Returns the angle in radians by which each pair of features rotates from one position to the
    next (equation 15)."""
    frequencies = float(base) ** -(np.arange(0, head_dim, 2) / head_dim)  # (half,)
    if scaling is None:
        return frequencies
    if scaling.kind == "dynamic":
        raise ValueError(
            "Rotary embeddings with `RopeScaling('dynamic')` depend on the length of a row, which "
            "is not implemented for this model."
        )
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    turns = scaling.original * frequencies / (2 * math.pi)  # rotations in the original context
    plain = np.clip(
        (turns - scaling.low) / (scaling.high - scaling.low), 0, 1
    )  # 1 where not scaled
    return frequencies * (plain + (1 - plain) / scaling.factor)


def rotary_angles(
    positions: Positions, frequencies: Float[np.ndarray, " half"], dtype: DTypeLike
) -> Angles:
    """Returns the cosines and sines of the angles at each position."""
    angles = positions[:, :, None, None].astype(dtype)  # (batch, seq, heads, half)
    angles = angles * jnp.asarray(frequencies, dtype)[None, None, None]
    return jnp.cos(angles), jnp.sin(angles)


def rotate(
    x: Float[Array, "batch seq heads head_dim"], angles: Angles
) -> Float[Array, "batch seq heads head_dim"]:
    """Rotates feature i with feature i + half, the convention of LLaMA's weights. Features beyond
    the angles are unchanged."""
    cos, sin = angles
    turned, rest = jnp.split(x, [2 * cos.shape[-1]], axis=-1)
    a, b = jnp.split(turned.astype(cos.dtype), 2, axis=-1)  # (batch, seq, heads, half)
    turned = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)
    if rest.shape[-1] == 0:
        return turned
    return jnp.concatenate([turned, rest], axis=-1)


def rotate_pairs(
    x: Float[Array, "batch seq heads head_dim"], angles: Angles
) -> Float[Array, "batch seq heads head_dim"]:
    """Rotates feature 2 i with feature 2 i + 1, the convention of GPT-J's weights. Features beyond
    the angles are unchanged."""
    cos, sin = angles
    turned, rest = jnp.split(x, [2 * cos.shape[-1]], axis=-1)
    a = turned[..., 0::2].astype(cos.dtype)  # (batch, seq, heads, half)
    b = turned[..., 1::2].astype(cos.dtype)
    # (batch, seq, heads, half, 2): the pairs stand together again.
    turned = jnp.stack([a * cos - b * sin, b * cos + a * sin], axis=-1)
    turned = turned.reshape(*x.shape[:-1], 2 * cos.shape[-1]).astype(x.dtype)
    return jnp.concatenate([turned, rest], axis=-1)
