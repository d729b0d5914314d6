"""The default `collate_fn`: stacks the arrays and numbers of the examples."""

from collections.abc import Callable

import jax
import numpy as np
from jax.tree_util import KeyPath
from jaxtyping import PyTree

from ..core._dtypes import check_unmasked, dtype_advice, has_numbers
from ..core._pytree import show_place
from ..core._user_functions import ITEMS_ARE_BATCHES
from ._columns import is_table, rows_of_table

Examples = list[PyTree] | np.ndarray  # of a batch; an array if they were read as one
_OWN = "Pass a `collate_fn` that makes arrays of the examples"


def stack_examples(examples: Examples) -> PyTree[np.ndarray]:
    """Stacks the examples, PyTrees of arrays and numbers, leaf by leaf.

    A list of numbers, as in JSON, counts as an array.

    Raises `ValueError` if the examples have different structures, or their arrays different shapes;
    `TypeError` if a leaf is neither an array nor a number.
    """
    if isinstance(examples, np.ndarray):  # `fetch` has stacked them
        return examples
    if _are_alike(examples):
        return np.stack(examples)
    _refuse_missing(examples)
    # Finding paths takes several times as long, and they are the same for all examples.
    flat = [jax.tree.flatten(x, is_leaf=_is_list_of_numbers) for x in examples]
    structure = flat[0][1]
    for position, (_, other) in enumerate(flat):
        if other != structure:
            raise ValueError(
                f"The examples have different structures: the first is {_shown(structure)}, and "
                f"number {position} of this batch is {_shown(other)}. {_OWN} of one structure."
                f"{_of_nested_columns(flat)}"
            )
    columns = zip(*(leaves for leaves, _ in flat), strict=True)
    first = jax.tree_util.tree_leaves_with_path(examples[0], is_leaf=_is_list_of_numbers)
    paths = [path for path, _ in first]

    def advice() -> str:
        own = f"{_OWN} of one shape, by padding or cutting."
        return f"{own}{_of_batches(flat)}{_of_columns(flat)}"

    stacked = [_stack(path, column, advice) for path, column in zip(paths, columns, strict=True)]
    return structure.unflatten(stacked)


def _are_alike(examples: list[PyTree]) -> bool:
    """Whether the examples are arrays of numbers of one kind, as windows of tokens are."""
    if type(examples[0]) is not np.ndarray or not has_numbers(examples[0].dtype):
        return False
    shape, dtype = examples[0].shape, examples[0].dtype
    return all(type(x) is np.ndarray and x.shape == shape and x.dtype == dtype for x in examples)


def _refuse_missing(examples: list[PyTree]) -> None:
    for position, example in enumerate(examples):
        if example is None:
            raise ValueError(
                f"Number {position} of this batch is `None`, and not an example. Leave such "
                "examples out of the dataset. In a filtered `MapDataset` of Grain, they stand for "
                "what the filter left out: pass its `to_iter_dataset()`, which skips them."
            )


def _of_columns(flat: list[tuple[list[PyTree], object]]) -> str:
    """What to pass if each example may be a column: if all are arrays of equally many rows."""
    rows: set[int] = set()
    for leaves, _ in flat:
        if len(leaves) != 1 or np.ndim(leaves[0]) == 0:
            return ""
        rows.add(len(leaves[0]))
    if len(rows) > 1:
        return ""
    return " If `examples` are columns, pass a tuple of arrays, such as `(x, y)`."


def _of_nested_columns(flat: list[tuple[list[PyTree], object]]) -> str:
    """What to pass if the examples may be trees of columns: if all arrays have as many rows."""
    rows: set[int] = set()
    for leaves, _ in flat:
        for x in leaves:
            if np.ndim(x) == 0:
                return ""
            rows.add(len(x))
    if len(rows) != 1:
        return ""
    return (
        " If `examples` are columns, pass a tuple of arrays, such as `(x, y)`, and name them in "
        "a `collate_fn`."
    )


def _of_batches(flat: list[tuple[list[PyTree], object]]) -> str:
    """What to pass if each example may be a batch: if its arrays have equal numbers of rows."""
    for leaves, _ in flat:
        rows = {getattr(x, "shape", ())[:1] for x in leaves}
        if len(leaves) < 2 or len(rows) > 1 or () in rows:
            return ""
    return f" {ITEMS_ARE_BATCHES}"


def _stack(path: KeyPath, column: tuple[object, ...], advice: Callable[[], str]) -> np.ndarray:
    where = show_place(path, "example", "their root")
    arrays = [_as_array(x, where) for x in column]
    for position, x in enumerate(arrays):
        if x.shape != arrays[0].shape:
            raise ValueError(
                f"The arrays of the examples at {where} have different shapes: {arrays[0].shape} "
                f"in the first, and {x.shape} in number {position} of this batch. {advice()}"
            )
    return np.stack(arrays)


def _as_array(x: object, where: str) -> np.ndarray:
    if is_table(x):
        raise TypeError(
            f"The examples have a table, of type {type(x).__name__}, at {where}. Make examples of "
            f"its rows, `{rows_of_table(x, 'table')}`, or pass `batch_size=None` and a "
            "`collate_fn` that makes arrays of each table."
        )
    check_unmasked(x, f"The array of the examples at {where}")
    if isinstance(x, list):
        try:
            array = np.asarray(x)
        except ValueError as error:
            reason = str(error).rstrip(".")
            raise ValueError(
                f"The examples have a list at {where} that is not an array: {reason}. {_OWN}."
            ) from error
    else:
        array = as_numpy(x, f"The array of the examples at {where}")
    if not has_numbers(array.dtype):
        what = array.dtype
        if not isinstance(x, np.ndarray):
            what = type(x).__name__
        raise TypeError(
            f"The examples have {what} at {where}, and only arrays and numbers can be stacked. "
            f"{_OWN}, such as tokens of text, and leaves out other values, such as names of "
            f"files.{dtype_advice(array.dtype)}"
        )
    return array


def as_numpy(x: PyTree, what: str) -> np.ndarray:
    """An array of another library, such as a PyTorch tensor, or a number, as an array of NumPy.

    Raises `TypeError` for one that NumPy cannot read. Its message refers to the array by `what`.
    """
    try:
        return np.asarray(x)
    except (TypeError, ValueError, RuntimeError) as error:
        kind = f"{type(x).__module__}.{type(x).__qualname__}"
        if hasattr(x, "dtype"):
            kind += f" and dtype {x.dtype}"
        advice = "Convert it to an array of NumPy."
        if "bfloat16" in kind:
            advice = "Convert it to float32, such as by `x.float()`."
        reason = str(error).rstrip(".")
        raise TypeError(
            f"{what} is of type {kind}, which NumPy cannot read: {reason}. {advice}"
        ) from error


def _is_list_of_numbers(x: object) -> bool:
    """Whether a node is a list of numbers, possibly nested: an array in JSON."""
    # Only the first entries are looked at: NumPy finds out whether the others are alike.
    while type(x) is list:
        if not x:
            return True
        x = x[0]
        if isinstance(x, int | float | complex | np.number | np.bool_):
            return True
    return False


def _shown(structure: object) -> str:
    return str(structure).removeprefix("PyTreeDef(").removesuffix(")")
