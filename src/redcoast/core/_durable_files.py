"""Writes files through to the disk, so that they survive a power loss.

A file that was written is in the memory of the operating system for up to half a minute. `fsync`
waits until it is on the disk. The name of a file is in its directory, which has to be synced too.
"""

import errno
import logging
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

logger = logging.getLogger("redcoast")

# The disk can write several files at once.
THREADS = 8
# The answers of file systems without `fsync`, such as some that represent an object store.
UNSUPPORTED = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP)
# The file systems, by their device numbers, that a warning was given for.
_warned: set[int] = set()


def sync_tree(directory: Path) -> None:
    """Syncs all files below a directory, and then the directories.

    Files that another process renames or removes meanwhile are skipped: that process syncs them.

    Raises `OSError` if the disk could not store a file.
    """
    files: list[Path] = []
    directories: list[Path] = []
    for root, _, names in os.walk(directory):
        directories.append(Path(root))
        files += [Path(root) / name for name in names]
    with ThreadPoolExecutor(THREADS, thread_name_prefix="redcoast-sync") as pool:
        list(pool.map(_sync_if_there, files))  # raises the error of a thread
    # The innermost first: a directory is not on the disk before what it contains.
    for path in reversed(directories):
        _sync_if_there(path)


def sync_name(path: Path) -> None:
    """Syncs the name that a directory was given, the files in it, and the directories above it."""
    sync_files_in(path)
    sync(path.parent)
    for parent in path.parent.parents:  # they may be new too
        try:
            sync(parent)
        except PermissionError:  # it belongs to another user, so it is not new
            return


def sync_files_in(directory: Path) -> None:
    """Syncs the files of a directory, without those in its subdirectories, and the directory."""
    for path in sorted(directory.iterdir()):
        if not path.is_dir():
            _sync_if_there(path)
    sync(directory)


def _sync_if_there(path: Path) -> None:
    try:
        # Opening a pipe would wait for its other end, and links lead elsewhere.
        if (path.is_file() or path.is_dir()) and not path.is_symlink():
            sync(path)
    except FileNotFoundError:
        return


def sync(path: Path) -> None:
    """Waits until a file or the names in a directory are on the disk.

    On file systems that cannot do so, it logs one warning.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
        _warn(os.fstat(descriptor).st_dev, path, error)
    finally:
        os.close(descriptor)


def _warn(device: int, path: Path, reason: OSError) -> None:
    if device in _warned:
        return
    _warned.add(device)
    logger.warning(
        "%s cannot be synced (%s): its file system decides when files are stored, and the newest "
        "may be lost with the machine.",
        *(path, reason),
    )
