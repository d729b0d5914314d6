"""Tensors in files, which are read in parts."""

import itertools as it
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from math import prod

import numpy as np

from ._settings import Settings
from ._tensors import Tensor

Box = tuple[slice, ...]
ALIGNMENT = 64  # bytes


@dataclass(frozen=True)
class Stored:
    """A tensor in a file.

    `read(box, out)` reads a box (one slice for each dimension) into `out`, an array with the shape
    of the box and the dtype of the tensor.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[Box, np.ndarray], None] = field(repr=False)

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def take(self, box: Box) -> np.ndarray:
        out = aligned_empty(box_shape(box), self.dtype)
        self.read(box, out)
        return out

    def take_whole(self) -> np.ndarray:
        return self.take(tuple(slice(0, size) for size in self.shape))


@dataclass(frozen=True)
class Source:
    """A pretrained model in files.

    - `table`: the tensors that each array of the model consists of, if they differ from the
      family's `tensors(config)`.
    """

    settings: Settings  # the settings of its `config.json`, or the equivalent
    stored: dict[str, Stored]  # its tensors, by name
    table: dict[str, Tensor] | None = None
    generation: Settings | None = None  # the options of its `generation_config.json`, if it has one


def bytes_by_dtype(tensors: Iterable[Stored]) -> Counter[np.dtype]:
    """The bytes of tensors, by their dtypes."""
    sizes = Counter[np.dtype]()
    for tensor in tensors:
        sizes[tensor.dtype] += tensor.nbytes
    return sizes


def box_shape(box: Box) -> list[int]:
    return [part.stop - part.start for part in box]


def aligned_empty(shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    """Allocates an array that is aligned so that a CPU device can use it without a copy."""
    size = prod(shape) * dtype.itemsize
    memory = np.empty(size + ALIGNMENT, np.uint8)
    # Bytes from the address of the memory to the next aligned one.
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + size].view(dtype).reshape(shape)


def split_box(shape: Sequence[int], order: Sequence[int], most: int) -> list[Box]:
    """Covers an array with boxes of one shape, each of at most `most` elements.

    The array is split along the dimensions in `order`. The last box may overlap the one before it:
    a box of a different shape would need another compilation.
    """
    steps = list(shape)
    # Steps of 1 in the slowest dimensions, until all faster ones together fit into a box; of that
    # dimension as many as fit, in parts of nearly equal size; and all of the faster ones.
    for i, d in enumerate(order):
        inside = prod(shape[e] for e in order[i + 1 :])
        if inside <= most:
            parts = -(-shape[d] // (most // inside))
            steps[d] = -(-shape[d] // parts)
            break
        steps[d] = 1
    parts = []
    for size, step in zip(shape, steps, strict=True):
        of_dimension = []
        for start in range(0, size, step):
            start = min(start, size - step)
            of_dimension.append(slice(start, start + step))
        parts.append(of_dimension)
    return list(it.product(*parts))
