"""The server with OpenAI's API."""

import asyncio
import contextlib
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import accumulate

import httpx
import numpy as np
import pytest
import uvicorn
from processes import start_processes
from serve_helpers import byte_level, client_of, load, streamed, together, write_weights

import redcoast as rc
from redcoast.serve import _application, _batching
from redcoast.serve._decode_rows import decode_rows
from redcoast.serve._detokenize import Text


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    return write_weights(tmp_path_factory.mktemp("served") / "tiny")


@pytest.fixture(scope="module")
def loaded(weights):
    return load(weights)


def expected(loaded, prompt, count):
    served, server = loaded
    tokens, mask = _batching.pad_prompts([server.encode(prompt, special=True)], served)
    go_on = lambda row: False  # as in the server, whose program this is then
    new = rc.generate(served.model, tokens, mask=mask, max_new_tokens=32, stop=go_on)[0]
    return served.tokenizer.decode(new[:count].tolist())


@pytest.mark.integration
def test_requests_that_come_together_share_a_batch_and_keep_their_answers(loaded, monkeypatch):
    batches = []
    generate = _batching.generate_rows
    monkeypatch.setattr(
        _batching, "generate_rows", lambda *a: (batches.append(len(a[1])), generate(*a))[1]
    )
    greedy = {"temperature": 0, "max_tokens": 9}
    chat = {"messages": [{"role": "user", "content": "Hi"}]}
    one, two, three, four = together(
        loaded,
        ("completions", {"prompt": "One", **greedy}),
        ("completions", {"prompt": "Twenty-two", **greedy, "max_tokens": 5}),
        ("completions", {"prompt": "One", **greedy, "stream": True}),
        ("chat/completions", {**chat, **greedy, "stream": True}),
    )
    assert batches == [4]
    first, second = one.json(), two.json()
    assert first["choices"][0]["text"] == expected(loaded, "One", 9)
    assert first["choices"][0]["finish_reason"] == "length"
    assert first["usage"] == {"prompt_tokens": 3, "completion_tokens": 9, "total_tokens": 12}
    assert second["choices"][0]["text"] == expected(loaded, "Twenty-two", 5)
    parts = streamed(three)
    assert "".join(part["choices"][0]["text"] for part in parts) == first["choices"][0]["text"]
    assert three.headers["content-type"].startswith("text/event-stream")
    deltas = [part["choices"][0]["delta"] for part in streamed(four)]
    assert deltas[0]["role"] == "assistant"
    text = "".join(delta.get("content", "") for delta in deltas)
    assert text == expected(loaded, "[user] Hi\n[assistant] ", 9)


def test_samples_of_a_seed_are_repeated(loaded):
    ask = {"prompt": "One", "n": 3, "max_tokens": 8, "seed": 5, "stop": ["\x00no"]}
    once, again = together(loaded, ("completions", ask))[0], together(loaded, ("completions", ask))
    texts = [choice["text"] for choice in once.json()["choices"]]
    assert texts == [choice["text"] for choice in again[0].json()["choices"]]
    assert len(set(texts)) == 3


def test_what_exceeds_the_queue_is_told_when_to_come_back(loaded):
    ask = {"prompt": "One", "n": 2, "max_tokens": 2, "seed": 5}
    responses = together(loaded, *[("completions", ask)] * 9, waiting=4)
    codes = [response.status_code for response in responses]
    assert set(codes) == {200, 429}
    assert codes.count(200) >= 2
    refused = next(response for response in responses if response.status_code == 429)
    assert int(refused.headers["Retry-After"]) >= 1
    assert refused.json()["error"]["type"] == "rate_limit_error"


