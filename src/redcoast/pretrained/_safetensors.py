"""Reading and writing safetensors files."""

import functools as ft
from collections.abc import Iterator
from math import prod
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from ..core._durable_files import sync
from ..core._regular_file import open_regular
from ._lazy_tensor import Box, Stored

# Bytes to read at once. Mapped pages count as memory of the process until the file is closed.
MAPPED_BYTES = 2**22
_DTYPES = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": jnp.bfloat16,
    "F8_E4M3": jnp.float8_e4m3fn,
    "F8_E5M2": jnp.float8_e5m2,
    "BOOL": np.bool_,
    "I64": np.int64,
    "I32": np.int32,
    "I16": np.int16,
    "I8": np.int8,
    "U64": np.uint64,
    "U32": np.uint32,
    "U16": np.uint16,
    "U8": np.uint8,
}


def read_safetensors(path: Path) -> dict[str, Stored]:
    """Returns the arrays of a file. Only its header is read.

    **Raises:**

    `ValueError` if the file is damaged, or has an unknown dtype.
    """
    open_regular(path).close()  # `safe_open` would wait for the writer of a pipe
    try:
        with safe_open(path, "numpy") as file:
            return {name: _stored(path, name, file.get_slice(name)) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, KeyError, ValueError) as error:
        raise ValueError(
            f"{path} is damaged, or not a safetensors file: {error}. Download or save it again."
        ) from error


def _stored(path: Path, name: str, header) -> Stored:
    shape = tuple(header.get_shape())
    return Stored(shape, np.dtype(_DTYPES[header.get_dtype()]), ft.partial(_read, path, name))


def _read(path: Path, name: str, box: Box, out: np.ndarray) -> None:
    if not box:
        with safe_open(path, "numpy") as file:
            out[...] = file.get_tensor(name)
        return
    row = max(1, prod(out.shape[1:]) * out.itemsize)
    step = max(1, MAPPED_BYTES // row)
    for low in range(box[0].start, box[0].stop, step):
        high = min(low + step, box[0].stop)
        with safe_open(path, "numpy") as file:
            rows = file.get_slice(name)[slice(low, high), *box[1:]]
        out[low - box[0].start : high - box[0].start] = rows


def write_safetensors(
    path: Path,
    shapes: dict[str, tuple[tuple[int, ...], np.dtype]],
    arrays: Iterator[np.ndarray],
) -> None:
    """Writes a file.

    **Arguments:**

    - `path`: the path of a file that does not exist yet.
    - `shapes`: the shape and dtype of each array, by its name.
    - `arrays`: the arrays, in the same order.
    """
    found = {name: np.ascontiguousarray(x) for name, x in zip(shapes, arrays, strict=True)}
    save_file(found, path, metadata={"format": "pt"})  # required by `transformers`
    sync(path)
