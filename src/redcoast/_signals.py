import contextlib
import signal
import threading
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def stop_signals() -> Iterator[Callable[[], bool]]:
    """Turns the first SIGTERM or SIGINT into a flag; a second one stops at once.

    Gives a function that says whether a signal has come. Outside the main thread, where Python
    handles no signals, it never does.
    """
    came = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield came.is_set
        return
    signals = (signal.SIGTERM, signal.SIGINT)
    before = {number: signal.getsignal(number) for number in signals}

    def note(number: int, frame: object) -> None:
        came.set()
        restore()

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    for number in signals:
        signal.signal(number, note)
    try:
        yield came.is_set
    finally:
        restore()
