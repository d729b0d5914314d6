"""Calls a service that stores metrics from a thread, so that it neither stops nor delays a run."""

import atexit
import logging
import threading
from collections.abc import Callable
from queue import SimpleQueue

logger = logging.getLogger("redcoast")

Call = Callable[[], object]
# Of loggers that have no arguments for them.
CLOSE_TIMEOUT = 30.0  # seconds
QUEUE_SIZE = 10_000


class ServiceThread:
    """Calls functions of a service in their order, in a thread of their own.

    If one of them raises, or does not end in time, a warning is logged, and no more are called.

    - `service`: the name of the service, for messages.
    - `finish`: called last, when the thread is closed.
    - `give_up`: called after the warning, in any thread.
    - `hint`: a sentence for the warning, after a space.
    """

    def __init__(
        self,
        service: str,
        finish: Call,
        *,
        close_timeout: int | float = CLOSE_TIMEOUT,
        queue_size: int = QUEUE_SIZE,
        give_up: Call = lambda: None,
    ):
        self.hint = ""
        self.has_given_up = False
        self._service, self._finish, self._after_giving_up = service, finish, give_up
        self._close_timeout, self._queue_size = close_timeout, queue_size
        self._thread: threading.Thread | None = None
        self._queue = SimpleQueue[Call]()
        self._dropped = 0

    @property
    def is_open(self) -> bool:
        return self._thread is not None

    def open(self, first: Call) -> None:
        """Starts the thread, whose first call is `first`."""
        if self.has_given_up:
            return
        self._queue, self._dropped, self.hint = SimpleQueue(), 0, ""
        self._queue.put(first)
        # A daemon thread, so that the process can exit if the service hangs.
        self._thread = threading.Thread(
            target=self._work, args=(self._queue,), name=f"redcoast-{self._service}", daemon=True
        )
        self._thread.start()
        atexit.register(self.close)

    def put(self, call: Call) -> None:
        """Hands a call over without waiting. A full queue drops it."""
        if self._queue.qsize() < self._queue_size:
            self.put_always(call)
        else:
            self._dropped += 1

    def put_always(self, call: Call) -> None:
        """Hands a call over that a full queue does not drop."""
        if not self.has_given_up:
            self._queue.put(call)

    def close(self) -> None:
        """Waits until everything is done, at most `close_timeout` seconds."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        atexit.unregister(self.close)
        self._queue.put(self._finish)
        self._queue.put(_end)
        try:
            thread.join(self._close_timeout)
        finally:
            if thread.is_alive():
                seconds = f"{self._close_timeout:g} seconds"
                self._give_up(f"{self._service} did not finish within {seconds}")
        if self._dropped:
            logger.warning(
                "%s was too slow: %d of the calls to its logger were dropped.",
                *(self._service, self._dropped),
            )

    def close_first_at_exit(self) -> None:
        """Closes the thread before the exit hooks that have been registered since it was opened."""
        # They run in reverse order.
        atexit.unregister(self.close)
        atexit.register(self.close)

    def _work(self, queue: SimpleQueue[Call]) -> None:
        try:
            while (call := queue.get()) is not _end:
                call()
        except BaseException as error:
            if not self.has_given_up:
                self._give_up(f"{self._service} failed ({type(error).__name__}: {error})")

    def _give_up(self, reason: str) -> None:
        # Set first: the thread may still be at work, and must not report an error of its own.
        self.has_given_up = True
        logger.warning("%s. Metrics are no longer sent to it.%s", reason, self.hint)
        self._after_giving_up()


def _end() -> None:
    """The last call of a thread."""
