"""Reduces a failed save to one warning.

On a full disk, each failed task and thread of Orbax and TensorStore prints a traceback, hundreds of
lines that hide the warning of redcoast.
"""

import asyncio
import contextlib
import logging
import sys
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

# `asyncio` reports failed tasks of Orbax whose results are never read.
LOGGERS = ("absl", "asyncio")


@contextlib.contextmanager
def quiet_orbax() -> Iterator[None]:
    """Suppresses the errors that Orbax and TensorStore print. The save raises the first of them."""
    import orbax.checkpoint as ocp

    files = str(Path(ocp.__file__).parent)

    def is_other(record: logging.LogRecord) -> bool:
        # Messages without an error are not about a failed save.
        if not record.exc_info:
            return True
        # An error that was logged by files of Orbax, or raised in them.
        frames = traceback.extract_tb(record.exc_info[2])
        names = [record.pathname, *(frame.filename for frame in frames)]
        return not any(name.startswith(files) for name in names)

    before = sys.unraisablehook

    def hook(error: "sys.UnraisableHookArgs") -> None:
        if not _is_late_result(error.exc_value, error.exc_traceback):
            before(error)

    loggers = [logging.getLogger(name) for name in LOGGERS]
    for logger in loggers:
        logger.addFilter(is_other)
    sys.unraisablehook = hook
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(is_other)
        if sys.unraisablehook is hook:  # something else may have replaced it meanwhile
            sys.unraisablehook = before


def _is_late_result(error: BaseException | None, trace: TracebackType | None) -> bool:
    """Whether a thread of TensorStore had a result for an event loop that is closed after an
    error."""
    if threading.current_thread() is threading.main_thread() or trace is None:
        return False
    *_, (frame, _) = traceback.walk_tb(trace)
    check_closed = asyncio.BaseEventLoop._check_closed  # pyright: ignore[reportAttributeAccessIssue]
    return isinstance(error, RuntimeError) and frame.f_code is check_closed.__code__
