"""Windows of a flat array of tokens, such as a memory map, as examples."""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

import numpy as np
from jaxtyping import Integer, PyTree
from numpy.lib.stride_tricks import sliding_window_view

from ..core._donation import refuse_deleted_argument
from ..core._errors import check_integer

_Tokens = Integer[np.ndarray, " _"]  # of any length


class TokenWindows:
    """The examples that [`redcoast.token_windows`][] returns."""

    def __init__(self, parts: list[_Tokens], length: int, stride: int):
        self._parts, self._length, self._stride = parts, length, stride
        counts = [max(0, (len(part) - length) // stride + 1) for part in parts]
        self._ends = list(accumulate(counts))  # the number of windows up to the end of each part
        self._windows: Integer[np.ndarray, "windows length"] | None = None  # views of one array
        if len(parts) == 1 and isinstance(parts[0], np.ndarray):
            tokens = np.asarray(parts[0])  # to slice a memory map takes longer
            self._windows = sliding_window_view(tokens, length)[::stride]

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int | np.integer) -> np.ndarray:
        if not -len(self) <= index < len(self):
            raise IndexError(f"There are {len(self)} windows, and none at {index}.")
        index = int(index) % len(self)
        part = bisect_right(self._ends, index)
        before = 0  # windows of earlier parts
        if part > 0:
            before = self._ends[part - 1]
        start = (index - before) * self._stride
        window = self._parts[part][start : start + self._length]
        return np.array(window, _dtype_of_window(window.dtype))

    def __getitems__(self, indices: list[int]) -> np.ndarray:
        """The windows at several indices, which are copied together if there is one array."""
        if self._windows is None or not (min(indices) >= 0 and max(indices) < len(self)):
            return np.stack([self[index] for index in indices])
        # An array of its own, since NumPy copies what a list of indices selects.
        windows = self._windows[indices]
        return windows.astype(_dtype_of_window(windows.dtype), copy=False)


def _dtype_of_window(dtype: np.dtype) -> np.dtype:
    # Small unsigned integers, in which tokens are stored, overflow in arithmetic.
    if dtype.itemsize < 4:
        return np.dtype(np.int32)
    return dtype


def token_windows(
    tokens: _Tokens | Sequence[_Tokens], length: int, *, stride: int | None = None
) -> TokenWindows:
    """Splits a flat array of tokens into windows of a fixed length, which are the examples.

    Only the windows of the current batches are read, so `tokens` may be a memory map that is larger
    than memory. [`redcoast.fit`][] reads the windows in a new order in each epoch.

    **Arguments:**

    - `tokens`: a one-dimensional array of integers, or a list of such arrays, such as one for each
        file. No window spans two arrays.
    - `length`: the number of tokens in a window. For next-token prediction, pass the context length
        of the model plus one.
    - `stride`: the number of tokens between the starts of windows; by default `length`, so that no
        token is in two windows. With `length - 1`, each token is predicted once.

    **Returns:**

    An object with a length and an index. A window has shape `(length,)`, and the dtype of `tokens`,
    or int32 if that has fewer than 32 bits. Tokens at the end of an array that do not fill a window
    are not read.

    **Raises:**

    `ValueError` or `TypeError` if `tokens` has another dtype or shape, or is shorter than a window.

    !!! Example

        ```python
        tokens = np.arange(100, dtype=np.uint16)  # np.memmap("train.bin", np.uint16, "r")
        windows = rc.token_windows(tokens, 33, stride=32)
        print(len(windows), windows[2][:4])
        ```
    """
    check_integer("length", length)
    if stride is None:
        stride = length
    check_integer("stride", stride)
    parts: list[PyTree] = [tokens]
    if isinstance(tokens, list | tuple):
        parts = list(tokens)
    refuse_deleted_argument("tokens", *parts)
    for part in parts:
        shape, dtype = getattr(part, "shape", None), getattr(part, "dtype", None)
        if shape is None or len(shape) != 1 or not np.issubdtype(np.dtype(dtype), np.integer):
            what = type(part).__name__
            if shape is not None:
                what = f"an array {dtype}{list(shape)}"
            raise TypeError(
                f"`tokens` has {what}. It must be an array of integers with one dimension, such as "
                '`np.memmap("train.bin", np.uint16, "r")`, or a list of such arrays.'
            )
    longest = max(map(len, parts), default=0)
    if longest < length:
        raise ValueError(
            f"`tokens` has at most {longest} tokens in an array, fewer than a window of {length}. "
            "Pass a smaller `length`, or longer arrays."
        )
    return TokenWindows(parts, length, stride)
