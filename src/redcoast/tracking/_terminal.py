"""The width of a terminal, and whether it has colours."""

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
