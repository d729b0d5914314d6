"""Shows the phase of a command on standard error, as one updated line on a terminal and as a line
for each phase elsewhere."""

import contextlib
import sys
import threading
from collections.abc import Iterator
from time import monotonic

from redcoast.core._output import forgiving
from redcoast.dryrun._phases import listen_to_phases
from redcoast.tracking._terminal import Stream, columns

_REDRAWN = 0.5  # seconds between updates of the line on a terminal
_REPEATED = 60.0  # seconds after which the line is repeated in a log


class PhaseDisplay:
    """The current phase, with the time since the start of the command."""

    def __init__(self, file: Stream):
        self._file, self._columns = file, columns(file)
        self._begin = self._written = monotonic()
        self._name = self._detail = ""
        self._lock = threading.Lock()

    @property
    def interval(self) -> float:
        if self._columns is None:
            return _REPEATED
        return _REDRAWN

    def enter(self, name: str, detail: str) -> None:
        """Shows the beginning of a phase."""
        with self._lock:
            same, self._name, self._detail = name == self._name, name, detail
            # A log gets one line for all meshes that are planned.
            if self._columns is not None or not same:
                self._write()

    def tick(self) -> None:
        """Shows the duration of the phase."""
        with self._lock:
            if self._name and monotonic() - self._written >= self.interval:
                self._write()

    def clear(self) -> None:
        """Removes the line from a terminal."""
        with self._lock:
            if self._columns is not None and self._name:
                self._file.write("\r\x1b[K")
                self._file.flush()
            self._name = self._detail = ""

    def _write(self) -> None:
        self._written = monotonic()
        minutes, seconds = divmod(int(self._written - self._begin), 60)
        line = f"{minutes}:{seconds:02}  {self._name} {self._detail}".rstrip()
        if self._columns is None:
            self._file.write(f"{line}\n")
        else:
            self._file.write(f"\r\x1b[K{line[: self._columns - 1]}")
        self._file.flush()


@contextlib.contextmanager
def show_phases() -> Iterator[None]:
    """Shows the phases of the dry runs in this context."""
    file = forgiving(sys.stderr)
    if file is None:
        yield
        return
    display, finished = PhaseDisplay(file), threading.Event()

    def tick() -> None:
        while not finished.wait(_REDRAWN):
            display.tick()

    ticker = threading.Thread(target=tick, name="redcoast-phases", daemon=True)
    ticker.start()
    try:
        with listen_to_phases(display.enter):
            yield
    finally:
        finished.set()
        ticker.join()
        display.clear()
