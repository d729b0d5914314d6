"""Loads batches to the devices, a few batches ahead."""

from collections.abc import Callable, Generator, Iterable, Iterator
from time import perf_counter
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import PyTree, UInt64

from ..core._iterate import map_in_threads
from ..distributed._arrays import own_rows, place_batch, place_rows
from ..distributed._mesh import batch_shards
from ._collate import CollateFn, check_alike, collate
from ._in_turn import InTurn
from ._per_batch import has_per_batch, without_marks
from ._permutation import batch_indices, example_generators
from ._sources import StreamReader, by_epoch, fetch

T = TypeVar("T")
U = TypeVar("U")
WORKERS, AHEAD = 2, 4
CHEAP, DELAY = 0.2e-3, 10e-3  # seconds


class Loaded(NamedTuple):
    """A batch on the devices: its arrays, its number of examples, and the position of its end."""

    arrays: PyTree
    rows: int
    position: int
    stream: Any = None  # the encoded state of the stream after this batch
    per_batch: bool = False  # whether some arrays do not have one row for each example


# Of some rows of a batch: their examples, the indices of these, and their generators.
ReadRows = Callable[[list[int]], tuple[list[Any], list[int], Callable[[], Any]]]


class Collating:
    """Makes the batches of a loop on the host, and places them on the devices of a mesh.

    Each process collates only the rows of its own devices, unless `collate_fn` marks arrays that
    belong to the whole batch.
    """

    def __init__(self, collate_fn: CollateFn, mesh: Mesh):
        self._collate_fn, self._mesh = collate_fn, mesh
        self._in_turn, self._whole = InTurn(), False

    def host_batch(self, rows: int, read: ReadRows) -> PyTree:
        """The batch of so many rows that `collate_fn` returned, with its marks."""
        own = list(range(rows)) if self._whole else own_rows(self._mesh, rows)
        found, indices, rngs = read(own)
        batch = collate(self._collate_fn, found, indices, rngs, self._in_turn)
        if len(own) < rows and has_per_batch(batch):
            self._whole = True
            return self.host_batch(rows, read)
        return batch

    def __call__(self, rows: int, position: int, read: ReadRows, stream: Any = None) -> Loaded:
        batch = self.host_batch(rows, read)
        arrays, per_batch = without_marks(batch), has_per_batch(batch)
        if per_batch:
            placed = place_batch(arrays, self._mesh, kinds=(np.ndarray, jax.Array))
        else:
            placed = place_rows(arrays, self._mesh, rows)
        return Loaded(placed, rows, position, stream, per_batch)


def training_batches(
    examples: Any,
    collate_fn: CollateFn,
    *,
    batch_size: int,
    seed: UInt64[np.ndarray, "2"],
    start: int,
    stop: int,
    mesh: Mesh,
) -> Generator[Loaded, None, None]:
    """Yields the batches from one position of a run to another, in a new order in each epoch."""
    of_epoch, length = by_epoch(examples)
    reading, collating = InTurn(), Collating(collate_fn, mesh)

    def make(batch: tuple[int, list[int], list[int]]) -> Loaded:
        begin, *parts = batch
        rows = len(parts[0])

        def read(own: list[int]) -> tuple[list[Any], list[int], Callable[[], Any]]:
            epochs, indices = ([x[i] for i in own] for x in parts)
            found: list[Any] = []
            for epoch in dict.fromkeys(epochs):
                first = epochs.index(epoch)
                of_one = indices[first : first + epochs.count(epoch)]
                with of_epoch.using(epoch) as dataset:
                    found += fetch(dataset, of_one, reading)
            return found, indices, lambda: example_generators(epochs, indices, seed)

        return collating(rows, begin + rows, read)

    positions = range(start, stop, batch_size)
    indices = batch_indices(start, stop, batch_size, length, seed)
    batches = ((p, *found) for p, found in zip(positions, indices, strict=True))
    return check_alike(prefetch(make, batches))


def stream_batches(
    stream: Any,
    collate_fn: CollateFn,
    *,
    batch_size: int,
    seed: UInt64[np.ndarray, "2"],
    start: int,
    stop: int | None,
    mesh: Mesh,
) -> Generator[Loaded, None, None]:
    """Yields the batches of a stream from its current state, each with the state after it."""

    collating = Collating(collate_fn, mesh)

    def read() -> Iterator[tuple[int, list[Any], Any]]:
        position, reader = start, StreamReader(stream, used=AHEAD + WORKERS + 1)
        while stop is None or position < stop:
            wanted = batch_size if stop is None else min(batch_size, stop - position)
            found = reader(wanted)
            if not found:
                return
            position += len(found)
            yield position, found, reader.state

    def make(batch: tuple[int, list[Any], Any]) -> Loaded:
        position, found, state = batch

        def of_rows(own: list[int]) -> tuple[list[Any], list[int], Callable[[], Any]]:
            indices = [position - len(found) + i for i in own]
            rngs = lambda: example_generators([0] * len(own), indices, seed)
            return [found[i] for i in own], indices, rngs

        return collating(len(found), position, of_rows, state)

    return check_alike(prefetch(make, read()))


def ordered_batches(
    examples: Any, collate_fn: CollateFn, *, batch_size: int, mesh: Mesh, name: str = "examples"
) -> Generator[Loaded, None, None]:
    """Yields batches of all examples once, in order, for evaluation and prediction."""
    of_epoch, length = by_epoch(examples, name=name)
    reading, collating = InTurn(), Collating(collate_fn, mesh)

    def make(bounds: tuple[int, int]) -> Loaded:
        begin, end = bounds

        def read(own: list[int]) -> tuple[list[Any], list[int], Callable[[], Any]]:
            indices = [begin + i for i in own]
            return fetch(of_epoch(0), indices, reading), indices, lambda: None

        return collating(end - begin, end, read)

    return prefetch(make, chunks(length, batch_size, batch_shards(mesh)))


def chunks(length: int, batch_size: int, shards: int) -> Iterator[tuple[int, int]]:
    """Yields the bounds of batches that cover all examples, with few different sizes."""
    # Of the last examples, as many as divide over the devices form a batch. The rest go into
    # replicated batches no larger than a device's share, which need no more memory than a full one.
    share = max(1, batch_size // shards)
    start = 0
    while start < length:
        rows = min(batch_size, length - start)
        if rows < batch_size and rows % shards:
            rows = rows // shards * shards or min(share, rows)
        yield start, start + rows
        start += rows


def prefetch(
    make: Callable[[T], U], items: Iterable[T], *, workers: int = WORKERS, ahead: int = AHEAD
) -> Generator[U, None, None]:
    """Yields `map(make, items)` in order; in threads, `ahead` of the reader, if `make` is slow."""
    items = iter(items)
    yield from _while_fast(make, items)
    yield from map_in_threads(make, items, workers=workers, ahead=ahead, name="redcoast-data")


def _while_fast(make: Callable[[T], U], items: Iterator[T]) -> Iterator[U]:
    """Computes results in this thread, until together they take longer than their reader."""
    # The device computes at the same time, so this costs nothing as long as it takes less time.
    # Threads share the interpreter with the reader, and passing a small batch between threads
    # costs more than computing it. A single delay, such as by another program, does not count.
    late = 0.0
    before = perf_counter()
    for item in items:
        begin = perf_counter()
        result = make(item)
        end = perf_counter()
        late = max(0.0, late + min(DELAY, end - begin - max(CHEAP, begin - before)))
        yield result
        before = end
        if late >= 2 * DELAY:
            return
