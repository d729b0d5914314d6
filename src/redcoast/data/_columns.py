"""Columns as examples: the rows of a tuple of arrays, as Keras takes `(x, y)`, and of tables."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree


class Rows:
    """The rows of an array that has a shape and no length, as those of zarr and TensorStore."""

    def __init__(self, array: PyTree):
        self._array = array

    def __len__(self) -> int:
        return self._array.shape[0]

    def __getitem__(self, index: int) -> np.ndarray:
        return np.asarray(self._array[index])


def rows_of_array(x: PyTree) -> PyTree:
    """An array whose item i is its row i; other objects as they are."""
    if isinstance(x, jax.Array):
        # NumPy has no keys.
        if not x.is_fully_addressable or jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return x
        # Rows of an array of JAX would each be a computation.
        return np.asarray(x)
    # A column of pandas finds its rows by their labels, and not by their places.
    if hasattr(x, "iloc") and not is_table(x):
        if isinstance(x.dtype, np.dtype):
            return x.to_numpy()
        return x.array  # NumPy would have NaN for a missing integer
    if _is_array(x) and not hasattr(x, "__len__"):
        return Rows(x)
    return x


class Columns:
    """The examples of arrays with equal first dimensions; example i is the tuple of rows i."""

    def __init__(self, arrays: tuple[PyTree, ...]):
        self._arrays: list[PyTree] = list(map(rows_of_array, arrays))

    def __len__(self) -> int:
        return len(self._arrays[0])

    def __getitem__(self, index: int) -> tuple[PyTree, ...]:
        return tuple(x[index] for x in self._arrays)

    def __getitems__(self, indices: list[int]) -> list[tuple[PyTree, ...]]:
        columns: list[PyTree] = []
        for x in self._arrays:
            if isinstance(x, np.ndarray):
                columns.append(x[indices])
            else:  # it may not read several rows at a time
                columns.append([x[index] for index in indices])
        return list(zip(*columns, strict=True))


def as_columns(examples: tuple[PyTree, ...], name: str) -> Columns | None:
    """The rows of a tuple of arrays; `None` for a tuple of other things, which are examples.

    Raises `ValueError` if the arrays may be columns or examples, `TypeError` for columns of Arrow.
    """
    for i, x in enumerate(examples):
        refuse_arrow_column(x, f"{name}[{i}]")
    if not examples or not all(map(_is_array, examples)):
        return None
    count = len(examples)
    remedy = (
        f"If each of them is an example, pass `list({name})`; if they are columns, `list(zip(*"
        f"{name}))`, or a tuple of arrays with equal first dimensions."
    )
    # Of an array without dimensions, the shape is `()`.
    rows = {tuple(x.shape[:1]) for x in examples}
    if len(rows) > 1 or () in rows:
        shapes = ", ".join(str(tuple(x.shape)) for x in examples[:4])
        more = f" and {count - 4} more" * (count > 4)
        raise ValueError(
            f"`{name}` is a tuple of {count} arrays with different first dimensions, of shapes "
            f"{shapes}{more}. {remedy}"
        )
    # Columns usually differ, as images and labels do.
    kinds = {(tuple(x.shape), str(x.dtype)) for x in examples}
    if count > 1 and len(kinds) == 1:
        raise ValueError(
            f"`{name}` is a tuple of {count} arrays of one shape, {tuple(examples[0].shape)}, "
            f"which may be columns or examples. If they are columns, pass `list(zip(*{name}))`; if "
            f"each of them is an example, `list({name})`."
        )
    return Columns(examples)


def _is_array(x: object) -> bool:
    if not all(hasattr(x, name) for name in ("shape", "dtype", "__getitem__")):
        return False
    # A scalar of NumPy has none of both.
    return hasattr(x, "__len__") or len(getattr(x, "shape", ())) > 0


def refuse_arrow_column(x: object, name: str) -> None:
    """Raises `TypeError` for an array of Arrow, whose items are no numbers of Python or NumPy."""
    arrow = hasattr(x, "__arrow_c_stream__") or hasattr(x, "__arrow_c_array__")
    # Columns of pandas and Polars have shapes, and items that are numbers.
    if arrow and hasattr(x, "to_numpy") and not (hasattr(x, "shape") or hasattr(x, "columns")):
        raise TypeError(
            f"`{name}` is a column of Arrow, of type {type(x).__name__}. Pass it as an array of "
            f"NumPy, such as `{name}.to_numpy(zero_copy_only=False)`."
        )


def is_table(x: object) -> bool:
    """Whether this is a table or a part of one, as Arrow, pandas and Polars have them."""
    # The methods of Arrow's interface, which pyarrow, pandas and Polars have.
    arrow = hasattr(x, "__arrow_c_stream__") or hasattr(x, "__arrow_c_array__")
    return (arrow and hasattr(x, "columns")) or hasattr(x, "to_table")


def rows_of_table(table: object, name: str) -> str:
    """The expression that makes a list of the rows of a table, which has this name."""
    if hasattr(table, "to_pylist"):  # pyarrow
        return f"{name}.to_pylist()"
    if hasattr(table, "to_table"):  # pyarrow's files
        return f"{name}.to_table().to_pylist()"
    if hasattr(table, "to_dicts"):  # Polars
        return f"{name}.to_dicts()"
    return f'{name}.to_dict("records")'  # pandas