SAY = [{"role": "user", "content": "Hi"}]
BAD = [
    ("completions", {"prompt": "a", "model": "gpt-5"}, 404, "model", "The model 'gpt-5' does not"),
    ("completions", {}, 400, "prompt", "must be a string"),
    ("completions", {"prompt": ""}, 400, "prompt", "at least one token"),
    ("completions", {"prompt": [256]}, 400, "prompt", "0 to 255"),
    ("completions", {"prompt": "a" * 64}, 400, "prompt", "maximum context length is 64 tokens"),
    ("completions", {"prompt": "a", "max_tokens": 64}, 400, "prompt", "64 were requested"),
    ("completions", {"prompt": "a", "max_tokens": True}, 400, "max_tokens", "be an integer"),
    ("completions", {"prompt": "a", "temperature": 3}, 400, "temperature", "at most 2"),
    ("completions", {"prompt": "a", "n": 5}, 400, "n", "at most 4"),
    ("completions", {"prompt": ["a"] * 5}, 400, "prompt", "more than 4 at once"),
    ("completions", {"prompt": "a", "stop": 3}, 400, "stop", "at most 4 strings"),
    ("completions", {"prompt": "a", "stream": 1}, 400, "stream", "must be a boolean"),
    ("completions", {"prompt": "a", "logprobs": 21}, 400, "logprobs", "at most 20"),
    ("completions", {"prompt": "a", "stop": ["x" * 1001]}, 400, "stop", "1000 characters"),
    ("completions", {"prompt": "a" * 9000}, 400, "prompt", "at most 8192 are accepted"),
    ("completions", {"prompt": "a", "stop_token_ids": [256]}, 400, "stop_token_ids", "0 to 255"),
    ("completions", {"prompt": "a", "logit_bias": {"x": 1}}, 400, "logit_bias", "must be tokens"),
    ("completions", {"prompt": "a", "logit_bias": {"3": 101}}, 400, "logit_bias", "-100 to 100"),
    ("completions", {"prompt": "a", "frequency_penalty": 3}, 400, "frequency_penalty", "most 2"),
    ("completions", {"prompt": "a", "min_tokens": 17}, 400, "min_tokens", "16 at most"),
    ("completions", {"prompt": "a", "max_tokens": 0}, 400, "max_tokens", "at least 1"),
    ("completions", {"prompt": "a", "wat": 0}, 400, "wat", "Unknown parameter: 'wat'"),
    ("chat/completions", {"messages": []}, 400, "messages", "at least one message"),
    ("chat/completions", {"messages": [{"role": "x"}]}, 400, "messages[0].role", "one of system"),
    ("chat/completions", {"messages": [{"role": "user"}]}, 400, "messages[0].content", "a string"),
    (
        "chat/completions",
        {"messages": [{"role": "assistant", "content": "a"}]},
        400,
        "messages",
        "chat template rejects these messages: The user begins",
    ),
    ("chat/completions", {"messages": SAY, "tools": [{}]}, 400, "tools", "type 'function'"),
    ("chat/completions", {"messages": SAY, "echo": True}, 400, "echo", "Unknown parameter"),
    ("chat/completions", {"messages": SAY, "top_logprobs": 2}, 400, "top_logprobs", "needs"),
    ("chat/completions", {"messages": SAY * 65}, 400, "messages", "more than 64 messages"),
    (
        "chat/completions",
        {"messages": SAY, "tool_choice": "required"},
        400,
        "tool_choice",
        "not implemented",
    ),
    (
        "chat/completions",
        {"messages": SAY, "chat_template_kwargs": {"messages": []}},
        400,
        "chat_template_kwargs",
        "an object without messages",
    ),
    (
        "chat/completions",
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": 3}}]}]},
        400,
        "messages[0].tool_calls",
        "list of functions with names",
    ),
]


def test_bad_requests_get_the_errors_of_the_api(loaded):
    async def run():
        async with client_of(loaded, waiting=99) as client:
            posts = [client.post(case[0], json={"model": "tiny"} | case[1]) for case in BAD]
            broken = client.post("completions", content=b'{"a')
            half = client.post("completions", content=b'{"prompt": "\\ud800", "model": "tiny"}')
            lost, wrong = client.post("nothing"), client.get("completions")
            return await asyncio.gather(*posts, broken, half, lost, wrong)

    *actual, broken, half, lost, wrong = asyncio.run(run())
    for (_, body, status, param, words), response in zip(BAD, actual, strict=True):
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (status, param), (body, error)
        assert words in error["message"]
        assert error["type"] == "invalid_request_error"
    codes = [response.status_code for response in (broken, half, lost, wrong)]
    assert codes == [400, 400, 404, 405]
    assert all(set(x.json()["error"]) >= {"message", "type"} for x in (broken, half, lost, wrong))


@pytest.mark.parametrize(
    ("before", "tokens", "text"),
    [
        ([], ["▁is", "▁nice"], "is nice"),
        (["▁Paris"], ["▁is", "▁nice"], " is nice"),
        (["▁Paris"], ["ian", "▁is"], "ian is"),
        (["a"] * 99, ["▁is"], " is"),
    ],
)
def test_a_continuation_keeps_the_space_that_it_begins_with(before, tokens, text):
    """SentencePiece's decoders leave out the first space of a text."""
    words = list(dict.fromkeys([*before, *tokens]))
    spelled = lambda ids: "".join(words[i] for i in ids)
    decode = lambda ids: spelled(ids).replace("▁", " ").removeprefix(" ")
    actual = Text(decode, (), [*map(words.index, before)])
    parts = [actual.add(words.index(token)) for token in tokens]
    assert "".join([*parts, actual.rest()]) == text


def test_a_continuation_completes_the_character_of_its_prompt():
    decode = lambda tokens: bytes(tokens).decode(errors="replace")
    prompt, rest = "naï".encode()[:-1], "ïve".encode()[1:]
    actual = Text(decode, (), list(prompt))
    assert "".join([*map(actual.add, rest), actual.rest()]) == "ïve"


def test_truncation_and_padding_of_a_file_are_left_out(tmp_path):
    """A tokenizer.json keeps those of its training."""
    tokenizer = byte_level()
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=8)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    read = rc.load_tokenizer(tmp_path)
    for text in ("ab", "a longer text"):
        assert len(read.encode(text).ids) == len(text)


