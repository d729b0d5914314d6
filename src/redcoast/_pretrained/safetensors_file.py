"""Files of safetensors: the length of a header, the header in JSON, and one array after the other
(<https://github.com/huggingface/safetensors#format>)."""

import functools as ft
import json
import os
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from .stored import Stored, read_file

_DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(jnp.bfloat16),
    "F8_E4M3": np.dtype(jnp.float8_e4m3fn),
    "F8_E5M2": np.dtype(jnp.float8_e5m2),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U64": np.dtype(np.uint64),
    "U32": np.dtype(np.uint32),
    "U16": np.dtype(np.uint16),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def read_safetensors(path: Path) -> dict[str, Stored]:
    """The arrays of a file, of which only the header is read.

    **Raises:**

    `ValueError` if the file is damaged, or has a dtype that is not known.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = file.read(length) if length <= size - 8 else b""
    try:
        entries = json.loads(header)
        entries.pop("__metadata__", None)
        return {name: _stored(path, 8 + length, size, **entry) for name, entry in entries.items()}
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        raise ValueError(
            f"{path} is damaged, or no file of safetensors: {error}. Fetch or save it again."
        ) from error


def _stored(
    path: Path, begin: int, size: int, dtype: str, shape: list[int], data_offsets: list[int]
) -> Stored:
    if dtype not in _DTYPES:
        raise ValueError(f"it holds the dtype {dtype}, and known are {', '.join(_DTYPES)}")
    start, stop = data_offsets
    kind, dims = _DTYPES[dtype], tuple(shape)
    if stop - start != prod(dims) * kind.itemsize or start < 0 or begin + stop > size:
        raise ValueError(f"an array of shape {dims} in {dtype} is not at bytes {start} to {stop}")
    return Stored(dims, kind, ft.partial(read_file, path, begin + start, dims))


def write_safetensors(
    path: Path,
    shapes: dict[str, tuple[tuple[int, ...], np.dtype]],
    arrays: Iterator[np.ndarray],
) -> None:
    """Writes a file, holding one array at a time.

    **Arguments:**

    - `path`: of a file that does not exist.
    - `shapes`: shape and dtype of each array.
    - `arrays`: the arrays in the same order.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # what `transformers` asks for
    end = 0
    for name, (shape, dtype) in shapes.items():
        start, end = end, end + prod(shape) * dtype.itemsize
        header[name] = {"dtype": _NAMES[dtype], "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("xb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for array in arrays:
            file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        file.flush()
        os.fsync(file.fileno())
