"""Files of GGUF: metadata, where the tensors are, and the tensors, mostly quantised
(<https://github.com/ggml-org/ggml/blob/master/docs/gguf.md>)."""

import functools as ft
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import jax.numpy as jnp
import numpy as np

from .stored import Box, Stored, read_file

_STRING, _ARRAY = 8, 9
_NUMBERS: dict[int, str] = dict(
    zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True)
)
_PLAIN = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": jnp.bfloat16}


@dataclass(frozen=True)
class GGUF:
    """What a file says of its model, and its tensors."""

    metadata: dict[str, Any]
    stored: dict[str, Stored]


def read_gguf(path: Path) -> GGUF:
    """Reads the metadata of a file, and of its tensors where they are.

    **Raises:**

    `ValueError` if the file is damaged, or holds tensors quantised in a way that is not known.
    """
    # The reader of the package `gguf` makes several arrays of each word of the vocabulary, which
    # takes three times as long as reading and dequantising all the tensors of a small model.
    with path.open("rb") as file:
        try:
            if file.read(4) != b"GGUF" or _number(file, "I") not in (2, 3):
                raise ValueError("it does not begin as one of version 2 or 3 does")
            tensors, entries = _number(file, "Q"), _number(file, "Q")
            metadata = {_string(file): _value(file, _number(file, "I")) for _ in range(entries)}
            where = [_tensor(file) for _ in range(tensors)]
        except (ValueError, KeyError, struct.error) as error:
            raise ValueError(f"{path} is damaged, or no GGUF file: {error}.") from error
        alignment = metadata.get("general.alignment", 32)
        begin = -(-file.tell() // alignment) * alignment
    return GGUF(
        metadata,
        {n: _stored(path, n, shape, kind, begin + start) for n, shape, kind, start in where},
    )


def _number(file: BinaryIO, code: str) -> Any:
    return struct.unpack(f"<{code}", file.read(struct.calcsize(code)))[0]


def _string(file: BinaryIO) -> str:
    length = int.from_bytes(file.read(8), "little")
    text = file.read(length)
    if len(text) < length:
        raise ValueError("it ends too soon")
    return text.decode()


def _value(file: BinaryIO, kind: int) -> Any:
    if kind == _STRING:
        return _string(file)
    if kind != _ARRAY:
        return _number(file, _NUMBERS[kind])
    kind, length = _number(file, "I"), _number(file, "Q")
    if kind in (_STRING, _ARRAY):
        return [_value(file, kind) for _ in range(length)]
    code = f"{length}{_NUMBERS[kind]}"
    return list(struct.unpack(f"<{code}", file.read(struct.calcsize(f"<{code}"))))


def _tensor(file: BinaryIO) -> tuple[str, tuple[int, ...], int, int]:
    name, dims = _string(file), _number(file, "I")
    shape = tuple(_number(file, "Q") for _ in range(dims))
    # The fastest dimension comes first in the file.
    return name, shape[::-1], _number(file, "I"), _number(file, "Q")


def _stored(path: Path, name: str, shape: tuple[int, ...], kind: int, offset: int) -> Stored:
    gguf = import_gguf(path)
    if kind not in {member.value for member in gguf.GGMLQuantizationType}:
        raise ValueError(f"{path} holds {name} quantised in a way (number {kind}) that is unknown.")
    form = gguf.GGMLQuantizationType(kind)
    block, size = gguf.GGML_QUANT_SIZES[form]
    if offset + prod(shape) // block * size > path.stat().st_size:
        raise ValueError(f"{path} is damaged: it ends before its tensor {name} does.")
    if form.name in _PLAIN:
        dtype = np.dtype(_PLAIN[form.name])
        return Stored(shape, dtype, ft.partial(read_file, path, offset, shape))
    read = ft.partial(_read_blocks, path, offset, shape, form)
    return Stored(shape, np.dtype(np.float32), read)


def _read_blocks(
    path: Path,
    offset: int,
    shape: tuple[int, ...],
    form: Any,
    box: Box,
    out: np.ndarray,
) -> None:
    """Reads a part of a tensor that is quantised in blocks along its last dimension."""
    gguf = import_gguf(path)
    block, size = gguf.GGML_QUANT_SIZES[form]
    *rows, columns = box
    low, high = columns.start // block, -(-columns.stop // block)
    raw = np.empty((*out.shape[:-1], (high - low) * size), np.uint8)
    in_bytes = (*shape[:-1], shape[-1] // block * size)
    read_file(path, offset, in_bytes, (*rows, slice(low * size, high * size)), raw)
    # As one row: the package takes 16 at a time, and those of small models are short.
    values = gguf.dequantize(raw.reshape(1, -1), form).reshape(*out.shape[:-1], -1)
    out[...] = values[..., columns.start - low * block : columns.stop - low * block]


def import_gguf(path: Path) -> Any:
    """The package, or an error that says how to get it."""
    try:
        import gguf
    except ImportError as error:
        raise ImportError(
            f"{path} can be read with the package `gguf`: pip install 'redcoast[gguf]'."
        ) from error
    return gguf
