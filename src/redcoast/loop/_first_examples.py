"""Collated examples that processes compare to check that they have the same data."""

import functools as ft
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import PyTree

from ..core._program_lines import describe_array
from ..core._pytree import show_place
from ..data._batches import Batches
from ..data._collate import CollateFn, collate, collate_own, needs_rngs
from ..data._loading import OwnBatches, read_batches
from ..data._per_batch import is_per_batch, without_marks
from ..data._sources import Epochs, fetch, read_source
from ..distributed._agreement import Listing
from ..distributed._mesh import batch_shards

_MOST = 16  # examples that are compared at the beginning, and as many over the whole length
_REPEATS = 16  # of collating examples that differ, which show whether `collate_fn` is random


def first_training_examples(data: Batches) -> Listing:
    """The first examples of a training run, and some over the whole length, collated."""
    # With generators, an augmentation would be compared too, but most functions need none.
    collate_fn = data.collate_fn
    augment = collate_fn is not None and needs_rngs(collate_fn)
    # As many as in the run: a `collate_fn` may pad to the longest of its examples.
    rows = _rows_of_a_device(data.batch_size, data.mesh)
    read = ft.partial(data.collate_examples, augment=augment)
    return _listing(read, _chosen(rows, data.length))


def first_examples(
    examples: Any,
    collate_fn: CollateFn | None,
    *,
    batch_size: int | None,
    mesh: Mesh,
    name: str = "examples",
) -> Listing:
    """The first examples of an evaluation, and some over the whole length, collated."""
    if isinstance(examples, OwnBatches):

        def read_first(indices: list[int]) -> PyTree:
            (item,) = read_batches(examples, name=name).peek(1)
            batch = without_marks(collate_own(collate_fn, item, 0))
            # A batch may have fewer rows than are compared.
            return jax.tree.map(lambda x: x[np.array(indices) % len(x)], batch)

        return _listing(read_first, [list(range(_MOST))])
    assert collate_fn is not None
    assert batch_size is not None
    source = read_source(examples, epochs=1, name=name)
    rows = _rows_of_a_device(batch_size, mesh)
    length = None
    if isinstance(source, Epochs):
        length = source.length

    def read(indices: list[int]) -> PyTree:
        if isinstance(source, Epochs):
            with source.using(0) as dataset:
                chosen = fetch(dataset, indices)
        else:
            chosen = source.peek(len(indices))
        return collate(collate_fn, chosen, indices[: len(chosen)], lambda: None)

    return _listing(read, _chosen(rows, length))


def _rows_of_a_device(batch_size: int, mesh: Mesh) -> int:
    """As many examples as `collate_fn` is called with for one device, up to a limit."""
    shards = batch_shards(mesh)
    if batch_size % shards == 0:
        batch_size //= shards
    return min(_MOST, batch_size)


def _chosen(rows: int, length: int | None) -> list[list[int]]:
    """The indices of the first examples, and of as many over the whole length."""
    if length is None:
        return [list(range(rows))]
    first = [i % length for i in range(rows)]
    # Files that differ at their ends differ in some of these.
    spread = np.linspace(0, length - 1, rows + 1).astype(int)[1:].tolist()
    return [first, spread]


def _listing(collated: Callable[[list[int]], PyTree], groups: list[list[int]]) -> Listing:
    """The rows of collated examples, with one line for each array of a row."""

    def lines() -> list[str]:
        listed: list[str] = []
        for indices in groups:
            listed += _lines_of(collated, indices)
        return listed

    first = lines()
    # Asked only if processes differ: a random `collate_fn` explains it.
    return Listing(first, varies=lambda: any(lines() != first for _ in range(_REPEATS)))


def _lines_of(collated: Callable[[list[int]], PyTree], indices: list[int]) -> Iterator[str]:
    try:
        batch = collated(indices)
    except Exception as error:
        # The batch that it fails in may not be one of the run, where its error would be raised.
        yield f"{type(error).__name__}: {error}"
        return
    for path, part in jax.tree_util.tree_leaves_with_path(batch, is_leaf=is_per_batch):
        where = show_place(path, "batch", "the batch")
        if is_per_batch(part):
            for x in jax.tree.leaves(part):
                yield f"examples {indices}, {where}: {describe_array(x)}"
            continue
        for row, index in enumerate(indices):
            yield f"example {index}, {where}: {describe_array(part[row])}"
