"""Closes connections whose client sends nothing, or does not read, for too long."""

import asyncio
from typing import Any, ClassVar

from uvicorn.protocols.http.h11_impl import H11Protocol


class TimedConnection(H11Protocol):
    """HTTP/1.1 with time limits of `seconds`: for a request's headers, from the opening of the
    connection or the start of the next request, and for a client that stops reading.

    The time for the body of a request is limited where it is read.
    """

    seconds: ClassVar[float] = 30.0
    waiting: asyncio.TimerHandle | None = None
    writing: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._wait()

    def data_received(self, data: bytes) -> None:
        # The first bytes of the next request on this connection.
        if self.waiting is None and not self._answering():
            self._wait()
        super().data_received(data)
        if self.waiting is not None and self._answering():
            self._stop_waiting()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        # Ends its timer, too.
        self.resume_writing()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self.writing = self.loop.call_later(self.seconds, self.transport.abort)

    def resume_writing(self) -> None:
        if self.writing is not None:
            self.writing.cancel()
            self.writing = None
        super().resume_writing()

    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _wait(self) -> None:
        self.waiting = self.loop.call_later(self.seconds, self._close)

    def _stop_waiting(self) -> None:
        if self.waiting is not None:
            self.waiting.cancel()
            self.waiting = None

    def _close(self) -> None:
        self.waiting = None
        if not self._answering() and not self.transport.is_closing():
            self.transport.close()


def timed(seconds: float) -> type[TimedConnection]:
    """Returns the protocol with a time limit."""
    return type("TimedConnection", (TimedConnection,), {"seconds": seconds})
