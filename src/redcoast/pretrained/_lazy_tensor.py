"""Arrays in files, of which parts are read."""

import itertools as it
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from math import prod
from typing import Any, TypeVar

import numpy as np

from ._tensors import Tensor

Box = tuple[slice, ...]
Item = TypeVar("Item")
Result = TypeVar("Result")
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


@dataclass(frozen=True)
class Source:
    """A published model.

    - `settings`: of a `config.json`, or what corresponds to it.
    - `stored`: the tensors, by name.
    - `table`: what the arrays of the model are made of, if not what the model itself says.
    """

    settings: dict[str, Any]
    stored: dict[str, Stored]
    table: dict[str, Tensor] | None = None


def aligned_empty(shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    """An array in memory so aligned that a CPU device takes it as it is, without a copy."""
    size = prod(shape) * dtype.itemsize
    memory = np.empty(size + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + size].view(dtype).reshape(shape)


def split_box(shape: Sequence[int], order: Sequence[int], most: int) -> list[Box]:
    """Boxes of one shape that cover an array of `shape`, each of at most `most` elements.

    It is cut along the dimensions in `order`. The last box may overlap the one before it, since
    for another shape another program would have to be compiled.
    """
    steps = list(shape)
    for i, d in enumerate(order):
        inside = prod(shape[e] for e in order[i + 1 :])
        if inside <= most:
            parts = -(-shape[d] // (most // inside))
            steps[d] = -(-shape[d] // parts)
            break
        steps[d] = 1
    starts = [[min(a, n - s) for a in range(0, n, s)] for n, s in zip(shape, steps, strict=True)]
    return [
        tuple(slice(a, a + s) for a, s in zip(at, steps, strict=True)) for at in it.product(*starts)
    ]


def ahead(
    fn: Callable[[Item], Result], items: Iterable[Item], *, workers: int
) -> Iterator[tuple[Item, Result]]:
    """Each item with `fn` of it, in order, computed in threads while those before it are used."""
    pending: deque[tuple[Item, Future[Result]]] = deque()

    def oldest() -> tuple[Item, Result]:
        item, future = pending.popleft()
        return item, future.result()

    with ThreadPoolExecutor(workers, thread_name_prefix="redcoast-read") as pool:
        for item in items:
            pending.append((item, pool.submit(fn, item)))
            if len(pending) > workers:
                yield oldest()
        while pending:
            yield oldest()
