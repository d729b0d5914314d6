"""What requests ask for, read without a model: chats, tools, limits; and who may ask."""

import asyncio
import json
import socket
import threading
import time
from dataclasses import replace

import httpx
import pytest
import uvicorn
from serve_helpers import byte_level

from redcoast import Decoding
from redcoast.serve._application import make_app, read_body, timed
from redcoast.serve._batching import Piece, Queue, Scored, Served
from redcoast.serve._load_served import Server
from redcoast.serve._openai import read_request
from redcoast.serve._openai_fields import Limits, Refused
from redcoast.serve._replies import Choice, Reply, Speller

LIMITS = Limits("tiny", 256, 64, 4, 16, Decoding(temperature=1.0), characters=1000, eos=(3, 4))


def encode(text, *, special):
    return list(text.encode())


def render(messages, **options):
    return json.dumps([messages, options])


def read(body, *, chat, limits=LIMITS, encode=encode):
    body = {"model": "tiny"} | body
    return read_request(json.dumps(body).encode(), limits, encode, render, chat=chat)


def rendered(**body):
    """What the template gets."""
    seen = []

    def keep(text, *, special):
        assert not special
        seen.append(json.loads(text))
        return [1]

    read(body, chat=True, encode=keep)
    return seen[0]


def test_calls_of_tools_and_their_results_come_to_the_template():
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    chat = [
        {"role": "user", "content": [{"type": "text", "text": "Add"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "name": "f", "content": "2"},
    ]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    messages, options = rendered(
        messages=chat, tools=tools, chat_template_kwargs={"enable_thinking": False}
    )
    assert options == {"add_generation_prompt": True, "enable_thinking": False, "tools": tools}
    assert messages[0] == {"role": "user", "content": "Add"}
    # Templates write arguments as JSON themselves.
    function = {"name": "f", "arguments": {"x": 1}}
    calls = [{"id": "1", "type": "function", "function": function}]
    assert messages[1] == {"role": "assistant", "content": "", "tool_calls": calls}
    assert messages[2] == {"role": "tool", "tool_call_id": "1", "name": "f", "content": "2"}
    _, options = rendered(messages=chat, tools=tools, tool_choice="none")
    assert "tools" not in options


def test_ends_lengths_and_penalties():
    prompt = {"prompt": "a", "max_tokens": 9, "temperature": 0}
    ask = read({**prompt, "stop_token_ids": [7, 3], "min_tokens": 5}, chat=False)
    assert (ask.decoding.eos, ask.decoding.min_new_tokens) == ((3, 4, 7), 5)
    assert read({**prompt, "ignore_eos": True}, chat=False).decoding.eos == ()
    ask = read(
        {**prompt, "presence_penalty": -1, "logit_bias": {"5": 2}, "logprobs": 0}, chat=False
    )
    assert (ask.extras.presence, ask.extras.bias, ask.extras.logprobs) == (-1, {5: 2.0}, 0)
    assert read({**prompt, "logprobs": False}, chat=False).extras.logprobs is None
    ask = read({"prompt": ["ab", "c"], "echo": True, "max_tokens": 0, "n": 2}, chat=False)
    assert (ask.new_tokens, ask.extras.echo) == (0, ("ab", "ab", "c", "c"))
    say = [{"role": "user", "content": "a"}]
    limits = replace(LIMITS, context=2000)
    options = {"messages": say, "logprobs": True, "top_logprobs": 4}
    assert read(options, chat=True, limits=limits).extras.logprobs == 4


@pytest.mark.parametrize(
    ("body", "chat"),
    [
        ({"prompt": "a" * 1001}, False),
        ({"prompt": ["ab"] * 5}, False),
        ({"prompt": ["ab", "a" * 1001]}, False),
        ({"prompt": "ab", "n": 9}, False),
        ({"prompt": "ab", "stop": ["x" * 1001]}, False),
        ({"prompt": "ab", "logit_bias": dict.fromkeys(map(str, range(301)), 1)}, False),
        ({"prompt": "ab", "stop_token_ids": list(range(65))}, False),
        ({"messages": [{"role": "user", "content": "a" * 501}] * 2}, True),
        ({"messages": [{"role": "user", "content": ""}] * 65}, True),
        ({"prompt": "ab", "user": "x" * LIMITS.most_bytes}, False),
    ],
)
def test_what_is_too_large_is_refused_before_it_is_tokenised(body, chat):
    """A prompt of 8 MiB took nine seconds of the processor, and was then refused."""

    def refuse(text, *, special):
        raise AssertionError("It was tokenised.")

    with pytest.raises(Refused):
        read(body, chat=chat, encode=refuse)


def test_tokens_that_the_model_does_not_have_are_refused_in_chats_too():
    """A tokenizer may have more tokens than the model. They would be an error of the batch."""
    say = [{"role": "user", "content": "a"}]
    with pytest.raises(Refused, match="has the token 256, but the tokens of this model are 0 to"):
        read({"messages": say}, chat=True, encode=lambda text, special: [5, 256])


def test_token_texts_of_log_probabilities():
    """Parts of characters have the names of the tokenizer, so that no two have the same text."""
    speller = Speller(byte_level())
    scored = [Scored(97, None, ()), Scored(98, -1.0, ((98, -1.0), (200, -2.0), (201, -3.0)))]
    reply = Reply.to("tiny", speller, chat=False, scored=True)
    choice, streamed = Choice(), Choice()
    choice.add(Piece(0, "xy", "stop", 1, tuple(scored)))
    body = reply.whole([choice], {})["choices"][0]["logprobs"]
    assert len(body["top_logprobs"][1]) == 3
    assert body["token_logprobs"] == [None, -1.0]
    assert body["text_offset"] == [0, len(body["tokens"][0])]
    piece = Piece(0, "z", None, 2, tuple(scored))
    _, chunk = (reply.chunk(piece, streamed, first=False)["choices"][0] for _ in range(2))
    assert chunk["logprobs"]["text_offset"][0] == sum(map(len, body["tokens"]))


def test_the_bytes_of_tokens_are_those_of_the_text():
    tokenizer = byte_level()
    tokens = tokenizer.encode("naïve 🎈\n").ids
    speller = Speller(tokenizer)
    joined = bytes(byte for token in tokens for byte in speller.encoded(token) or [])
    assert joined.decode() == "naïve 🎈\n"
    assert len({*map(speller.text, range(256))}) == 256


class NoQueue(Queue):
    """A queue that nobody empties."""

    def take(self, wait):
        self.changed.acquire()
        self.changed.wait_for(lambda: self.closed)
        self.changed.release()
        return []


def application(tokenizer=None, **options):
    tokenizer = tokenizer or byte_level()
    queue = NoQueue(4, 4, 64)
    server = Server(LIMITS, queue, tokenizer, None, 0, Speller(tokenizer))
    return make_app(Served(None, tokenizer, 4, 4, 64), server, wait=0.0, **options)


def statuses(app, *requests):
    async def run():
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return [(await client.get(path, headers=headers)) for path, headers in requests]

    return asyncio.run(run())


def test_prompts_are_tokenised_while_others_are_answered():
    """A long prompt kept all streams waiting for seconds."""
    begun, go_on = threading.Event(), threading.Event()

    class Slow:
        def encode_batch(self, texts, add_special_tokens):
            begun.set()
            assert go_on.wait(60)
            raise OverflowError("It was tokenised.")

    async def run():
        transport = httpx.ASGITransport(application(Slow()), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            body = {"model": "tiny", "prompt": "a"}
            long = asyncio.create_task(client.post("/v1/completions", json=body))
            await asyncio.to_thread(begun.wait, 60)
            assert (await client.get("/health")).status_code == 200
            go_on.set()
            failed = await long
            assert failed.status_code == 500
            assert "The tokenizer fails on this text: It was tokenised." in failed.text

    asyncio.run(run())


def test_only_who_has_the_key_is_answered():
    bearer = lambda key: {"Authorization": f"Bearer {key}"}
    good, bad, none, other, health = statuses(
        application(key="secret"),
        ("/v1/models", bearer("secret")),
        ("/v1/models", bearer("secre")),
        ("/v1/models", {}),
        ("/v1/models", {"Authorization": "Basic secret"}),
        ("/health", {}),
    )
    assert [x.status_code for x in (good, bad, none, other, health)] == [200, 401, 401, 401, 200]
    assert bad.json()["error"]["code"] == "invalid_api_key"
    assert "secret" not in bad.text
    assert bad.headers["WWW-Authenticate"] == "Bearer"


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
def test_names_that_lead_to_this_machine_from_elsewhere_are_refused(host):
    """A page of a browser could ask the server under its own name (DNS rebinding)."""
    good = ("localhost", "LOCALHOST:8000", "127.0.0.1:8000", "[::1]:8000", "localhost.:80")
    bad = ("evil.com", "evil.com:8000", "127.evil.com", "localhost.evil.com", "10.0.0.1", "")
    requests = [("/v1/models", {"Host": name}) for name in (*good, *bad)]
    actual = statuses(application(host=host), *requests)
    assert [x.status_code for x in actual] == [200] * len(good) + [403] * len(bad)
    (open_to_all,) = statuses(application(host="0.0.0.0"), requests[len(good)])
    assert open_to_all.status_code == 200


def test_a_body_must_come_in_time_and_must_not_be_large():
    class Slow:
        headers = {}  # noqa: RUF012

        async def stream(self):
            yield b"{"
            await asyncio.Event().wait()

    class Large:
        headers = {"content-length": "10001"}  # noqa: RUF012

        async def stream(self):
            raise AssertionError("It was read.")
            yield

    with pytest.raises(Refused, match="did not arrive within 0.01 seconds") as slow:
        asyncio.run(read_body(Slow(), 9, 0.01))  # pyright: ignore[reportArgumentType]
    with pytest.raises(Refused, match="more than 10000 bytes") as large:
        asyncio.run(read_body(Large(), 10_000, 9))  # pyright: ignore[reportArgumentType]
    assert (slow.value.status, large.value.status) == (408, 413)


@pytest.mark.integration
def test_connections_that_send_or_read_nothing_are_closed():
    """Header by header, a client could keep connections as long as it likes."""
    config = uvicorn.Config(application(), port=0, log_level="warning", http=timed(1.0))
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    address = server.servers[0].sockets[0].getsockname()
    head = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
    for first in (b"", b"GET", head):
        with socket.create_connection(address, timeout=60) as connection:
            connection.sendall(first)
            assert connection.recv(99) == b""  # closed by the server
    with socket.create_connection(address, timeout=60) as connection:
        for _ in range(3):  # a connection that is used stays
            connection.sendall(head + b"\r\n")
            assert b"200 OK" in connection.recv(999)
            time.sleep(0.5)
        connection.sendall(head)  # the next request is never finished
        assert connection.recv(99) == b""
    server.should_exit = True
    thread.join()
