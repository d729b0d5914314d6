"""Arrays in files, of which parts are read."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

import numpy as np

Box = tuple[slice, ...]
# Mapped pages count as memory of the process until they are unmapped: so much is mapped at once.
MAPPED_BYTES = 2**22
ALIGNMENT = 64


@dataclass(frozen=True)
class Stored:
    """An array in a file; `read(box, out)` reads the part in a box, one slice a dimension, into
    an array of that part's shape and of this dtype."""

    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[Box, np.ndarray], None] = field(repr=False)

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def take(self, box: Box) -> np.ndarray:
        out = aligned_empty([part.stop - part.start for part in box], self.dtype)
        self.read(box, out)
        return out


def aligned_empty(shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    """An array in memory so aligned that a CPU device takes it as it is, without a copy."""
    size = prod(shape) * dtype.itemsize
    memory = np.empty(size + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + size].view(dtype).reshape(shape)


def read_file(path: Path, offset: int, shape: tuple[int, ...], box: Box, out: np.ndarray) -> None:
    """Reads a part of the array of this shape that begins at the offset of a file, row by row."""
    if not shape:
        shape, box, out = (1,), (slice(0, 1),), out.reshape(1)
    row = prod(shape[1:]) * out.itemsize
    start, stop = box[0].start, box[0].stop
    if row > MAPPED_BYTES:
        for i in range(start, stop):
            read_file(path, offset + i * row, shape[1:], box[1:], out[i - start])
        return
    # NumPy lets other threads run while it copies types of its own, which bfloat16 is not.
    out = out.view(f"<u{out.itemsize}")
    step = MAPPED_BYTES // row
    for low in range(start, stop, step):
        high = min(low + step, stop)
        rows = np.memmap(path, out.dtype, "r", offset + low * row, (high - low, *shape[1:]))
        out[low - start : high - start] = rows[:, *box[1:]]
