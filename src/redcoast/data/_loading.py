"""Loads batches to the devices, a few batches ahead."""

import contextlib
import functools as ft
import itertools
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from time import perf_counter
from typing import NamedTuple, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import PyTree, UInt64

from ..core._errors import check_integer
from ..core._iterate import map_in_threads
from ..core._owned import copied
from ..distributed._arrays import own_rows, place_batch, place_rows, stays_on_host
from ..distributed._heartbeat import has_read
from ..distributed._mesh import batch_shards
from ._collate import (
    BatchForm,
    CollateFn,
    Rngs,
    check_alike,
    collate_alike,
    collate_own,
    count_rows,
    foreign_to_numpy,
)
from ._in_turn import InTurn, working_in_threads
from ._per_batch import has_per_batch, is_per_batch, without_marks
from ._permutation import batch_indices, example_generators
from ._sources import Epochs, StreamReader, by_epoch, count_examples, fetch, read_source
from ._stack import Examples, stack_examples
from ._streams import RepeatedStream, Stream, is_iterator

T = TypeVar("T")
U = TypeVar("U")
# Seconds. A batch that takes less than `CHEAP` is not late, and one that is counts for at most
# `DELAY`.
CHEAP, DELAY = 0.2e-3, 10e-3


class Loaded(NamedTuple):
    """A batch on the devices: its arrays, its number of examples, and the position of its end."""

    arrays: PyTree
    rows: int
    position: int
    stream: PyTree = None  # the encoded state of the stream after this batch
    per_batch: bool = False  # whether some arrays do not have one row for each example
    epoch: int = 0  # of its first example; only in a stream
    is_alike: bool = False  # whether it is known to have the structure and dtypes of one before


class Threads(NamedTuple):
    """The number of threads that make batches, and how many batches they prepare in advance.

    With no workers, the calling thread makes each batch when it is needed.
    """

    workers: int = 2
    ahead: int = 4

    @property
    def batches(self) -> int:
        """How many batches may be in use: those in the making, those that wait, and the last one
        that was returned."""
        return self.workers + self.ahead + 1


USUAL_THREADS = Threads()


def checked_threads(workers: int, ahead: int) -> Threads:
    """Checks the user's arguments."""
    check_integer("workers", workers, least=0)
    check_integer("ahead", ahead, least=0)
    return Threads(workers, ahead)


class OwnBatches(NamedTuple):
    """Examples whose items are batches."""

    source: object


def count_in_epoch(examples: object, name: str = "examples") -> int | None:
    """Returns the number of examples in an epoch; `None` for a stream, of examples or batches."""
    if isinstance(examples, OwnBatches):
        return None
    return count_examples(examples, name)


# For some rows of a batch: their examples, the indices of the examples, and their generators.
ReadRows = Callable[[list[int]], tuple[Examples, list[int], Rngs]]


