"""Arrays in files, of which parts are read."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod

import numpy as np

Box = tuple[slice, ...]
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
