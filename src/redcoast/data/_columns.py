"""Columns as examples: the rows of a tuple of arrays, as Keras takes `(x, y)`, and of tables."""

import jax
import numpy as np
from jaxtyping import PyTree


class Columns:
    """The examples of arrays with equal first dimensions; example i is the tuple of rows i."""

    def __init__(self, arrays: tuple[PyTree, ...]):
        self._arrays: list[PyTree] = []
        for x in arrays:
            # Rows of an array of JAX would each be a computation.
            if isinstance(x, jax.Array):
                x = np.asarray(x)
            self._arrays.append(x)

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

    Raises `ValueError` if the arrays may be columns or examples.
    """
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
    return all(hasattr(x, name) for name in ("shape", "dtype", "__getitem__", "__len__"))


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
