"""Files of GGUF: metadata, and tensors, mostly quantised
(<https://github.com/ggml-org/ggml/blob/master/docs/gguf.md>)."""

import functools as ft
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .gguf_check import check_extents, check_header
from .stored import Box, Stored

# Words of the vocabulary and the like: nothing that a model computes with.
_LONG = ("tokenizer.ggml.tokens", "tokenizer.ggml.merges", "tokenizer.ggml.scores")


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
    gguf = _import_gguf(path)
    try:
        check_header(path)
        reader = gguf.GGUFReader(path)
        fields = {name: field for name, field in reader.fields.items() if name not in _LONG}
        metadata = {name: field.contents() for name, field in fields.items()}
        check_extents(
            [(x.name, x.data_offset, x.data.nbytes) for x in reader.tensors], path.stat().st_size
        )
    except (ValueError, LookupError, TypeError, OverflowError) as error:
        raise ValueError(f"{path} is damaged, or no GGUF file: {error}.") from error
    return GGUF(metadata, {tensor.name: _stored(gguf, tensor) for tensor in reader.tensors})


def _stored(gguf: Any, tensor: Any) -> Stored:
    # The fastest dimension comes first in the file.
    shape = tuple(int(size) for size in tensor.shape[::-1])
    if tensor.data.dtype.kind == "f":
        return Stored(shape, tensor.data.dtype, ft.partial(_read_plain, tensor.data))
    return Stored(shape, np.dtype(np.float32), ft.partial(_read_blocks, gguf, tensor))


def _read_plain(data: np.ndarray, box: Box, out: np.ndarray) -> None:
    out[...] = data[box]


def _read_blocks(gguf: Any, tensor: Any, box: Box, out: np.ndarray) -> None:
    """Reads a part of a tensor that is quantised in blocks along its last dimension."""
    block, size = gguf.GGML_QUANT_SIZES[tensor.tensor_type]
    *rows, columns = box
    low, high = columns.start // block, -(-columns.stop // block)
    raw = np.ascontiguousarray(tensor.data[*rows, low * size : high * size])
    values = gguf.dequantize(raw, tensor.tensor_type)
    out[...] = values[..., columns.start - low * block : columns.stop - low * block]


def _import_gguf(path: Path) -> Any:
    """The package, or an error that says how to get it."""
    try:
        import gguf
    except ImportError as error:
        raise ImportError(
            f"{path} can be read with the package `gguf`: pip install 'redcoast[gguf]'."
        ) from error
    return gguf
