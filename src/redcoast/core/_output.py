"""Prints the output of a run. A full disk, a closed pipe or a closed terminal does not end the
run."""

import contextlib
import errno
import logging
import os
import sys
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

logger = logging.getLogger("redcoast")

_NAMES = {"<stdout>": "Standard output", "<stderr>": "Standard error"}
# The streams that a warning was given for.
_failed: weakref.WeakSet[object] = weakref.WeakSet()


class ForgivingStream:
    """A text stream that drops what cannot be written, after one warning.

    It has the attributes of the stream that it wraps.
    """

    def __init__(self, stream: Any):
        self._wrapped = stream  # tqdm compares streams by this name

    def write(self, text: str) -> int:
        try:
            return self._wrapped.write(text)
        except UnicodeEncodeError as error:
            # The terminal has no such letter: it is shown by its number.
            plain = text.encode(error.encoding, "backslashreplace").decode(error.encoding)
            return self.write(plain)
        except (OSError, ValueError) as error:  # a closed file raises `ValueError`
            self._drop(error)
            return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        try:
            self._wrapped.flush()
        except (OSError, ValueError) as error:
            self._drop(error)

    @property
    def mode(self) -> str:
        return getattr(self._wrapped, "mode", "w")  # streams in memory have none

    def __getattr__(self, name: str) -> Any:
        return getattr(self._wrapped, name)

    def __eq__(self, other: object) -> bool:
        return self._wrapped is getattr(other, "_wrapped", other)

    def __hash__(self) -> int:
        return hash(self._wrapped)

    def _drop(self, error: Exception) -> None:
        with contextlib.suppress(OSError, ValueError):
            _discard_buffer(self._wrapped, error)
        # One warning for each stream, since every later line would fail too; none for a stream that
        # a logger keeps after the run, when it may have been closed.
        if self._wrapped in _failed or self not in (sys.stdout, sys.stderr):
            return
        _failed.add(self._wrapped)
        name = getattr(self._wrapped, "name", type(self._wrapped).__name__)
        logger.warning(
            "%s cannot be written to (%s): lines may be missing from here on. The run continues.",
            *(_NAMES.get(name, name), error),
        )


def _discard_buffer(stream: Any, error: Exception) -> None:
    """Empties the buffer of a stream that cannot be written to.

    Python would try to write it again at exit, and the process would end with exit code 120.
    """
    number = stream.fileno()
    nothing = os.open(os.devnull, os.O_WRONLY)
    try:
        if isinstance(error, OSError) and error.errno == errno.EBADF:
            # The descriptor was closed, and the next file that is opened would get the same number.
            os.dup2(nothing, number)
            return
        # The buffer is flushed into nothing, and then the descriptor is what it was.
        before = os.dup(number)
        try:
            os.dup2(nothing, number)
            stream.flush()
        finally:
            os.dup2(before, number)
            os.close(before)
    finally:
        # The stream's descriptor was free, and is now this one.
        if nothing != number:
            os.close(nothing)


def forgiving(stream: Any) -> Any:
    """A stream whose writes do not fail; `None`, which prints nothing, is returned unchanged."""
    if stream is None or isinstance(stream, ForgivingStream):
        return stream
    return ForgivingStream(stream)


@contextlib.contextmanager
def forgiving_output() -> Iterator[None]:
    """Makes standard output and standard error forgiving, also for the user's functions."""
    output, errors = forgiving(sys.stdout), forgiving(sys.stderr)
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = output, errors
    try:
        yield
    finally:
        for stream in (output, errors):
            if stream is not None:
                stream.flush()
        # Something else may have replaced them meanwhile.
        if sys.stdout is output:
            sys.stdout = before[0]
        if sys.stderr is errors:
            sys.stderr = before[1]


def say(line: str) -> None:
    """Prints a line to standard output without breaking a progress bar."""
    stream = forgiving(sys.stdout)
    if stream is None:
        return
    # If tqdm has not been imported, there is no bar.
    tqdm = getattr(sys.modules.get("tqdm"), "tqdm", None)
    if tqdm is None:
        stream.write(f"{line}\n")
    else:
        with contextlib.suppress(OSError, ValueError):  # of a bar in a file that is not forgiving
            tqdm.write(line, file=stream)
    stream.flush()
