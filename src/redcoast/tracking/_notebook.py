"""A progress bar in a notebook, as a display that is updated. It needs no widgets."""

import html
import sys
from collections.abc import Callable
from time import perf_counter
from typing import Protocol

_INTERVAL = 0.1  # seconds between two updates of an evaluation


class Handle(Protocol):
    """Shows an object and updates it, such as `IPython.display.DisplayHandle`."""

    def update(self, obj: object) -> None: ...


Show = Callable[[object], Handle]


def notebook_display() -> Show | None:
    """Returns a function that shows an object in the notebook of this process, or `None`.

    A notebook is an IPython shell with a kernel; in a terminal, IPython has none.
    """
    ipython = sys.modules.get("IPython")  # a notebook has imported it
    if ipython is None or not hasattr(ipython.get_ipython(), "kernel"):
        return None
    display = sys.modules["IPython.display"].display
    return lambda obj: display(obj, display_id=True)


class NotebookBar:
    """A bar with the methods of tqdm that `Progress` calls."""

    def __init__(self, show: Show, *, label: str, total: int | None, initial: int = 0):
        self.n, self._total, self._label = initial, total, label
        self._postfix = ""
        self.format_dict = {"ncols": None}  # a line of a notebook may have any length
        self._handle = show(self)

    def set_postfix_str(self, text: str, refresh: bool = True) -> None:
        self._postfix = text
        if refresh:
            self.refresh()

    def refresh(self) -> None:
        self._handle.update(self)

    def clear(self) -> None:
        """Other output of a cell is on separate lines."""

    def close(self) -> None:
        self.refresh()

    def _repr_mimebundle_(self, **_: object) -> dict[str, str]:
        text, bar = f"{self._label} {self.n:,}", ""
        if self._total is not None:
            text += f"/{self._total:,}"
        if self._postfix:
            text += f"  {self._postfix}"
        # HTML of the browser's own, without scripts.
        if self._total:
            bar = f'<progress value="{self.n}" max="{self._total}" style="width: 30%"></progress> '
        return {"text/plain": text, "text/html": f"<div>{bar}{html.escape(text)}</div>"}


class NotebookEvaluation:
    """The progress of an evaluation, which is shown after the bar of the run."""

    def __init__(self, bar: NotebookBar, batches: int):
        self._bar, self._batches, self._done = bar, batches, 0
        self._next = 0.0

    def update(self) -> None:
        self._done += 1
        now = perf_counter()
        if now >= self._next:
            self._next = now + _INTERVAL
            self._bar.set_postfix_str(f"evaluating {self._done:,}/{self._batches:,}")

    def clear(self) -> None:
        """Other output of a cell is on separate lines."""

    def close(self) -> None:
        """The next step of the run replaces the text."""
