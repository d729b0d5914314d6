"""One run at a time in a directory."""

import contextlib
import errno
import json
import logging
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from ._exchange import is_main

logger = logging.getLogger("redcoast")

FILE = "run.lock"
TAKEN = (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES)


@contextlib.contextmanager
def lock_run(directory: Path | None) -> Iterator[None]:
    """Keeps other runs out of a directory, if there is one. The lock is the operating system's,
    which ends it with the process, however that ends; the file only says whose it is.

    **Raises:**

    `ValueError` that names the host and the process of the run that is there already.
    """
    if directory is None or not is_main():
        yield
        return
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / FILE).open("ab+", buffering=0) as file:
        if _take(file, directory):
            _sign(file)
        yield


def _take(file: BinaryIO, directory: Path) -> bool:
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (ImportError, OSError) as error:
        if isinstance(error, OSError) and error.errno in TAKEN:
            raise ValueError(
                f"{directory} is in use by another run, {_holder(file)}. Wait until it has ended, "
                "stop it, or choose another directory."
            ) from None
        logger.warning(
            "%s cannot be locked here (%s). See to it that no other run uses it.", directory, error
        )
        return False
    return True


def _sign(file: BinaryIO) -> None:
    with contextlib.suppress(OSError):  # on a full disk the lock holds all the same
        file.truncate(0)
        started = time.strftime("%Y-%m-%d %H:%M:%S")
        text = json.dumps({"host": socket.gethostname(), "process": os.getpid(), "since": started})
        file.write(text.encode() + b"\n")


def _holder(file: BinaryIO) -> str:
    try:
        file.seek(0)
        found = json.loads(file.read(4096))
        return f"process {found['process']} on {found['host']}, since {found['since']}"
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return "which has not said of itself where it runs"
