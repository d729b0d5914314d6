"""Calls the user's `collate_fn` and checks its batches."""

import inspect
import sys
from collections.abc import Callable, Generator, Iterator
from typing import Any, TypeVar

import jax
import numpy as np
from jaxtyping import PyTree

from ..core._dtypes import dtype_advice, has_numbers, tree_to_jax_dtypes
from ..core._errors import check_functions, check_integer, listed
from ..core._owned import are_fresh, copied, held_elsewhere
from ..core._pytree import map_where, show_place
from ..core._user_functions import calling, takes_keyword
from ..distributed._heartbeat import doing
from ._columns import is_table
from ._in_turn import InTurn
from ._per_batch import is_per_batch
from ._stack import Examples, as_numpy, stack_examples

T = TypeVar("T")
CollateFn = Callable[..., PyTree]
Rngs = Callable[[], list[np.random.Generator] | None]  # a generator for each example
ARRAYS = (np.ndarray, jax.Array)
MOST = 8  # indices in a note


class BatchForm:
    """The structure and the types of a batch that passed all checks, which most others have, too.

    A batch of this form has the same structure, and arrays of NumPy with the same dtypes and
    numbers of dimensions, and with a row for each example.
    """

    def __init__(self, batch: PyTree[np.ndarray]):
        leaves, self._structure = jax.tree.flatten(batch)
        self._types = [(x.dtype, x.ndim) for x in leaves]

    def fits(self, leaves: list[PyTree], structure: object, rows: int) -> bool:
        if structure != self._structure:
            return False
        for x, (dtype, ndim) in zip(leaves, self._types, strict=True):
            if type(x) is not np.ndarray or x.dtype != dtype:
                return False
            if x.ndim != ndim or x.shape[0] != rows:
                return False
        return True


def collate(collate_fn: CollateFn, examples: Examples, indices: list[int], rngs: Rngs) -> PyTree:
    """Calls `collate_fn`, and checks that it returned a batch with one row for each example.

    Arrays that are marked as `per_batch` may have any shape, and keep the mark. Arrays that
    `collate_fn` may write into at its next call are copied.
    """
    return collate_alike(collate_fn, examples, indices, rngs, InTurn(), None)[0]


def collate_alike(
    collate_fn: CollateFn,
    examples: Examples,
    indices: list[int],
    rngs: Rngs,
    in_turn: InTurn,
    form: BatchForm | None,
) -> tuple[PyTree, bool]:
    """As `collate`; also returns whether the batch has a known form, and so needs no more checks.

    All calls of one loop share `in_turn`.
    """
    rows = len(examples)
    stacks = collate_fn is stack_examples  # which returns new arrays

    def call(reuses: bool) -> tuple[tuple[PyTree, bool], bool]:
        # No variable refers to the batch itself: references to its arrays are counted.
        leaves, structure = jax.tree.flatten(_call(collate_fn, examples, indices, rngs))
        is_known = form is not None and form.fits(leaves, structure, rows)
        # The usual case: nothing to check, and nothing that could be overwritten.
        if is_known and (stacks or are_fresh(leaves)):
            return (structure.unflatten(leaves), True), False
        leaves, structure = jax.tree.flatten(_checked(structure.unflatten(leaves), rows))
        is_copied = False
        if not stacks:
            leaves, is_copied = _owned(leaves)
        batch = tree_to_jax_dtypes(structure.unflatten(leaves), _WHAT, of="batch")
        return (batch, False), is_copied

    return in_turn(call)


def collate_own(
    collate_fn: CollateFn | None, batch: PyTree, number: int, in_turn: InTurn | None = None
) -> PyTree:
    """Returns the arrays of a batch that the source of the examples has made.

    `collate_fn` is called with the batch; `None` leaves it as it is. Batches have the `number`s 0,
    1, ...
    """

    def call(reuses: bool) -> tuple[PyTree, bool]:
        leaves, structure = jax.tree.flatten(_call_with_batch(collate_fn, batch, number))
        owned, is_copied = _owned(leaves)
        return tree_to_jax_dtypes(structure.unflatten(owned), _WHAT, of="batch"), is_copied

    return (in_turn or InTurn())(call)


_WHAT = "what `collate_fn` returned"


def _owned(leaves: list[PyTree]) -> tuple[list[PyTree], bool]:
    """The arrays that a user's function returned, copied if it may write into them again, and
    whether any was copied."""
    shared = held_elsewhere(leaves)
    owned = list(leaves)
    for i, is_shared in enumerate(shared):
        if is_shared:
            owned[i] = copied(leaves[i])
    return owned, any(shared)