class Collating:
    """Makes the batches of a loop on the host, and places them on the devices of a mesh.

    Each process collates only the rows of its own devices, unless `collate_fn` marks arrays that
    belong to the whole batch. With `on_host`, the batches stay where `collate_fn` made them.
    """

    def __init__(self, collate_fn: CollateFn | None, mesh: Mesh, *, on_host: bool = False):
        self._collate_fn, self._mesh = collate_fn, mesh
        self._in_turn, self._whole = InTurn(), False
        self._on_host = on_host
        self._stays = on_host or stays_on_host(mesh)
        self._form: BatchForm | None = None  # of the batches that stay on the host

    def __call__(self, rows: int, position: int, read: ReadRows, stream: PyTree = None) -> Loaded:
        batch, is_alike = self.host_batch(rows, read)
        if is_alike:
            return Loaded(batch, rows, position, stream, is_alike=True)
        if self._stays and self._form is None and _is_plain(batch):
            self._form = BatchForm(batch)
        return self._place(batch, rows, position, stream)

    def host_batch(self, rows: int, read: ReadRows) -> tuple[PyTree, bool]:
        """The batch that `collate_fn` makes of this many rows, with its marks, and whether it has
        the form of one before."""
        assert self._collate_fn is not None
        try:
            own = list(range(rows))
            if not self._whole:
                own = own_rows(self._mesh, rows)
            examples, indices, rngs = read(own)
            batch, is_alike = collate_alike(
                self._collate_fn, examples, indices, rngs, self._in_turn, self._form
            )
        except MemoryError as error:
            error.args = (
                f"This host has too little memory to make a batch of {rows:,} examples. Pass a "
                f"smaller `batch_size`. The error was: {error}",
            )
            raise
        # The first marked batch says that each process must collate all rows.
        if len(own) < rows and has_per_batch(batch):
            self._whole = True
            return self.host_batch(rows, read)
        return batch, is_alike

    def own_host_batch(self, item: PyTree, number: int) -> tuple[PyTree, int]:
        """Returns this process's rows of a batch that the source made, and the total number of
        rows."""
        batch = collate_own(self._collate_fn, item, number, self._in_turn)
        rows = count_rows(batch)
        own = own_rows(self._mesh, rows)
        if len(own) < rows and not has_per_batch(batch):
            batch = jax.tree.map(lambda x: x[np.array(own, int)], batch)
        return batch, rows

    def of_own(self, item: PyTree, number: int, stream: PyTree = None) -> Loaded:
        """A batch that the source made, on the devices; its position is not known."""
        batch, rows = self.own_host_batch(item, number)
        return self._place(batch, rows, 0, stream)

    def _place(self, batch: PyTree, rows: int, position: int, stream: PyTree) -> Loaded:
        arrays, per_batch = batch, has_per_batch(batch)
        if per_batch:
            arrays = without_marks(batch)
        if self._on_host:
            placed = arrays
        elif per_batch:
            placed = place_batch(arrays, self._mesh, kinds=(np.ndarray, jax.Array))
        else:
            placed = place_rows(arrays, self._mesh, rows)
        return Loaded(placed, rows, position, stream, per_batch)


def _is_plain(batch: PyTree) -> bool:
    """Whether a batch has arrays of NumPy with one row for each example, and nothing else."""
    leaves = jax.tree.leaves(batch, is_leaf=is_per_batch)
    return all(type(x) is np.ndarray for x in leaves)


def training_batches(
    examples: object,
    collate_fn: CollateFn,
    *,
    batch_size: int,
    seed: UInt64[np.ndarray, "2"],
    start: int,
    stop: int,
    mesh: Mesh,
    threads: Threads = USUAL_THREADS,
    on_host: bool = False,
) -> Generator[Loaded, None, None]:
    """Yields the batches from one position of a run to another, in a new order in each epoch."""
    of_epoch, length = by_epoch(examples)
    reading, collating = InTurn(), Collating(collate_fn, mesh, on_host=on_host)
    stacks = collate_fn is stack_examples

    def make(batch: tuple[int, list[int], list[int]]) -> Loaded:
        begin, *parts = batch  # the position, and the epochs and indices of the examples
        rows = len(parts[0])

        def read(own: list[int]) -> tuple[Examples, list[int], Rngs]:
            epochs, indices = parts
            if len(own) < rows:  # the rows of this process's devices
                epochs, indices = [epochs[i] for i in own], [indices[i] for i in own]
            rngs = ft.partial(example_generators, epochs, indices, seed)
            if epochs[0] == epochs[-1]:
                with of_epoch.using(epochs[0]) as dataset:
                    return fetch(dataset, indices, reading, stacks=stacks), indices, rngs
            # A batch that spans epochs: the examples of each, in order.
            examples: list[PyTree] = []
            for epoch in dict.fromkeys(epochs):
                first = epochs.index(epoch)
                of_one = indices[first : first + epochs.count(epoch)]
                with of_epoch.using(epoch) as dataset:
                    # The other epoch may have the same example, and write it into the same place.
                    examples += map(copied, fetch(dataset, of_one, reading))
            return examples, indices, rngs

        return collating(rows, begin + rows, read)

    positions = range(start, stop, batch_size)
    indices = batch_indices(start, stop, batch_size, length, seed)
    batches = ((p, *batch) for p, batch in zip(positions, indices, strict=True))
    return check_alike(prefetch(make, batches, **threads._asdict()))


