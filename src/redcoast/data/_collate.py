"""From examples to a batch on the host, by the user's `collate_fn`, checked."""

import inspect
from collections.abc import Callable, Generator, Iterator
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

from ..core._errors import noting
from ..distributed._heartbeat import doing

CollateFn = Callable[..., PyTree]
ARRAYS = (np.ndarray, jax.Array)


def collate(
    collate_fn: CollateFn, examples: list[Any], indices: list[int], rngs: Callable[[], Any]
) -> PyTree:
    """Calls `collate_fn` and checks that it returned a batch of these examples."""
    options = {"rngs": rngs()} if takes_rngs(collate_fn) else {}
    note = noting(lambda: f"Raised by `collate_fn` for the examples with indices {indices}.")
    with note, doing("`collate_fn`"):
        try:
            arrays = collate_fn(examples, **options)
        except SystemExit as error:
            # Meant for a thread, it would end the whole run, and perhaps with a code of success.
            raise RuntimeError(f"`collate_fn` wanted to exit: {error!r}.") from error
    _check_rows(arrays, len(examples))
    return arrays


def takes_rngs(collate_fn: CollateFn) -> bool:
    """Whether `collate_fn` wants random generators."""
    code = getattr(collate_fn, "__code__", None)
    if code is not None:  # a plain function: a look at its names is cheaper than its signature
        return "rngs" in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    try:
        return "rngs" in inspect.signature(collate_fn).parameters
    except ValueError:  # functions of C may have none
        return False


def _check_rows(arrays: PyTree, rows: int) -> None:
    leaves = jax.tree.leaves(arrays)
    if not leaves:
        raise ValueError("`collate_fn` returned no array. It must return a PyTree of NumPy arrays.")
    if all(_is_numeric(leaf) and leaf.shape[:1] == (rows,) for leaf in leaves):
        return
    for path, leaf in jax.tree_util.tree_leaves_with_path(arrays):
        where = jax.tree_util.keystr(path, simple=True, separator="/") or "the batch"
        if not _is_numeric(leaf):
            what = leaf.dtype if isinstance(leaf, np.ndarray) else type(leaf).__name__
            raise TypeError(
                f"`collate_fn` returned {what} at {where}. It must return a PyTree of NumPy "
                "arrays of numbers, batch dimension first."
            )
        if leaf.shape[:1] != (rows,):
            raise ValueError(
                f"`collate_fn` was given {rows} examples and returned an array of shape "
                f"{leaf.shape} at {where}. Its first dimension must be the batch: {rows} rows."
            )


def _is_numeric(leaf: Any) -> bool:
    return isinstance(leaf, ARRAYS) and leaf.dtype.kind not in "OSU"


def check_alike(batches: Iterator[Any]) -> Generator[Any, None, None]:
    """Passes batches on while they have the structure and the dtypes of the first; and, where
    each process makes its own rows of them, the shapes as well."""
    first, of_first = None, None
    for batch in batches:
        found = _common(batch.arrays)
        if first is None:
            first, of_first = found, describe_batch(batch.arrays)
        if found != first:
            alone = "keys, dtypes and numbers of dimensions."
            together = (
                "keys, dtypes and shapes: each process makes rows of its own, and cannot know how "
                "long those of the others are. Pad all to one length."
            )
            raise ValueError(
                "`collate_fn` returned batches of different structure. The first had "
                f"{of_first}; another had {describe_batch(batch.arrays)}. Every batch must have "
                "the same " + (alone if jax.process_count() == 1 else together)
            )
        yield batch


def _common(arrays: PyTree) -> tuple[Any, list[tuple[Any, Any]]]:
    """What all batches of a run must have in common."""
    leaves, structure = jax.tree.flatten(arrays)
    alone = jax.process_count() == 1
    return structure, [(x.dtype, x.ndim if alone else x.shape[1:]) for x in leaves]


def describe_batch(arrays: PyTree) -> str:
    """The same in words."""
    structure, kinds = _common(arrays)
    unit = "dimensions" if jax.process_count() == 1 else "a row"
    return str(structure.unflatten([f"{dtype}, {shape} {unit}" for dtype, shape in kinds]))
