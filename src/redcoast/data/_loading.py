"""From positions in the data to arrays on the devices, a few batches ahead."""

from collections.abc import Generator, Iterator
from typing import Any, NamedTuple

import numpy as np
from jax.sharding import Mesh
from jaxtyping import PyTree, UInt64

from ..distributed._arrays import own_rows, place_rows
from ..distributed._mesh import batch_shards
from ._collate import CollateFn, check_alike, collate
from ._permutation import batch_indices, example_generators
from ._prefetch import prefetch
from ._sources import by_epoch, encode_stream_state, fetch

WORKERS = 2


class Loaded(NamedTuple):
    """A batch on the devices: its arrays and number of examples, and where in the data it ends."""

    arrays: PyTree
    rows: int
    position: int
    stream: Any = None  # the encoded state of the stream after this batch


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
    """The batches from one position of a run to another, shuffled anew in each epoch."""
    of_epoch, length = by_epoch(examples)

    def make(drawn: tuple[int, list[int], list[int]]) -> Loaded:
        begin, *places = drawn
        rows = len(places[0])
        own = own_rows(mesh, rows)
        epochs, indices = ([x[i] for i in own] for x in places)
        found: list[Any] = []
        for epoch in dict.fromkeys(epochs):
            first = epochs.index(epoch)
            found += fetch(of_epoch(epoch), indices[first : first + epochs.count(epoch)])
        rngs = lambda: example_generators(epochs, indices, seed)
        arrays = collate(collate_fn, found, indices, rngs)
        return Loaded(place_rows(arrays, mesh, rows), rows, begin + rows)

    draws = batch_indices(start, stop, batch_size, length, seed)
    positions = range(start, stop, batch_size)
    drawn = ((p, *draw) for p, draw in zip(positions, draws, strict=True))
    return check_alike(prefetch(make, drawn, workers=WORKERS))


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
    """The batches of a stream, from where it stands, with its state behind each of them."""

    def draw() -> Iterator[tuple[int, list[Any], Any]]:
        position = start
        while stop is None or position < stop:
            wanted = batch_size if stop is None else min(batch_size, stop - position)
            found = [x for _, x in zip(range(wanted), stream, strict=False)]
            if not found:
                return
            position += len(found)
            yield position, found, encode_stream_state(stream.get_state())

    def make(drawn: tuple[int, list[Any], Any]) -> Loaded:
        position, found, state = drawn
        own = own_rows(mesh, len(found))
        indices = [position - len(found) + i for i in own]
        rngs = lambda: example_generators([0] * len(own), indices, seed)
        arrays = collate(collate_fn, [found[i] for i in own], indices, rngs)
        return Loaded(place_rows(arrays, mesh, len(found)), len(found), position, state)

    return check_alike(prefetch(make, draw(), workers=WORKERS))


def ordered_batches(
    examples: Any, collate_fn: CollateFn, *, batch_size: int, mesh: Mesh, name: str = "examples"
) -> Generator[Loaded, None, None]:
    """All examples once, in order: for evaluation and prediction."""
    of_epoch, length = by_epoch(examples, name=name)

    def make(bounds: tuple[int, int]) -> Loaded:
        begin, end = bounds
        indices = [begin + i for i in own_rows(mesh, end - begin)]
        arrays = collate(collate_fn, fetch(of_epoch(0), indices), indices, lambda: None)
        return Loaded(place_rows(arrays, mesh, end - begin), end - begin, end)

    return prefetch(make, chunks(length, batch_size, batch_shards(mesh)), workers=WORKERS)


def chunks(length: int, batch_size: int, shards: int) -> Iterator[tuple[int, int]]:
    """Bounds of batches that leave nothing over, of few different sizes."""
    # The last examples go in a batch that divides over the devices and, whole on each device,
    # in batches no larger than a device's share, so that memory is that of a full batch.
    share = max(1, batch_size // shards)
    start = 0
    while start < length:
        rows = min(batch_size, length - start)
        if rows < batch_size and rows % shards:
            rows = rows // shards * shards or min(share, rows)
        yield start, start + rows
        start += rows
