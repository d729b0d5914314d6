"""Dequantises parts of tensors from 4-bit and 8-bit numbers with scales.

Only the bytes of a part and its scales are read. Products are computed in float32 and rounded once,
a few rows at a time, as `transformers` does.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import jax.numpy as jnp
import numpy as np

from ._lazy_tensor import Box, Stored

CACHED = 2**16  # numbers that fit into a processor's cache, in float32
_BYTES = np.arange(256, dtype=np.uint8)
FP8 = {np.dtype(jnp.float8_e4m3fn), np.dtype(jnp.float8_e5m2)}
# The value of each byte, (256,). Indexing such a table is faster than a cast from FP8.
_FP8_VALUES = {dtype: _BYTES.view(dtype).astype(np.float32) for dtype in FP8}
# 8-bit exponents (E8M0). The largest one, which encodes NaN, becomes infinite.
_POWERS = np.append(np.exp2(_BYTES[:255] - 127.0), np.inf).astype(np.float32)
# 4-bit numbers (E2M1): a sign, two exponent bits and one mantissa bit. A byte has two of them, the
# first one in the lower bits. Here they are doubled, so that half of any power is a number.
_DOUBLED = np.array([0, 1, 2, 3, 4, 6, 8, 12, -0.0, -1, -2, -3, -4, -6, -8, -12], np.float32)
_LOWER, _UPPER = np.tile(_DOUBLED, 16), np.repeat(_DOUBLED, 16)  # of each byte, (256,)
# Both numbers of a byte side by side, (256, 2), seen as one element so that one look-up has both.
_PAIRS = np.stack([_LOWER, _UPPER], axis=1).view(np.uint64)[:, 0]
_HALF_POWERS = np.exp2(_BYTES - 128.0).astype(np.float32)  # 2 ** (exponent - 127) / 2
# Products that overflow, or of infinite numbers.
_QUIET: dict[str, Any] = {"over": "ignore", "invalid": "ignore"}
EXPONENTS = {np.dtype(np.uint8), np.dtype(jnp.float8_e8m0fnu)}


class Misfit(ValueError):
    """Raised for a weight whose tensors do not match; `args[0]` says why."""


@dataclass(frozen=True)
class QuantisedTensor:
    """A tensor that several tensors of a file represent, before its dtype is chosen."""

    name: str
    parts: tuple[str, ...]  # the tensors that have no other purpose, which a file may lack
    shape: tuple[int, ...]
    read: Callable[[Box, np.ndarray], None]  # as of `Stored`


def read_scaled(
    weight: Stored, scale: Stored, block: tuple[int, int], box: Box, out: np.ndarray
) -> None:
    """Reads a part of a weight in FP8, whose blocks of `block` rows and columns have a scale.

    `scale` has the dimensions of the weight, counted in blocks.
    """
    table, raw = _FP8_VALUES[weight.dtype], weight.take(box).view(np.uint8)
    # The scales of the blocks in the part, and the block of each of its rows and columns.
    blocks, indices = [], []
    for part, size in zip(box[-2:], block, strict=True):
        first = part.start // size
        blocks.append(slice(first, (part.stop - 1) // size + 1))
        indices.append(np.arange(part.start, part.stop) // size - first)
    # A dimension of size 1 has one scale for all of the weight.
    outer = list(box[:-2])
    for dim in range(len(outer)):
        if scale.shape[dim] == 1:
            outer[dim] = slice(0, 1)
    grid = scale.take((*outer, *blocks))
    if scale.dtype in EXPONENTS:
        grid = _POWERS[grid.view(np.uint8)]
    grid = grid.astype(np.float32)
    block_of_row, block_of_column = indices
    for rows in _ranges(raw.shape[-2], raw.size // raw.shape[-2]):
        values = table[raw[..., rows, :]]  # (..., rows, columns)
        of_rows = grid.take(block_of_row[rows], axis=-2)  # (..., rows, blocks of columns)
        with np.errstate(**_QUIET):
            values *= of_rows.take(block_of_column, axis=-1)
        _bits(out)[..., rows, :] = _bits(values.astype(out.dtype))


def read_mxfp4(blocks: Stored, scales: Stored, box: Box, out: np.ndarray) -> None:
    """Reads a part of a tensor (experts, inputs, outputs) in MXFP4.

    `blocks` are (experts, outputs, groups, bytes), and `scales`, the exponents of the groups,
    (experts, outputs, groups).
    """
    inputs, size = box[1], 2 * blocks.shape[-1]  # numbers in a group: two in a byte
    groups = slice(inputs.start // size, (inputs.stop - 1) // size + 1)
    raw = blocks.take((box[0], box[2], groups, slice(0, size // 2)))
    exponents = scales.take((box[0], box[2], groups))  # (experts, outputs, groups)
    powers = _HALF_POWERS[exponents][..., None]
    # The groups are read whole, and may begin before the inputs and end after them.
    first = inputs.start - groups.start * size
    inside = slice(first, first + inputs.stop - inputs.start)
    for expert in range(len(raw)):
        for rows in _ranges(raw.shape[1], prod(raw.shape[2:]) * 2):
            pairs = _PAIRS[raw[expert, rows]].view(np.float32)  # (outputs, groups, numbers)
            with np.errstate(**_QUIET):
                pairs *= powers[expert, rows]
            values = pairs.reshape(len(pairs), -1)[:, inside].astype(out.dtype)  # (outputs, inputs)
            _bits(out)[expert, :, rows] = _bits(values).T


def _ranges(rows: int, width: int) -> Iterator[slice]:
    """Splits rows into ranges of at most `CACHED` numbers."""
    step = max(1, CACHED // width)
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


def _bits(x: np.ndarray) -> np.ndarray:
    # NumPy copies extension types such as bfloat16 element by element.
    return x.view(f"u{x.dtype.itemsize}")
