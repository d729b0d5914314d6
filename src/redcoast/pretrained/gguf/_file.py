"""Reading GGUF files: metadata, and (mostly quantised) tensors
(<https://github.com/ggml-org/ggml/blob/master/docs/gguf.md>)."""

import functools as ft
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from ...core._errors import several
from ...core._packages import require_package
from ...core._read_json import open_regular
from .._files import file_inside
from .._lazy_tensor import Box, Stored
from .._settings import Settings

# The bytes of a value of each type of metadata: integers of 8, 16 and 32 bits, without and with a
# sign, float32, bool, and integers and floats of 64 bits. Types 8 and 9 have no fixed size.
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_STRING, _ARRAY = 8, 9
MOST_NESTED = 4  # maximum depth of nested arrays; models have none
MOST_DIMENSIONS = 8


def check_header(path: Path) -> None:
    """Checks the metadata and the descriptions of the tensors against the size of the file.

    Raises `ValueError` that describes the first problem.
    """
    size = path.stat().st_size
    with open_regular(path) as file:
        # Numbers are little-endian. After the magic number come the version (uint32), the numbers
        # of tensors and of pairs of metadata (uint64 each), the pairs, and the tensors' headers.
        if file.read(4) != b"GGUF":
            raise ValueError("it does not start with the GGUF magic number")
        (version,) = struct.unpack("<I", _take(file, 4))
        # Version 1 has counts of 32 bits. A big-endian file of version 3 has this number reversed.
        if version not in (2, 3):
            raise ValueError(f"it has version {version}, but only 2 and 3 are supported")
        tensors, pairs = struct.unpack("<QQ", _take(file, 16))
        # A pair is a name (its length as a uint64, and its bytes), a type (uint32), and a value.
        for _ in range(pairs):
            _skip(file, _long(file), size)
            _value(file, _int(file), size, 0)
        # A header is a name, the number of dimensions (uint32), their sizes (uint64 each), the type
        # of the tensor (uint32), and where its data begins (uint64).
        for _ in range(tensors):
            _skip(file, _long(file), size)
            if (dimensions := _int(file)) > MOST_DIMENSIONS:
                raise ValueError(f"a tensor has {dimensions} dimensions")
            _take(file, 8 * dimensions + 4 + 8)


def check_extents(extents: list[tuple[str, int, int]], size: int) -> None:
    """Raises if tensors overlap, or extend beyond the end of the file."""
    end, before = 0, ""
    for name, start, count in sorted(extents, key=lambda x: (x[1], x[2])):
        # A tensor without elements may begin anywhere.
        if count and start < end:
            raise ValueError(f"the tensors {before} and {name} overlap")
        if start + count > size:
            raise ValueError(f"the tensor {name} extends beyond the end of the file")
        end, before = max(end, start + count), name


def _value(file: BinaryIO, kind: int, size: int, depth: int) -> None:
    if kind == _STRING:
        _skip(file, _long(file), size)
    elif kind == _ARRAY:
        if depth == MOST_NESTED:
            raise ValueError("its metadata is nested too deeply")
        # An array is the type of its elements (uint32), their number (uint64), and the elements.
        kind, count = _int(file), _long(file)
        if kind in _SIZES:
            _skip(file, _SIZES[kind] * count, size)
        else:
            for _ in range(count):  # each element takes some bytes, so this ends with the file
                _value(file, kind, size, depth + 1)
    elif kind in _SIZES:
        _skip(file, _SIZES[kind], size)
    else:
        raise ValueError(f"it has metadata of the unknown type {kind}")


def _skip(file: BinaryIO, count: int, size: int) -> None:
    # `seek` would accept a place behind the end.
    if file.tell() + count > size:
        raise ValueError(f"its header claims {count} bytes beyond the end of the file")
    file.seek(count, 1)


def _take(file: BinaryIO, count: int) -> bytes:
    data = file.read(count)
    if len(data) < count:
        raise ValueError("it ends in the middle of its header")
    return data


def _int(file: BinaryIO) -> int:
    return struct.unpack("<I", _take(file, 4))[0]


def _long(file: BinaryIO) -> int:
    return struct.unpack("<Q", _take(file, 8))[0]


# The vocabulary, which the model does not need.
_LONG = ("tokenizer.ggml.tokens", "tokenizer.ggml.merges", "tokenizer.ggml.scores")


@dataclass(frozen=True)
class GGUF:
    """The metadata and the tensors of a file."""

    metadata: Settings
    stored: dict[str, Stored]


