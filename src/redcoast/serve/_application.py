"""The server: a pretrained language model over HTTP, with OpenAI's API for completions and chats.

One thread generates the answers to concurrent requests in batches. Other threads read bodies and
tokenise prompts, so that a request does not delay the answers to others.
"""

import asyncio
import contextlib
import functools as ft
import json
import threading
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from ._batching import Piece, Served, ServedJob, answer_queue
from ._guard import guard
from ._load_served import Server
from ._openai import Ask, check_model_name, read_request
from ._openai_fields import Body, Refused, error_body
from ._replies import Choice, Reply, model_body, usage_body

CONNECTIONS = 512  # at once; further clients get status 503
READERS = 2  # threads that read bodies and tokenise prompts


def run_application(
    served: Served,
    server: Server,
    *,
    host: str,
    port: int,
    key: str | None,
    wait: int | float,
    timeout: int | float,
) -> None:
    """Serves until the process is terminated."""
    app = make_app(served, server, wait=wait, key=key, host=host, timeout=timeout)
    uvicorn.run(
        app,
        host=host,
        port=port,
        log_level="info",
        http=timed(timeout),
        ws="none",
        limit_concurrency=CONNECTIONS,
    )


def make_app(
    served: Served,
    server: Server,
    *,
    wait: int | float,
    key: str | None = None,
    host: str | None = None,
    timeout: int | float = 30.0,
) -> Starlette:
    """Makes the ASGI application, whose thread generates while the application runs.

    - `wait`: seconds to wait for further requests before a batch starts.
    - `key`: the bearer token that clients must send.
    - `host`: the address that the server listens at, if requests for other hosts are rejected.
    - `timeout`: seconds within which the body of a request must arrive.
    """
    readers = ThreadPoolExecutor(READERS, thread_name_prefix="redcoast-read")

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        arguments = (served, server.queue, wait)
        thread = threading.Thread(target=answer_queue, args=arguments, daemon=True)
        thread.start()
        yield
        server.queue.close()
        readers.shutdown(wait=False, cancel_futures=True)
        # Until the last batch has ended; meanwhile, its answers are still sent.
        await asyncio.to_thread(thread.join)

    async def complete(request: Request, *, chat: bool) -> Response:
        if server.queue.full():
            return await too_many(request, server)
        body = await read_body(request, server.limits.most_bytes, timeout)
        options = server.limits, server.encode, server.render
        read = ft.partial(read_request, body, *options, chat=chat)
        # In another thread, since to tokenise a long prompt takes a while.
        ask = await asyncio.get_running_loop().run_in_executor(readers, read)
        return await answer(request, server, ask, chat=chat)

    entry = model_body(server.limits.name, server.created)

    async def models(request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [entry]})

    async def model(request: Request) -> Response:
        check_model_name(request.path_params["name"], server.limits.name)
        return JSONResponse(entry)

    async def health(request: Request) -> Response:
        return Response()

    return Starlette(
        routes=[
            Route("/v1/chat/completions", ft.partial(complete, chat=True), methods=["POST"]),
            Route("/v1/completions", ft.partial(complete, chat=False), methods=["POST"]),
            Route("/v1/models", models),
            Route("/v1/models/{name:path}", model),
            Route("/health", health),
        ],
        exception_handlers={
            HTTPException: show_http_error,
            Refused: show_error,
            Exception: show_error,
        },
        lifespan=lifespan,
        middleware=[Middleware(guard, key=key, host=host)],
    )


