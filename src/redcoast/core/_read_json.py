"""Reading JSON files that may be untrusted."""

import json
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

# An object of a JSON document. Who reads it knows the types of its values.
JSONObject: TypeAlias = dict[str, Any]

# Ten times the size of an index of a hundred thousand tensors.
MOST_BYTES = 2**27


def read_json(path: Path) -> JSONObject:
    """Reads the JSON object in a file.

    Raises `ValueError` that names the file if it does not contain a JSON object, is larger than 128
    MiB or is nested too deeply, or if the file is a pipe or a device; `OSError` if it cannot be
    opened.
    """
    with open_regular(path) as file:
        # As many bytes as are asked for are allocated.
        size = os.fstat(file.fileno()).st_size
        data = file.read(min(size, MOST_BYTES) + 1)
    if len(data) > MOST_BYTES:
        raise ValueError(
            f"{path} is larger than {MOST_BYTES >> 20} MiB, which is too large for a settings file."
        )
    try:
        document = json.loads(data)
    except ValueError as error:
        raise ValueError(f"{path} is damaged or is not JSON: {error}.") from error
    except RecursionError:
        # Not chained: the cause has a traceback of a thousand lines.
        raise ValueError(f"{path} is nested too deeply for a settings file.") from None
    if not isinstance(document, dict):
        raise ValueError(
            f"{path} must contain a JSON object, but contains a {type(document).__name__}."
        )
    return document


def open_regular(path: Path, *, buffering: int = -1) -> BinaryIO:
    """Opens a file for reading, but neither a pipe, which would wait for a writer, nor a device.

    Raises `ValueError` that names the file if it is not a regular file; `OSError` if it cannot be
    opened.
    """
    file: BinaryIO = open(path, "rb", buffering=buffering, opener=_at_once)  # noqa: SIM115  # the caller closes it
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise ValueError(f"{path} is a pipe or a device, and only regular files are read.")
    return file


def _at_once(name: str, flags: int) -> int:
    # With this flag, the opening of a pipe does not wait. Windows has neither.
    return os.open(name, flags | getattr(os, "O_NONBLOCK", 0))
