"""Creates the directory of a run, and checks that all processes see the same one."""

import contextlib
import secrets
import socket
import time
from pathlib import Path

import jax

from ..distributed._agreement import agree
from ..distributed._kv_store import decide, exchange, is_main
from ..distributed._rendezvous import name_processes

_PATIENCE = 15.0  # seconds until a network file system shows a new file to other machines


def make_directory(directory: Path) -> None:
    """Creates a directory of a run, unless it exists."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise type(error)(
            f"The directory of the run, {directory}, is a file, a link to nothing, or inside one. "
            "Choose a directory."
        ) from None
    except OSError as error:
        raise type(error)(
            f"The directory of the run, {directory}, cannot be created: {error}. Choose one that "
            "can be written to."
        ) from None


def check_shared(directory: Path | None) -> None:
    """Checks that processes see the files that process 0 writes to a directory.

    Process 0 creates the directory, and temporarily a file with a random name.

    Raises `ValueError` in all processes if one does not see them, or if their directories differ.
    It names the processes that do not see the file.
    """
    if jax.process_count() == 1:
        return
    name_of_directory = None
    if directory is not None:
        name_of_directory = str(directory)
    agree({"the directory of the run": name_of_directory})
    if directory is None:
        return
    # A new name each time, since a file of an earlier run would prove nothing.
    own = directory / f".shared-{secrets.token_hex(8)}"
    try:
        name = None
        if is_main():
            name = _create(own)
        name = decide("a file that all processes see", name)
        # Without a file, process 0 raises an error that says why it could not be written.
        is_seen = name is None or is_main() or _wait_for(directory / name)
        seen = exchange("whether a directory is shared", [is_seen, socket.gethostname()])
    finally:
        if is_main():
            with contextlib.suppress(OSError):
                own.unlink(missing_ok=True)
    blind = [process for process, (is_seen, _) in enumerate(seen) if not is_seen]
    if blind:
        hosts = sorted({host for is_seen, host in seen if not is_seen})
        raise ValueError(
            f"{directory} is not shared by all processes: process 0 on {seen[0][1]} wrote a file "
            f"there, which {name_processes(blind)} on {', '.join(hosts[:4])} did not see within "
            f"{_PATIENCE:g} s. All processes write their parts of a checkpoint to one directory. "
            "Choose one on a file system that is mounted at the same path on all machines."
        )


def _create(file: Path) -> str | None:
    """Creates an empty file, and returns its name; `None` if it could not be written."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch(exist_ok=False)
    except OSError:
        return None
    return file.name


def _wait_for(file: Path) -> bool:
    """Waits until a file exists; returns whether it does."""
    end = time.monotonic() + _PATIENCE
    while time.monotonic() < end:
        with contextlib.suppress(OSError), file.open("rb"):
            return True
        # Listing a directory makes network file systems ask the server again.
        with contextlib.suppress(OSError):
            list(file.parent.iterdir())
        time.sleep(0.2)
    return False