def stream_batches(
    stream: PyTree,
    collate_fn: CollateFn | None,
    *,
    batch_size: int | None,
    seed: UInt64[np.ndarray, "2"],
    start: int,
    stop: int | None,
    mesh: Mesh,
    threads: Threads = USUAL_THREADS,
    parts: int = 1,
    on_host: bool = False,
) -> Generator[Loaded, None, None]:
    """Yields the batches of a stream from its current state, each with the state after it.

    With no `batch_size`, the items of the stream are batches. With several `parts`, the stream has
    the examples of this process only, and other processes have as many.
    """
    stream = read_source(stream)
    assert isinstance(stream, Stream)
    collating = Collating(collate_fn, mesh, on_host=on_host)
    # Batches in use: those that are prepared, those that are being made, and the reader's own.
    reader = StreamReader(stream, used=threads.batches)

    def read() -> Iterator[_Read]:
        position = start
        while stop is None or position < stop:
            rows = batch_size or 1
            if stop is not None:
                rows = min(rows, stop - position)
            examples = reader(rows // parts)
            if parts > 1 and len(examples) < rows // parts:
                raise ValueError(
                    "The part of `examples` that this process reads has ended before the last "
                    "step. Return an iterable to `split_by_host`, which can be read again."
                )
            if parts == 1:
                for epoch, count in reader.ended:
                    has_read("examples", epoch, position + count, ended=True)
            if not examples:
                return
            position += len(examples) * parts
            if parts == 1:
                has_read("examples", stream.epoch, position)
            yield _Read(position, examples, reader.state, reader.epoch)

    def make(batch: _Read) -> Loaded:
        position, examples, state, epoch = batch
        if batch_size is None:
            return collating.of_own(examples[0], position - 1, state)._replace(epoch=epoch)

        rows = len(examples) * parts

        def of_rows(own: list[int]) -> tuple[Examples, list[int], Rngs]:
            if parts > 1 and len(own) != len(examples):
                raise ValueError(
                    "`collate_fn` marks arrays with `per_batch`, which belong to the batch of all "
                    "processes. With `split_by_host`, no process has all examples of a batch."
                )
            # Of a stream, an index is the position of an example.
            indices = [position - rows + i for i in own]
            rngs = ft.partial(example_generators, [0] * len(own), indices, seed)
            own_examples = examples
            if parts == 1:
                own_examples = [examples[i] for i in own]
            return own_examples, indices, rngs

        return collating(rows, position, of_rows, state)._replace(epoch=epoch)

    batches = prefetch(make, read(), **threads._asdict())
    if batch_size is None:
        batches = with_positions(batches, start)
    return check_alike(batches)


class _Read(NamedTuple):
    """Examples of a stream: the position after them, the state after them, and their epoch."""

    position: int
    examples: list[PyTree]
    state: dict[str, PyTree]
    epoch: int


def with_positions(
    batches: Generator[Loaded, None, None], start: int
) -> Generator[Loaded, None, None]:
    """Yields batches with the positions of their ends, which follow from their numbers of rows."""
    position = start
    # So that the threads end when the reader closes this generator.
    with contextlib.closing(batches):
        for batch in batches:
            position += batch.rows
            yield batch._replace(position=position)


def ordered_batches(
    examples: object,
    collate_fn: CollateFn | None,
    *,
    batch_size: int | None,
    mesh: Mesh,
    name: str = "examples",
    threads: Threads = USUAL_THREADS,
) -> Generator[Loaded, None, None]:
    """Yields batches of all examples once, in order, for evaluation and prediction."""
    collating = Collating(collate_fn, mesh)
    if isinstance(examples, OwnBatches):
        stream = read_batches(examples, name=name)

        def make_own(numbered: tuple[int, PyTree]) -> Loaded:
            number, item = numbered
            return collating.of_own(item, number)

        return with_positions(prefetch(make_own, enumerate(stream), **threads._asdict()), 0)
    assert batch_size is not None
    source = read_source(examples, epochs=1, name=name)
    if isinstance(source, Stream):
        return _ordered_stream(source, collating, batch_size, mesh, threads, name)
    reading = InTurn()

    def make(bounds: tuple[int, int]) -> Loaded:
        begin, end = bounds

        def read(own: list[int]) -> tuple[Examples, list[int], Rngs]:
            indices = [begin + i for i in own]
            return fetch(source(0), indices, reading), indices, lambda: None

        return collating(end - begin, end, read)

    return prefetch(
        make, chunks(source.length, batch_size, batch_shards(mesh)), **threads._asdict()
    )


def read_batches(batches: OwnBatches, *, epochs: int | None = 1, name: str = "examples") -> Stream:
    """Returns a stream of the items of a source that makes batches itself."""
    source = read_source(batches.source, epochs=epochs, name=name, batched=True)
    if isinstance(source, Stream):
        return source

    def in_order(epoch: int) -> Iterator[PyTree]:
        return map(source(epoch).__getitem__, range(source.length))

    return RepeatedStream(in_order, epochs=epochs, name=name)


def repeatable(examples: object, *, name: str) -> object:
    """Returns the examples of epoch 0, which can be read in order any number of times.

    Raises `TypeError` for an iterator, which can be read once.
    """
    source = examples
    if isinstance(examples, OwnBatches):
        source = examples.source
    if is_iterator(source):
        raise TypeError(
            f"`{name}` is of type {type(source).__name__}, which can be read only once, and is "
            "read in each evaluation. Pass an object with a length and an index, an iterable, or a "
            f"function that returns one, such as `lambda: list(itertools.islice({name}, n))`."
        )
    if isinstance(examples, OwnBatches):
        return examples
    read = read_source(examples, epochs=1, name=name)
    if isinstance(read, Epochs):
        return read(0)
    return examples


def first_rows(examples: object, count: int, *, name: str) -> list[PyTree]:
    """Returns the first examples of a source that is read in order, or rows of its batches."""
    if isinstance(examples, OwnBatches):
        rows = itertools.chain.from_iterable(map(unbatched, read_batches(examples, name=name)))
        return list(itertools.islice(rows, count))
    source = read_source(examples, epochs=1, name=name)
    if isinstance(source, Epochs):
        return list(fetch(source(0), list(range(count))))
    return list(map(copied, itertools.islice(source, count)))


def unbatched(batch: PyTree) -> Iterator[PyTree]:
    """The rows of a batch: dicts and tuples of the rows of its columns."""
    if isinstance(batch, Mapping):
        columns = map(unbatched, batch.values())
        for row in zip(*columns, strict=True):
            yield dict(zip(batch, row, strict=True))
    elif isinstance(batch, list | tuple) and any(hasattr(x, "shape") for x in batch):
        yield from zip(*map(unbatched, batch), strict=True)
    else:
        for i in range(len(batch)):
            yield foreign_to_numpy(batch[i])


# How often streams were read in order. All processes do so together, and count alike.
_rounds = itertools.count()


def _ordered_stream(
    stream: Stream,
    collating: Collating,
    batch_size: int,
    mesh: Mesh,
    threads: Threads,
    name: str,
) -> Generator[Loaded, None, None]:
    number = -1 - next(_rounds)  # a stream of this name may be trained on, in epochs 0, 1, ...
    reader = StreamReader(stream, used=threads.batches)
    shards = batch_shards(mesh)

    def read() -> Iterator[tuple[int, list[PyTree]]]:
        start = 0
        while examples := reader(batch_size):
            for begin, end in chunks(len(examples), batch_size, shards):
                yield start + begin, examples[begin:end]
            start += len(examples)
            has_read(name, number, start)
        has_read(name, number, start, ended=True)

    def make(batch: tuple[int, list[PyTree]]) -> Loaded:
        start, examples = batch

        def of_rows(own: list[int]) -> tuple[Examples, list[int], Rngs]:
            return [examples[i] for i in own], [start + i for i in own], lambda: None

        return collating(len(examples), start + len(examples), of_rows)

    return prefetch(make, read(), **threads._asdict())


def chunks(length: int, batch_size: int, shards: int) -> Iterator[tuple[int, int]]:
    """Yields the bounds of batches that cover all examples, with few different sizes."""
    # The last examples form a batch of a divisible size, and replicated batches that are no larger
    # than a device's share, so they need no more memory than a full batch.
    share = max(1, batch_size // shards)
    start = 0
    while start < length:
        rows = min(batch_size, length - start)
        if rows < batch_size and rows % shards:
            rows = rows // shards * shards or min(share, rows)
        yield start, start + rows
        start += rows


def prefetch(
    make: Callable[[T], U],
    items: Iterable[T],
    *,
    workers: int = USUAL_THREADS.workers,
    ahead: int = USUAL_THREADS.ahead,
) -> Generator[U, None, None]:
    """Yields `map(make, items)` in order; in threads, ahead of the reader, if `make` is slow."""
    # The reader waits for each batch, but the user's functions run in its thread.
    if workers == 0:
        for item in items:  # and not `map`, in which a `StopIteration` of `make` is an end
            yield make(item)
        return
    items = iter(items)
    yield from _while_fast(make, items)
    with working_in_threads():
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
        # The other batches are loaded in threads, from the batch after this loop's last one.
        if late >= 2 * DELAY:
            return
