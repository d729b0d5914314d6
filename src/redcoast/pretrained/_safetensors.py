"""Reads and writes safetensors files."""

import functools as ft
import json
import struct
from collections.abc import Callable, Iterator
from math import prod
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from ..core._durable_files import sync
from ..core._read_json import open_regular
from ._lazy_tensor import Box, Stored

# Bytes to read at once. Mapped pages count as memory of the process until the file is closed.
MAPPED_BYTES = 2**22
# The types of the format (<https://huggingface.co/docs/safetensors>) that models here have.
_DTYPES = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": jnp.bfloat16,
    "F8_E4M3": jnp.float8_e4m3fn,
    "F8_E5M2": jnp.float8_e5m2,
    "F8_E8M0": jnp.float8_e8m0fnu,
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
_8_BITS = {np.dtype(_DTYPES[name]) for name in ("F8_E4M3", "F8_E5M2", "F8_E8M0")}
Shape = tuple[int, ...]


def read_safetensors(path: Path) -> dict[str, Stored]:
    """Returns the arrays of a file. Only its header is read.

    Raises `ValueError` if the file is damaged, or has an unknown dtype.
    """
    open_regular(path).close()  # `safe_open` would wait for the writer of a pipe
    try:
        with safe_open(path, "numpy") as file:
            stored = {}
            for name in file.keys():  # noqa: SIM118
                header = file.get_slice(name)
                shape, dtype = tuple(header.get_shape()), np.dtype(_DTYPES[header.get_dtype()])
                stored[name] = Stored(shape, dtype, ft.partial(_read, path, name))
        return stored | _of_8_bits(path, stored)
    except (SafetensorError, KeyError, ValueError) as error:
        raise ValueError(
            f"{path} is damaged, or not a safetensors file: {error}. Download or save it again."
        ) from error


def _of_8_bits(path: Path, stored: dict[str, Stored]) -> dict[str, Stored]:
    """Returns the tensors of 8-bit floating-point numbers, which the package `safetensors` cannot
    read to NumPy."""
    # `np.memmap` cannot map a tensor without elements, which `safetensors` reads.
    small = {name: x for name, x in stored.items() if x.dtype in _8_BITS and 0 not in x.shape}
    if not small:
        return {}
    # A file is the length of its header (8 bytes, little-endian), the header in JSON, and the data.
    # Offsets of tensors count from the end of the header.
    with open_regular(path) as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    for name, x in small.items():
        start = 8 + length + header[name]["data_offsets"][0]
        small[name] = Stored(x.shape, x.dtype, ft.partial(_read_8_bits, path, start, x.shape))
    return small


def _read(path: Path, name: str, box: Box, out: np.ndarray) -> None:
    def read(part: Box) -> np.ndarray:
        with safe_open(path, "numpy") as file:
            if part:
                return file.get_slice(name)[part]
            return file.get_tensor(name)

    _read_rows(read, box, out)


def _read_8_bits(path: Path, start: int, shape: Shape, box: Box, out: np.ndarray) -> None:
    _read_rows(lambda part: np.memmap(path, out.dtype, "r", start, shape)[part], box, out)


def _read_rows(read: Callable[[Box], np.ndarray], box: Box, out: np.ndarray) -> None:
    """Reads a part of an array, mapping no more than `MAPPED_BYTES` at once."""
    if not box:
        out[...] = read(())
        return
    row = max(1, prod(out.shape[1:]) * out.itemsize)
    step = max(1, MAPPED_BYTES // row)
    for low in range(box[0].start, box[0].stop, step):
        high = min(low + step, box[0].stop)
        out[low - box[0].start : high - box[0].start] = read((slice(low, high), *box[1:]))


def write_safetensors(
    path: Path, shapes: dict[str, tuple[tuple[int, ...], np.dtype]], arrays: Iterator[np.ndarray]
) -> None:
    """Writes a new file, with the shape and dtype of each array, by its name, and the arrays in the
    same order."""
    # NumPy makes a contiguous array of a single number one-dimensional.
    contiguous = {}
    for (name, (shape, _)), x in zip(shapes.items(), arrays, strict=True):
        contiguous[name] = np.ascontiguousarray(x).reshape(shape)
    save_file(contiguous, path, metadata={"format": "pt"})  # required by `transformers`
    sync(path)