def _call(collate_fn: CollateFn, examples: Examples, indices: list[int], rngs: Rngs) -> PyTree:
    """What `collate_fn` returns."""
    options: dict[str, object] = {}
    if takes_rngs(collate_fn):
        # Made only for functions that take them: a generator for each example takes long.
        options = {"rngs": rngs()}
    try:
        with doing("`collate_fn`"):
            batch = collate_fn(examples, **options)
    except BaseException as error:  # a context that adds the notes would take longer
        where = f" for the examples with indices {listed(indices, MOST)}"
        calling("collate_fn", {"examples": examples}, where=where).add_to(error)
        raise
    if batch is examples and isinstance(batch, list):
        raise _not_stacked(len(examples))
    return batch


def _not_stacked(entries: int) -> TypeError:
    return TypeError(
        f"`collate_fn` returned a list of {entries} entries. It must return a PyTree of "
        'arrays, batch dimension first: stack the examples, as in `{"x": np.stack([e["x"] for '
        "e in examples])}`."
    )


def _checked(batch: PyTree, rows: int) -> PyTree:
    """A batch that `collate_fn` returned, with arrays of NumPy for those of other libraries."""
    if _is_list_of_examples(batch, rows):
        raise _not_stacked(len(batch))
    arrays = foreign_to_numpy(batch)
    _check_rows(arrays, rows)
    return arrays


def _call_with_batch(collate_fn: CollateFn | None, batch: PyTree, number: int) -> PyTree:
    if collate_fn is None:
        arrays = foreign_to_numpy(batch)
    else:
        where = f" for batch {number} of `examples`"
        with calling("collate_fn", {"batch": batch}, where=where), doing("`collate_fn`"):
            arrays = collate_fn(batch)
        arrays = foreign_to_numpy(arrays)
    what = "What `collate_fn` returned"
    if collate_fn is None:
        what = "An item of `examples`"
    _check_batch(arrays, what)
    return arrays


def foreign_to_numpy(tree: PyTree) -> PyTree:
    """Converts the arrays of other libraries, such as PyTorch's tensors, to NumPy arrays."""

    def is_foreign(x: object) -> bool:
        own = isinstance(x, (*ARRAYS, np.generic))
        return not own and hasattr(x, "__array__") and not is_table(x)

    if not any(map(is_foreign, jax.tree.leaves(tree))):
        return tree
    return map_where(is_foreign, lambda x: as_numpy(x, "An array of the batch"), tree)


def count_rows(arrays: PyTree) -> int:
    """Returns the number of rows of a batch, from the first array that is not marked."""
    parts = jax.tree.leaves(arrays, is_leaf=is_per_batch)
    return next(x.shape[0] for x in parts if not is_per_batch(x))


def _check_batch(arrays: PyTree, what: str) -> None:
    """Checks a batch that was not made of a list of examples."""
    advice = (
        "With `batch_size=None`, the items of `examples` are batches: PyTrees of numeric arrays, "
        "batch dimension first. Pass a `collate_fn` that makes such a batch of an item, or a "
        "`batch_size` if the items are examples."
    )
    # Only what is not marked has rows.
    parts = jax.tree_util.tree_leaves_with_path(arrays, is_leaf=is_per_batch)
    rows = None
    for path, part in parts:
        where = what
        if path:
            where = f"{what} at {show_place(path, 'batch')}"
        for leaf in jax.tree.leaves(part):
            if not _is_numeric(leaf):
                kind = type(leaf).__name__
                if isinstance(leaf, np.ndarray):
                    kind = leaf.dtype
                raise TypeError(f"{where} is of type {kind}. {advice}")
        # Its arrays may have any first dimension.
        if is_per_batch(part):
            continue
        if part.ndim == 0 or (rows is not None and part.shape[0] != rows):
            before = ""
            if rows is not None:
                before = f", and another array has {rows} rows"
            raise ValueError(f"{where} has shape {part.shape}{before}. {advice}")
        rows = part.shape[0]
    if not rows:
        raise ValueError(f"{what} has no rows. {advice}")


def check_batching(collate_fn: CollateFn | None, batch_size: int | None) -> CollateFn | None:
    """Checks the two arguments that define batches, and returns the `collate_fn` to use.

    By default, examples are stacked, and items that are batches are not changed.

    Raises `TypeError` or `ValueError` if an argument, or their combination, is invalid.
    """
    if batch_size is not None:
        if collate_fn is None:
            collate_fn = stack_examples
        check_functions(collate_fn=collate_fn)
        check_integer("batch_size", batch_size, most=sys.maxsize)
        return collate_fn
    if collate_fn is None:
        return None
    check_functions(collate_fn=collate_fn)
    if needs_rngs(collate_fn):
        raise ValueError(
            "`collate_fn` has a parameter `rngs`, with a generator for each example, but with "
            "`batch_size=None` the examples are batches. Augment them in their source, or pass a "
            "`batch_size` and examples."
        )
    return collate_fn