def read_gguf(path: Path) -> GGUF:
    """Reads the metadata of a file and the locations of its tensors. If a model has several files,
    all of them are read.

    Raises `ValueError` if a file is damaged, is missing, or has tensors with an unknown
    quantisation.
    """
    first = _read_file(path)
    count = first.metadata.get(COUNT, 1)
    # Files that were not split have no such number, or one of these.
    if count in (0, 1):
        return first
    metadata, stored = {}, {}
    for number, part in enumerate(files_of_model(path, count)):
        file = first
        if part != path:
            file = _read_file(part)
        if (file.metadata.get(COUNT), file.metadata.get(NUMBER)) != (count, number):
            raise ValueError(
                f"{part} is not part {number + 1} of the {count} of {path}: its `{COUNT}` is "
                f"{file.metadata.get(COUNT)!r} and its `{NUMBER}` is {file.metadata.get(NUMBER)!r}."
            )
        if twice := stored.keys() & file.stored.keys():
            raise ValueError(f"{part} holds {min(twice)}, but so does another part of {path}.")
        stored |= file.stored
        # The first part has the metadata of the model, and counts where another has it, too.
        metadata = file.metadata | metadata
    if (tensors := metadata.get(TENSORS, len(stored))) != len(stored):
        raise ValueError(
            f"The parts of {path} hold {len(stored)} tensors, but should hold {tensors}. Download "
            "them again."
        )
    return GGUF(metadata, stored)


COUNT, NUMBER, TENSORS = "split.count", "split.no", "split.tensors.count"
_NAME = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")


def files_of_model(path: Path, count: int) -> list[Path]:
    """Returns the paths of the files of a model, one of which is `path`.

    Raises `ValueError` if the names of the others cannot be derived from it, or if one is missing.
    """
    match = _NAME.fullmatch(path.name)
    if match is None or int(match[3]) != count:
        raise ValueError(
            f"{path} is one of {count} files of a model. They are found by their names, which must "
            f"be such as model-00001-of-{count:05}.gguf."
        )
    parts = []
    for number in range(1, count + 1):
        name = f"{match[1]}-{number:05}-of-{match[3]}.gguf"
        parts.append(file_inside(path.parent, name))
    if missing := [part.name for part in parts if not part.is_file()]:
        raise ValueError(
            f"{path} is one of {count} files of a model, of which {path.parent} lacks "
            f"{several(missing)}. Download them to the same directory."
        )
    return parts


def first_part(files: list[Path]) -> Path | None:
    """Returns the first of several files if their names show that they are parts of one model."""
    models = set()
    for file in files:
        match = _NAME.fullmatch(file.name)
        if match is None:
            return None
        models.add((match[1], match[3]))
    if len(models) != 1:
        return None
    return min(files)


def _read_file(path: Path) -> GGUF:
    require_package("gguf", f"Reading {path}", "'redcoast[gguf]'")
    from gguf import GGUFReader

    try:
        check_header(path)
        reader = GGUFReader(path)
        metadata = {}
        for name, field in reader.fields.items():
            if name not in _LONG:
                metadata[name] = field.contents()
        check_extents(
            [(x.name, x.data_offset, x.data.nbytes) for x in reader.tensors], path.stat().st_size
        )
    except (ValueError, LookupError, TypeError, OverflowError) as error:
        raise ValueError(f"{path} is damaged, or not a GGUF file: {error}.") from error
    stored = {}
    for tensor in reader.tensors:
        # GGUF lists the fastest dimension first.
        shape = tuple(map(int, tensor.shape[::-1]))
        kind, read = np.dtype(np.float32), _read_blocks
        if tensor.data.dtype.kind == "f":
            kind, read = tensor.data.dtype, _read_plain
        stored[tensor.name] = Stored(shape, kind, ft.partial(read, tensor))
    return GGUF(metadata, stored)


def _read_plain(tensor: Any, box: Box, out: np.ndarray) -> None:
    out[...] = tensor.data[box]


def _read_blocks(tensor: Any, box: Box, out: np.ndarray) -> None:
    """Reads a part of a tensor that is quantised in blocks along its last dimension."""
    import gguf

    block, size = gguf.GGML_QUANT_SIZES[tensor.tensor_type]  # numbers and bytes of a block
    *rows, columns = box
    low, high = columns.start // block, -(-columns.stop // block)
    # `tensor.data` has the dimensions of the tensor, of which the last counts bytes.
    raw = np.ascontiguousarray(tensor.data[*rows, low * size : high * size])
    values = gguf.dequantize(raw, tensor.tensor_type)
    out[...] = values[..., columns.start - low * block : columns.stop - low * block]
