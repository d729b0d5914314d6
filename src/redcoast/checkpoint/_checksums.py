"""Sizes and checksums of a checkpoint's files.

The compression of the arrays has no checksum, so a flipped bit would usually be read as a different
number.
"""

import json
import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ..core._read_json import open_regular, read_json

FILE = "checksums.json"
# CRC-32C detects corruption, not tampering, as well as CRC-32 does. Processors have an instruction
# for it, so that it takes half as long.
ALGORITHM = "crc32c"
OF_EARLIER_VERSIONS = "crc32"
BLOCK_BYTES = 2**18
THREADS = 4
Extend = Callable[[int, bytes], int]  # the checksum of some bytes and of those that follow them


def write_checksums(directory: Path) -> None:
    """Records the sizes and checksums of all files in a checkpoint's directories."""
    sums = dict(_measured(directory, sorted(_files(directory)), ALGORITHM))
    document = {"algorithm": ALGORITHM, "files": sums, "of_this": _seal(sums)}
    (directory / FILE).write_text(json.dumps(document, indent=1), "utf-8")


def find_damage(directory: Path, *, part: int = 0, parts: int = 1) -> str | None:
    """Compares the files of a checkpoint with their checksums.

    - `directory`: the checkpoint.
    - `part`, `parts`: which share of the files to read. The sizes of all files are compared.

    Returns a sentence that names the first damaged file, or `None`.
    """
    try:
        sizes = _files(directory)
        algorithm = kind_of_checksums(directory)
        if algorithm not in (ALGORITHM, OF_EARLIER_VERSIONS):
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
    for name, now in _measured(directory, sorted(listed)[part::parts], algorithm):
        if now != listed[name]:
            return f"{directory / name} has changed since it was written: its checksum differs."
    return None


def kind_of_checksums(directory: Path) -> str | None:
    """The checksum algorithm of a checkpoint; `None` for older versions, which have none."""
    file = directory / FILE
    if not file.is_file():
        return None
    return read_json(file).get("algorithm")


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
    directory: Path, names: Sequence[str], algorithm: str
) -> Iterator[tuple[str, list[int | str]]]:
    """Each file with its size and checksum, measured in threads."""
    extend = _extend_of(algorithm)
    with ThreadPoolExecutor(THREADS, thread_name_prefix="redcoast-checksum") as pool:
        measured = pool.map(lambda name: _measure(directory / name, extend), names)
        yield from zip(names, measured, strict=True)


def _extend_of(algorithm: str) -> Extend:
    if algorithm == OF_EARLIER_VERSIONS:
        return lambda value, block: zlib.crc32(block, value)
    import google_crc32c

    return google_crc32c.extend


def _measure(path: Path, extend: Extend) -> list[int | str]:
    """The size and checksum of a file, read one block at a time."""
    size, value = 0, 0
    with open_regular(path, buffering=0) as file:
        while block := file.read(BLOCK_BYTES):
            size += len(block)
            value = extend(value, block)
    return [size, f"{value:08x}"]
