"""One run at a time in a directory.

A lock of the operating system keeps out the runs that it knows of, and ends with the process. On
some file systems that machines share, each machine knows of its own runs only. So a run also makes
a file, which only one can make, and writes to it now and then for as long as it lives.
"""

import contextlib
import errno
import json
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from ..distributed._kv_store import is_main

logger = logging.getLogger("redcoast")

FILE = "run.lock"
HOLDER = "run.holder"
BEAT = 5.0  # seconds between two signs of life
DEAD = 20.0  # seconds without one
TAKEN = (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES)
# The runs of this process.
_own: set[str] = set()


@contextlib.contextmanager
def lock_run(directory: Path | None) -> Iterator[None]:
    """Keeps other runs out of a directory, if there is one: those of this machine, and those of
    others that see the directory too.

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
        with _held(directory):
            yield


def _take(file: BinaryIO, directory: Path) -> bool:
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (ImportError, OSError) as error:
        if isinstance(error, OSError) and error.errno in TAKEN:
            file.seek(0)
            raise _in_use(directory, file.read(4096)) from None
        logger.warning(
            "%s cannot be locked here (%s). See to it that no other run uses it.", directory, error
        )
        return False
    return True


def _sign(file: BinaryIO) -> None:
    with contextlib.suppress(OSError):  # on a full disk the lock holds all the same
        file.truncate(0)
        file.write(json.dumps(_me()).encode() + b"\n")


def _me() -> dict[str, Any]:
    started = time.strftime("%Y-%m-%d %H:%M:%S")
    return {"host": socket.gethostname(), "process": os.getpid(), "since": started}


def _in_use(directory: Path, text: bytes) -> ValueError:
    found = _parsed(text)
    known = {"process", "host", "since"} <= found.keys()
    holder = (
        f"process {found['process']} on {found['host']}, since {found['since']}"
        if known
        else "which has not said of itself where it runs"
    )
    return ValueError(
        f"{directory} is in use by another run, {holder}. Wait until it has ended, stop it, or "
        "choose another directory."
    )


def _parsed(text: bytes) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


@contextlib.contextmanager
def _held(directory: Path) -> Iterator[None]:
    """Keeps out the runs of machines that know nothing of this one's locks."""
    path, token = directory / HOLDER, secrets.token_hex(8)
    me = _me() | {"token": token, "kernel": _kernel(), "beat": 0}
    try:
        _claim(path, me)
    except OSError as error:  # a full disk, which is no reason to end a run
        logger.warning("%s could not be written: %s", path, error)
        yield
        return
    ended = threading.Event()
    beating = threading.Thread(target=_beat, args=(path, me, ended), daemon=True)
    _own.add(token)
    try:
        beating.start()
        yield
    finally:
        ended.set()
        beating.join()
        _own.discard(token)
        with contextlib.suppress(OSError):
            if _parsed(path.read_bytes()).get("token") == token:
                path.unlink()


def _kernel() -> str:
    """What is the same for processes that can see whether each other live."""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    return socket.gethostname()


def _make(path: Path, text: bytes) -> None:
    with path.open("xb", buffering=0) as file:
        try:
            file.write(text)
        except OSError:
            path.unlink()
            raise


def _claim(path: Path, me: dict[str, Any]) -> None:
    """Makes the file, which fails if there is one; one of a run that has died is removed first."""
    while True:
        with contextlib.suppress(FileExistsError):
            _make(path, json.dumps(me).encode())
            return
        text = _read(path)
        if text is not None and _lives(path, text):
            raise _in_use(path.parent, text)
        aside = path.with_name(f"{HOLDER}.{me['token']}")
        with contextlib.suppress(FileNotFoundError):
            path.rename(aside)
            # Another run may have done the same, and made it anew, a moment before.
            if _parsed(aside.read_bytes()).get("token") != _parsed(text or b"").get("token"):
                aside.rename(path)
                raise _in_use(path.parent, path.read_bytes())
            aside.unlink()


def _read(path: Path) -> bytes | None:
    with contextlib.suppress(FileNotFoundError):
        return path.read_bytes()
    return None


def _lives(path: Path, text: bytes) -> bool:
    """Whether the run that wrote this is at work: on another machine, if it writes again."""
    found = _parsed(text)
    number = found.get("process")
    if found.get("kernel") == _kernel() and isinstance(number, int) and number > 0:
        if number == os.getpid():
            return found.get("token") in _own
        if _is_gone(number):
            return False
    logger.warning(
        "%s was in use by process %s on %s, which has not said that it has ended: waiting %g s "
        "for a sign of life.",
        *(path.parent, number, found.get("host"), DEAD),
    )
    end = time.monotonic() + DEAD
    while time.monotonic() < end:
        time.sleep(min(0.5, DEAD / 10))
        now = _read(path)
        if now != text:
            return now is not None
    return False


def _is_gone(process: int) -> bool:
    """Whether there is no such process here; elsewhere than on POSIX, nobody knows."""
    if os.name == "posix":
        try:
            os.kill(process, 0)
        except (ProcessLookupError, OverflowError):
            return True
        except OSError:
            return False
    return False


def _beat(path: Path, me: dict[str, Any], ended: threading.Event) -> None:
    beat = 0
    while not ended.wait(BEAT):
        beat += 1
        with contextlib.suppress(OSError), path.open("r+b", buffering=0) as file:
            if _parsed(file.read(4096)).get("token") not in (None, me["token"]):
                logger.warning(
                    "Another run has begun in %s, since this one gave no sign of life for %g s. "
                    "Stop one of them.",
                    *(path.parent, DEAD),
                )
                return
            file.seek(0)
            file.write(json.dumps(me | {"beat": beat}).encode())
            file.truncate()