async def answer(request: Request, server: Server, ask: Ask, *, chat: bool) -> Response:
    pieces: asyncio.Queue[Piece | Exception] = asyncio.Queue()
    loop = asyncio.get_running_loop()

    def send(piece: Piece | Exception) -> None:
        with contextlib.suppress(RuntimeError):  # the loop may have been closed
            # Called in the thread that generates, which must not touch the loop's queue itself.
            loop.call_soon_threadsafe(pieces.put_nowait, piece)

    settings = ask.new_tokens, ask.decoding, ask.seed, ask.stops
    job = ServedJob(ask.prompts, *settings, send, continues=not chat, extras=ask.extras)
    if not server.queue.put(job):
        return await too_many(request, server)
    scored = ask.extras.logprobs is not None
    reply = Reply.to(server.limits.name, server.speller, chat=chat, scored=scored)
    if ask.stream:
        return StreamingResponse(events(job, ask, reply, pieces), media_type="text/event-stream")
    collecting = asyncio.create_task(collect(job, ask, reply, pieces))
    leaving = asyncio.ensure_future(request.receive())  # only a disconnect can follow
    try:
        await asyncio.wait({collecting, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not collecting.done():
            return Response(status_code=499)  # the client is gone
        return JSONResponse(collecting.result())
    finally:
        # Rows that have not ended do so with their next token.
        job.cancelled.set()
        collecting.cancel()
        leaving.cancel()


async def too_many(request: Request, server: Server) -> Response:
    seconds = {"Retry-After": str(server.queue.retry_after())}
    error = Refused(429, "Too many requests are waiting. Try again later.", code="queue_full")
    return await show_error(request, error, seconds)


async def read_body(request: Request, most: int, seconds: int | float) -> bytes:
    """Reads the body of a request, which must arrive within some seconds."""
    too_large = Refused(413, f"The body has more than {most} bytes.")
    length = request.headers.get("content-length", "")
    # Before anything is read. Twenty digits are more than any size; thousands take long to convert.
    if length.isascii() and length.isdigit() and int(length[:20]) > most:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(seconds):
            async for part in request.stream():
                body += part
                if len(body) > most:
                    raise too_large
    except TimeoutError as error:
        raise Refused(408, f"The body did not arrive within {seconds:g} seconds.") from error
    return bytes(body)


async def received(
    job: ServedJob, pieces: asyncio.Queue[Piece | Exception]
) -> AsyncIterator[Piece]:
    """Yields the pieces of a job until all of its rows have ended."""
    left = len(job.prompts)
    while left:
        piece = await pieces.get()
        if isinstance(piece, Exception):
            raise piece
        left -= piece.finish is not None
        yield piece


async def collect(
    job: ServedJob, ask: Ask, reply: Reply, pieces: asyncio.Queue[Piece | Exception]
) -> Body:
    """Returns the body of a response that is not streamed."""
    choices = [Choice() for _ in job.prompts]
    async for piece in received(job, pieces):
        choices[piece.row].add(piece)
    count = sum(choice.count for choice in choices)
    return reply.whole(choices, usage_body(ask.prompt_tokens, count))


def _event(body: Body) -> str:
    return f"data: {json.dumps(body, ensure_ascii=False)}\n\n"


async def events(
    job: ServedJob, ask: Ask, reply: Reply, pieces: asyncio.Queue[Piece | Exception]
) -> AsyncIterator[str]:
    """Yields the parts of a streamed response, as server-sent events."""
    choices = [Choice() for _ in job.prompts]
    begun: set[int] = set()
    try:
        async for piece in received(job, pieces):
            first, choice = piece.row not in begun, choices[piece.row]
            begun.add(piece.row)
            yield _event(reply.chunk(piece, choice, first=first))
            choice.add(piece)
        if ask.usage:
            count = sum(choice.count for choice in choices)
            yield _event(reply.last(usage_body(ask.prompt_tokens, count)))
        yield "data: [DONE]\n\n"
    except Exception as error:  # the status has already been sent
        yield _event(error_body(error)[1])
    finally:
        job.cancelled.set()


async def show_http_error(request: Request, error: Exception) -> Response:
    """Shows errors of the routes in the form of the API."""
    assert isinstance(error, HTTPException)
    text = f"{error.detail}: {request.method} {request.url.path}"
    return await show_error(request, Refused(error.status_code, text), error.headers)


async def show_error(
    request: Request, error: Exception, headers: Mapping[str, str] | None = None
) -> Response:
    status, body = error_body(error)
    if status in (408, 413):  # the rest of the body is not read
        headers = {**(headers or {}), "Connection": "close"}
    return JSONResponse(body, status, headers)


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
    return type("TimedConnection", (TimedConnection,), {"seconds": seconds})
