"""The phases of a dry run, for a progress display, because large models take minutes."""

import contextlib
import contextvars
from collections.abc import Callable, Iterator

Listener = Callable[[str, str], None]
# Each thread has its own, so that several dry runs can run at the same time.
_listener: contextvars.ContextVar[Listener | None] = contextvars.ContextVar("phases", default=None)


def enter_phase(name: str, detail: str) -> None:
    """Informs the listener, if there is one, of a phase such as `"Compiling"`."""
    listener = _listener.get()
    if listener is not None:
        listener(name, detail)


@contextlib.contextmanager
def listen_to_phases(listener: Listener) -> Iterator[None]:
    """Calls `listener(name, detail)` at the beginning of each phase."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)
