"""A lock that allows one run at a time in a directory."""

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

from ..distributed._kv_store import is_main

logger = logging.getLogger("redcoast")

FILE = "run.lock"
# What file systems answer if another process has the lock; others mean that they have no locks.
TAKEN = (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES)


@contextlib.contextmanager
def lock_run(directory: Path | None) -> Iterator[None]:
    """Locks a run's directory, if it has one, so that no other run uses it.

    The operating system holds the lock (`flock`), and releases it when the process ends for any
    reason. The file only records which process holds it.

    Raises `ValueError` that names the host and the process of the run that holds the lock;
    `FileExistsError` or `NotADirectoryError` if the path is a file, or inside one.
    """
    if directory is None or not is_main():
        yield
        return
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise type(error)(
            f"The directory of the run, {directory}, is a file, or inside one. Choose a directory."
        ) from None
    # Opened without being emptied, since it may say which process has the lock.
    with (directory / FILE).open("ab+", buffering=0) as file:
        if _try_lock(file, directory):
            with contextlib.suppress(OSError):  # the lock also holds on a full disk
                file.truncate(0)
                started = time.strftime("%Y-%m-%d %H:%M:%S")
                holder = {"host": socket.gethostname(), "process": os.getpid(), "since": started}
                file.write(json.dumps(holder).encode() + b"\n")
        yield


def _try_lock(file: BinaryIO, directory: Path) -> bool:
    try:
        # Windows has no such module.
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (ImportError, OSError) as error:
        if isinstance(error, OSError) and error.errno in TAKEN:
            raise ValueError(
                f"{directory} is in use by another run, {_read_holder(file)}. Wait until that run "
                "has ended, stop it, or choose another directory."
            ) from None
        logger.warning(
            "%s cannot be locked here (%s). Make sure that no other run uses it.", directory, error
        )
        return False
    return True


def _read_holder(file: BinaryIO) -> str:
    try:
        file.seek(0)
        holder = json.loads(file.read(4096))
        return f"process {holder['process']} on {holder['host']}, since {holder['since']}"
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return "whose host and process are unknown"
