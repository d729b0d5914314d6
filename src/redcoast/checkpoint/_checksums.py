"""Sizes and checksums of a checkpoint's files.

The compression of the arrays has no checksum, so a flipped bit would usually be read as a different
number.
"""

import functools as ft
import importlib
import json
import os
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

from ..core._read_json import open_regular, read_json

FILE = "checksums.json"
CRC32C, CRC32 = "crc32c", "crc32"
BLOCK_BYTES = 2**18  # other threads of Python wait while the checksum of a block is computed
THREADS = 4
Extend = Callable[[int, bytes], int]  # the checksum of some bytes and of those that follow them


@ft.cache
def algorithm() -> str:
    """The algorithm of new checksums, which detects corruption, not tampering.

    Processors have an instruction for CRC-32C, so that it takes less than half as long as CRC-32.
    Where there is no compiled package for it, it would take many times as long.
    """
    if _google_crc32c().implementation == "c":
        return CRC32C
    return CRC32


def write_checksums(directory: Path) -> None:
    """Records the sizes and checksums of all files in a checkpoint's directories."""
    sums = dict(_measured(directory, sorted(_files(directory)), algorithm()))
    document = {"algorithm": algorithm(), "files": sums, "of_this": _seal(sums)}
    (directory / FILE).write_text(json.dumps(document, indent=1), "utf-8")


def find_damage(directory: Path, *, part: int = 0, parts: int = 1) -> str | None:
    """Compares the files of a checkpoint with their checksums.

    - `directory`: the checkpoint.
    - `part`, `parts`: which share of the files to read. The sizes of all files are compared.

    Returns a sentence that names the first damaged file, or `None`; also `None` if the checksums
    are of an unknown algorithm, or if there are none.
    """
    try:
        sizes = _files(directory)
        kind = kind_of_checksums(directory)
        if kind not in (CRC32C, CRC32):
            return None
        listed = _listed(directory)
    except ValueError as error:
        return str(error)
    for name, (size, _) in listed.items():
        if name not in sizes:
            return f"{directory / name} is missing."
        # Before any file is read, because a size costs nothing.
        if sizes[name] != size:
            return f"{directory / name} has {sizes[name]} bytes, but was written with {size}."
    # Each process reads every `parts`-th file.
    for name, now in _measured(directory, sorted(listed)[part::parts], kind):
        if now != listed[name]:
            return f"{directory / name} has changed since it was written: its checksum differs."
    return None


def kind_of_checksums(directory: Path) -> str | None:
    """The checksum algorithm of a checkpoint; `None` for older versions, which have none."""
    file = directory / FILE
    if not file.is_file():
        return None
    kind = read_json(file).get("algorithm")
    if kind is not None and not isinstance(kind, str):
        raise ValueError(f"{file} does not name an algorithm, but has {kind!r} in its place.")
    return kind


def _listed(directory: Path) -> dict[str, list[int | str]]:
    """The recorded size and checksum of each file."""
    document = read_json(directory / FILE)
    listed = document.get("files")
    if not isinstance(listed, dict) or document.get("of_this") != _seal(listed):
        raise ValueError(
            f"{directory / FILE} has changed since it was written: its checksum differs."
        )
    if not all(isinstance(x, list) and len(x) == 2 for x in listed.values()):
        raise ValueError(f"{directory / FILE} is not a list of files with sizes and checksums.")
    return listed


def _seal(listed: Mapping[str, list[int | str]]) -> str:
    # The list is not one of the files that it has checksums of.
    return f"{zlib.crc32(json.dumps(listed, sort_keys=True).encode()):08x}"


def _files(directory: Path) -> dict[str, int]:
    """The files in the subdirectories of a checkpoint, with their sizes.

    Files at the top level are skipped: they belong to Orbax, which changes them when it finishes.

    Raises `ValueError` if a link points outside the checkpoint, or an entry is not a regular file.
    """
    inside = directory.resolve()
    sizes = {}
    for root, folders, files in os.walk(directory):
        # `os.walk` does not follow links to directories, which are rejected.
        names = [name for name in folders if (Path(root) / name).is_symlink()]
        if Path(root) != directory:
            names += files
        for name in names:
            path = Path(root) / name
            if path.is_symlink() and not path.resolve().is_relative_to(inside):
                raise ValueError(f"{path} is a link that leads out of the checkpoint.")
            if not path.is_file():
                raise ValueError(f"{path} is neither a file nor a directory.")
            sizes[path.relative_to(directory).as_posix()] = path.stat().st_size
    return sizes


def _measured(
    directory: Path, names: Sequence[str], kind: str
) -> Iterator[tuple[str, list[int | str]]]:
    """Each file with its size and checksum, measured in threads."""
    extend = _extend_of(kind)
    with ThreadPoolExecutor(THREADS, thread_name_prefix="redcoast-checksum") as pool:
        measured = pool.map(lambda name: _measure(directory / name, extend), names)
        yield from zip(names, measured, strict=True)


def _extend_of(kind: str) -> Extend:
    """The function that computes checksums by an algorithm."""
    if kind == CRC32:
        return lambda value, block: zlib.crc32(block, value)
    return _google_crc32c().extend


def _google_crc32c() -> ModuleType:
    """The package for CRC-32C, which is imported when it is needed, and not with redcoast."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is not compiled
        return importlib.import_module("google_crc32c")


def _measure(path: Path, extend: Extend) -> list[int | str]:
    """The size and checksum of a file, read one block at a time."""
    size, value = 0, 0
    with open_regular(path, buffering=0) as file:
        while block := file.read(BLOCK_BYTES):
            size += len(block)
            value = extend(value, block)
    return [size, f"{value:08x}"]
