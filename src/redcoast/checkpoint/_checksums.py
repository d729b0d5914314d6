"""Sizes and checksums of a checkpoint's files.

Without them a flipped bit in the arrays would mostly read as another number: what compresses them
keeps no checksum.
"""

import json
import os
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ..core._json import read_json

FILE = "checksums.json"
# Against decay, not against forgery: it reads as fast as memory, in threads beside Python's.
ALGORITHM = "crc32"
BLOCK_BYTES = 2**20
THREADS = 4


def write_checksums(directory: Path) -> None:
    """Writes down the files in the directories of a checkpoint as they are now."""
    names = sorted(_files(directory))
    sums = dict(zip(names, _measure_all(directory, names), strict=True))
    document = {"algorithm": ALGORITHM, "files": sums, "of_this": _seal(sums)}
    (directory / FILE).write_text(json.dumps(document, indent=1), "utf-8")


def find_damage(directory: Path, *, part: int = 0, parts: int = 1) -> str | None:
    """What is wrong with the files of a checkpoint: a sentence that names one of them, or nothing.

    All files are looked for; each of several `parts` reads its share of them.
    """
    try:
        found = _files(directory)
        listed = _listed(directory)
    except ValueError as error:
        return str(error)
    for name, (size, _) in listed.items():
        if name not in found:
            return f"{directory / name} is missing."
        if found[name] != size:
            return f"{directory / name} has {found[name]} bytes, and was written with {size}."
    share = sorted(listed)[part::parts]
    with ThreadPoolExecutor(THREADS, thread_name_prefix="redcoast-checksum") as pool:
        for name, now in zip(
            share, pool.map(lambda n: _measure(directory / n), share), strict=True
        ):
            if now != listed[name]:
                return f"{directory / name} is not what was written: its checksum differs."
    return None


def kind_of_checksums(directory: Path) -> Any:
    """Which checksums a checkpoint has: those of older versions have none (`None`)."""
    file = directory / FILE
    return read_json(file).get("algorithm") if file.is_file() else None


def _listed(directory: Path) -> dict[str, list[Any]]:
    """Size and checksum of each file as they were written, if they are of the kind known here."""
    if kind_of_checksums(directory) != ALGORITHM:
        return {}
    document = read_json(directory / FILE)
    listed = document.get("files")
    if not isinstance(listed, dict) or document.get("of_this") != _seal(listed):
        raise ValueError(f"{directory / FILE} is not what was written: its checksum differs.")
    if not all(isinstance(x, list) and len(x) == 2 for x in listed.values()):
        raise ValueError(f"{directory / FILE} does not list files.")
    return listed


def _seal(listed: dict[str, Any]) -> str:
    return f"{zlib.crc32(json.dumps(listed, sort_keys=True).encode()):08x}"


def _files(directory: Path) -> dict[str, int]:
    """The files in the directories of a checkpoint, with their sizes. What lies beside these
    directories is Orbax's own, which changes it at the end, and is not read.

    **Raises:**

    `ValueError` if something leads out of the checkpoint, or is no file that can be read.
    """
    inside = directory.resolve()
    found = {}
    for path in _walk(directory):
        if path.is_symlink() and not path.resolve().is_relative_to(inside):
            raise ValueError(f"{path} is a link that leads out of the checkpoint.")
        if not path.is_file():
            raise ValueError(f"{path} is neither a file nor a directory.")
        found[path.relative_to(directory).as_posix()] = path.stat().st_size
    return found


def _walk(directory: Path) -> Iterator[Path]:
    for root, folders, files in os.walk(directory):
        # Links to directories are not followed, so that they are handed out to be refused.
        links = [name for name in folders if (Path(root) / name).is_symlink()]
        if Path(root) != directory:
            yield from (Path(root) / name for name in files)
        yield from (Path(root) / name for name in links)


def _measure_all(directory: Path, names: list[str]) -> list[list[Any]]:
    with ThreadPoolExecutor(THREADS, thread_name_prefix="redcoast-checksum") as pool:
        return list(pool.map(lambda name: _measure(directory / name), names))


def _measure(path: Path) -> list[Any]:
    """Size and checksum of a file, a block at a time."""
    size, value = 0, 0
    block = memoryview(bytearray(BLOCK_BYTES))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(block):
            size, value = size + count, zlib.crc32(block[:count], value)
    return [size, f"{value:08x}"]
