"""Collated examples that processes compare, to see that they have the same data."""

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import PyTree

from ..core._program_lines import describe_array
from ..core._pytree import show_place
from ..data._batches import Batches
from ..data._collate import CollateFn, collate, takes_rngs
from ..data._per_batch import is_per_batch
from ..data._sources import by_epoch, fetch
from ..distributed._agreement import Listing
from ..distributed._mesh import batch_shards

_MOST = 16  # examples that are compared at the beginning, and as many over the whole length
_REPEATS = 16  # of collating examples that differ, which show whether `collate_fn` is random


def first_training_examples(data: Batches) -> Listing:
    """The first examples of a training run, and some over the whole length, collated."""
    # With generators, an augmentation would be compared too, but most functions need none.
    augment = takes_rngs(data.collate_fn) and _has_no_default(data.collate_fn, "rngs")
    rows = _rows_of_a_device(data.batch_size, data.mesh)
    read = lambda indices: data.collate_examples(indices, augment=augment)
    return _listing(read, _chosen(rows, data.length))


def first_examples(
    examples: Any, collate_fn: CollateFn, *, batch_size: int, mesh: Mesh, name: str = "examples"
) -> Listing:
    """The first examples of an evaluation, and some over the whole length, collated."""
    of_epoch, length = by_epoch(examples, name=name)
    rows = _rows_of_a_device(batch_size, mesh)

    def read(indices: list[int]) -> PyTree:
        with of_epoch.using(0) as dataset:
            chosen = fetch(dataset, indices)
        return collate(collate_fn, chosen, indices, lambda: None)

    return _listing(read, _chosen(rows, length))


def _rows_of_a_device(batch_size: int, mesh: Mesh) -> int:
    """As many examples as `collate_fn` is called with for one device, up to a limit."""
    shards = batch_shards(mesh)
    return min(_MOST, batch_size if batch_size % shards else batch_size // shards)


def _has_no_default(fn: Callable[..., Any], name: str) -> bool:
    return inspect.signature(fn).parameters[name].default is inspect.Parameter.empty


def _chosen(rows: int, length: int | None) -> list[list[int]]:
    """The indices of the first examples, and of as many over the whole length."""
    if length is None:
        return [list(range(rows))]
    first = [i % length for i in range(rows)]
    spread = np.linspace(0, length - 1, rows + 1).astype(int)[1:].tolist()
    return [first, spread]


def _listing(collated: Callable[[list[int]], PyTree], groups: list[list[int]]) -> Listing:
    """The rows of collated examples, one a line for each array."""

    def lines() -> list[str]:
        return [line for indices in groups for line in _lines_of(collated, indices)]

    first = lines()
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
