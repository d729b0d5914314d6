"""Opening files of directories that may be untrusted."""

import os
import stat
from pathlib import Path
from typing import Any


def open_regular(path: Path, *, buffering: int = -1) -> Any:
    """Opens a file for reading, but neither a pipe, which would wait for a writer, nor a device.

    Raises `ValueError` that names the file if it is not a regular file; `OSError` if it cannot be
    opened.
    """
    # With this flag, the opening of a pipe does not wait. Windows has neither.
    at_once = lambda name, flags: os.open(name, flags | getattr(os, "O_NONBLOCK", 0))
    file = open(path, "rb", buffering=buffering, opener=at_once)  # noqa: SIM115  # the caller closes it
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise ValueError(f"{path} is a pipe or a device, and only regular files are read.")
    return file