def takes_rngs(collate_fn: CollateFn) -> bool:
    """Returns whether `collate_fn` has a parameter `rngs`."""
    return takes_keyword(collate_fn, "rngs")


def needs_rngs(collate_fn: CollateFn) -> bool:
    """Returns whether `collate_fn` has a parameter `rngs` without a default value."""
    if not takes_rngs(collate_fn):
        return False
    return inspect.signature(collate_fn).parameters["rngs"].default is inspect.Parameter.empty


def _is_list_of_examples(arrays: PyTree, rows: int) -> bool:
    if not isinstance(arrays, list) or not len(arrays) == rows > 1:
        return False
    return not all(_is_numeric(x) and x.shape[:1] == (rows,) for x in jax.tree.leaves(arrays))


def _check_rows(arrays: PyTree, rows: int) -> None:
    leaves = jax.tree.leaves(arrays)
    if not leaves:
        missing = " Is a `return` missing?" * (arrays is None)
        raise ValueError(
            f"`collate_fn` returned no arrays; it must return a PyTree of them.{missing}"
        )
    if all(_is_numeric(leaf) and leaf.shape[:1] == (rows,) for leaf in leaves):
        return
    parts = jax.tree_util.tree_leaves_with_path(arrays, is_leaf=is_per_batch)
    of_rows = {path for path, part in parts if not is_per_batch(part)}
    for path, leaf in jax.tree_util.tree_leaves_with_path(arrays):
        where = show_place(path, "batch", "the batch")
        if not _is_numeric(leaf):
            is_array = isinstance(leaf, np.ndarray)
            what, advice = type(leaf).__name__, ""
            if is_array:
                what, advice = str(leaf.dtype), dtype_advice(leaf.dtype)
            raise TypeError(
                f"`collate_fn` returned {what} at {where}. It must return a PyTree of numeric "
                f"NumPy arrays, batch dimension first.{advice}"
            )
        if leaf.shape[:1] != (rows,) and path in of_rows:
            raise ValueError(
                f"`collate_fn` was given {rows} examples and returned an array of shape "
                f"{leaf.shape} at {where}. Its first dimension must be the batch: {rows} rows. If "
                "it belongs to the batch as a whole, such as the nodes of all graphs, mark it with "
                "`redcoast.per_batch`. If the examples are batches already, pass `batch_size=None`."
            )


def _is_numeric(leaf: object) -> bool:
    return isinstance(leaf, ARRAYS) and (isinstance(leaf, jax.Array) or has_numbers(leaf.dtype))


def check_alike(batches: Iterator[Any]) -> Generator[Any, None, None]:
    """Yields the batches, and raises an error if one differs from the first in its structure or
    dtypes; with several processes, also if it differs in its shapes."""
    first, of_first = None, None
    for batch in batches:
        # Its form was compared when it was made.
        if batch.is_alike and first is not None:
            yield batch
            continue
        structure = _structure(batch.arrays)
        if first is None:
            first, of_first = structure, describe_batch(batch.arrays)
        if structure != first:
            what = "keys, dtypes and numbers of dimensions."
            if jax.process_count() > 1:
                what = (
                    "keys, dtypes and shapes, because each process collates only its own rows. Pad "
                    "all rows to one length."
                )
            raise ValueError(
                "`collate_fn` returned batches of different structure. The first had "
                f"{of_first}; another had {describe_batch(batch.arrays)}. Every batch must have "
                f"the same {what}"
            )
        yield batch


def _structure(arrays: PyTree) -> tuple[PyTree, list[tuple[object, int | tuple[int, ...]]]]:
    """Returns the properties that must be the same for all batches of a run."""
    leaves, structure = jax.tree.flatten(arrays)
    if jax.process_count() == 1:
        return structure, [(x.dtype, x.ndim) for x in leaves]
    # Several processes run one program, for which their shapes must be the same.
    return structure, [(x.dtype, x.shape[1:]) for x in leaves]


def describe_batch(arrays: PyTree) -> str:
    """Describes the properties that must be the same for all batches of a run."""
    structure, kinds = _structure(arrays)
    unit = "a row"
    if jax.process_count() == 1:
        unit = "dimensions"
    return str(structure.unflatten([f"{dtype}, {shape} {unit}" for dtype, shape in kinds]))