@pytest.mark.parametrize(
    ("text", "stops", "shown"),
    [
        ("the end of it", (), "the end of it"),
        ("the end of it", ("of",), "the end "),
        ("the end of it", ("of", "en"), "the "),
        ("abababac", ("abac",), "abab"),
        ("wait en", ("end",), "wait en"),
        ("naïve 🎈 …", (" …",), "naïve 🎈"),
    ],
)
def test_text_is_given_out_once_and_up_to_a_stop_string(text, stops, shown):
    """Of tokens that are bytes: characters and stop strings take several."""
    decode = lambda tokens: bytes(tokens).decode(errors="replace")
    actual = Text(decode, stops)
    parts = []
    for token in text.encode():
        parts.append(actual.add(token))
        if actual.stopped:
            break
    else:
        parts.append(actual.rest())
    assert "".join(parts) == shown
    assert actual.stopped == (shown != text)
    # What was shown is never taken back.
    assert all(shown.startswith(part) for part in accumulate(parts))


@pytest.mark.integration
def test_the_client_of_openai_talks_with_it(weights):
    openai = pytest.importorskip("openai")
    options = ["serve", "--weights", weights, "--port", "0", "--context", "256", "--waiting", "4"]
    options += ["--mesh", "2x2", "--rows", "4", "--api-key", "secret"]
    with start_processes(COMMAND, *options, processes=1, devices=4) as (process,):
        process.wait_for("Uvicorn running on http://")
        url = process.output.split("Uvicorn running on ")[1].split()[0]
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="secret", max_retries=0)
        check_client(openai, client)
        process.kill(signal.SIGINT)
        assert process.wait().returncode == 0


def check_client(openai, client):
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").object == "model"
    ask = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "temperature": 0}
    chat = client.chat.completions
    whole = chat.create(**ask, max_completion_tokens=20)
    assert whole.usage.completion_tokens == 20
    parts = [
        *chat.create(**ask, max_tokens=20, stream=True, stream_options={"include_usage": True})
    ]
    text = "".join(part.choices[0].delta.content or "" for part in parts[:-1])
    assert text == whole.choices[0].message.content
    assert parts[-1].usage == whole.usage
    assert [part.choices[0].finish_reason for part in parts[:-1]][-1] == "length"
    two = client.completions.create(model="tiny", prompt=["a", "b"], max_tokens=3, temperature=0)
    assert [choice.index for choice in two.choices] == [0, 1]
    with pytest.raises(openai.BadRequestError, match="at most 2"):
        chat.create(**ask | {"temperature": 9})
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        chat.create(**ask | {"model": "gpt-5"})
    raw = client.completions.with_raw_response
    calls = lambda _: raw_status(openai, raw)
    with ThreadPoolExecutor(12) as pool:
        statuses = [*pool.map(calls, range(12))]
    assert 200 in statuses
    assert set(statuses) <= {200, 429}
    assert 429 in statuses


def raw_status(openai, raw):
    """The status of a long request of four rows."""
    try:
        return raw.create(model="tiny", prompt=["a"] * 4, max_tokens=200, seed=1).status_code
    except openai.RateLimitError as error:
        return 429 if int(error.response.headers["Retry-After"]) >= 1 else None


def counted_steps(monkeypatch):
    """The list that gets an entry for each step that is decoded."""
    steps, real = [], decode_rows

    def counted(*args, **options):
        for step in real(*args, **options):
            steps.append(step)
            yield step

    monkeypatch.setattr(_batching, "decode_rows", counted)
    return steps


def answer_jobs(loaded, *jobs):
    _batching.answer_batch(loaded[0], jobs, np.random.default_rng(0))


GREEDY = rc.Decoding()


def test_a_batch_ends_once_nobody_waits_for_it(loaded, monkeypatch):
    def send(piece):
        job.cancelled.set()

    steps = counted_steps(monkeypatch)
    job = _batching.ServedJob([[5, 6]], 32, GREEDY, None, (), send)
    answer_jobs(loaded, job)
    assert len(steps) < 9


@contextlib.contextmanager
def running(app, **options):
    """The address of the server itself, in a thread."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning", **options))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = True
        thread.join()


@pytest.mark.integration
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_ends_its_request(loaded, monkeypatch, stream):
    """With the real server, whose thread would go on generating."""
    jobs = []
    monkeypatch.setattr(
        _batching.Queue, "put", lambda self, job: (jobs.append(job), job.send(PIECE), True)[-1]
    )
    body = {"model": "tiny", "prompt": "a", "stream": stream}
    fresh = replace(loaded[1], queue=_batching.Queue(4, 4, 64))
    with running(_application.make_app(loaded[0], fresh, wait=0)) as port:
        address = f"http://127.0.0.1:{port}/v1/completions"
        with (
            contextlib.suppress(httpx.ReadTimeout),
            httpx.stream("POST", address, json=body, timeout=1) as response,
        ):
            next(response.iter_lines())
        assert jobs[0].cancelled.wait(60)


PIECE = _batching.Piece(0, "x", None, 1)
COMMAND = "from redcoast_cli import main; main()"
