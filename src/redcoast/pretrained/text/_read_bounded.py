"""Files of a limited size."""

from pathlib import Path

from ...core._read_json import open_regular


def read_bounded(path: Path, most: int) -> bytes:
    """Reads a regular file of at most `most` bytes.

    Raises `ValueError` that names the file if it is larger, or is a pipe or a device.
    """
    with open_regular(path) as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise ValueError(f"{path} is larger than {most >> 20} MiB, which is too large for it.")
    return data
