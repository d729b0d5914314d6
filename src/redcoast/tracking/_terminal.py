"""The width of a terminal, whether it has colours, and which steps are printed."""

import os
import shutil
import sys
from io import TextIOBase
from pathlib import Path
from typing import TextIO

from ..core._output import ForgivingStream

Stream = TextIO | TextIOBase | ForgivingStream
# Codes of ANSI's escape sequence for styles.
BOLD, DIM = "1", "2"


def is_terminal(file: Stream | None) -> bool:
    return file is not None and not file.closed and file.isatty()


def columns(file: Stream | None) -> int | None:
    """The number of characters in a line; `None` where lines may have any length."""
    if not is_terminal(file):
        return None
    return shutil.get_terminal_size().columns


def has_colours(file: Stream | None) -> bool:
    """Whether colours are wanted; see https://no-color.org."""
    return is_terminal(file) and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def styled(text: str, style: str) -> str:
    """Text in a style, if standard output is a terminal with colours."""
    if not text or not has_colours(sys.stdout):
        return text
    return f"\x1b[{style}m{text}\x1b[0m"


def show_directory(directory: Path) -> Path:
    """A directory as a user would type it."""
    try:
        return directory.absolute().relative_to(Path.cwd())
    except (ValueError, OSError):  # elsewhere, or the working directory is gone
        return directory


_LINES = 20  # at least, if a run has as many steps


def is_logged(step: int, steps: int | None, *, lines: int = _LINES) -> bool:
    """Whether a step is printed in a run of `steps` steps.

    The first step is printed, and every multiple of a round number (1, 2, 5, 10, 20, ...), so that
    there are between `lines` and 2.5 times as many lines. If the length is unknown, the steps are 1
    to 10, 20, 30, ..., 100, 200, ...
    """
    if step == 1:
        return True
    if steps is None:
        # One digit, and then zeros.
        return step % 10 ** (len(str(step)) - 1) == 0
    return step % _round_below(steps // lines) == 0


def _round_below(number: int) -> int:
    """The largest of 1, 2, 5, 10, 20, 50, ... that is at most `number`; at least 1."""
    power = 10 ** (len(str(max(number, 1))) - 1)
    return max(factor * power for factor in (1, 2, 5) if factor == 1 or factor * power <= number)
