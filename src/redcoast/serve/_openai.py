"""Bodies of requests, answers and errors of OpenAI's API for completions and chats."""

import json
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import redcoast as rc

# Parameters with the only values that are served, and parameters that change no answer.
ONLY: dict[str, tuple[Any, ...]] = {
    "audio": (None,),
    "best_of": (None, 1),
    "echo": (None, False),
    "frequency_penalty": (None, 0),
    "function_call": (None, "none", "auto"),
    "functions": (None, []),
    "logit_bias": (None, {}),
    "logprobs": (None, False),
    "modalities": (None, ["text"]),
    "prediction": (None,),
    "presence_penalty": (None, 0),
    "reasoning_effort": (None,),
    "response_format": (None, {"type": "text"}),
    "suffix": (None, ""),
    "tool_choice": (None, "none", "auto"),
    "tools": (None, []),
    "top_logprobs": (None, 0),
    "verbosity": (None,),
    "web_search_options": (None,),
}
IGNORED = ("metadata", "parallel_tool_calls", "prompt_cache_key", "prompt_cache_retention")
IGNORED += ("safety_identifier", "service_tier", "store", "user")
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
READ = ("model", "max_tokens", "n", "seed", "stop", "stream", "stream_options", *SAMPLING)
ROLES = ("system", "developer", "user", "assistant")


class Refused(Exception):
    """An error that the client is told of, with the status of its response."""

    def __init__(self, status: int, message: str, param: str | None = None, code: Any = None):
        super().__init__(message)
        self.status, self.param, self.code = status, param, code


def error_body(error: Exception) -> tuple[int, dict[str, Any]]:
    """Returns the status and the body of a response for an error."""
    if not isinstance(error, Refused):
        message = f"The server could not answer: {type(error).__name__}: {error}"
        error = Refused(500, message, code="internal_error")
    kinds = {429: "rate_limit_error", 500: "server_error", 503: "server_error"}
    kind = kinds.get(error.status, "invalid_request_error")
    body = {"message": str(error), "type": kind, "param": error.param, "code": error.code}
    return error.status, {"error": body}


@dataclass(frozen=True)
class Limits:
    """What the server takes: the name of its model, its vocabulary, the most tokens of a prompt
    and its answer, the most rows of a request, the tokens of an answer in a chat by default, and
    the decoding by default."""

    name: str
    vocab: int
    context: int
    rows: int
    new_tokens: int
    decoding: rc.Decoding


@dataclass(frozen=True)
class Ask:
    """A request that was checked. `prompts` has a row for each choice."""

    prompts: list[list[int]]
    new_tokens: int
    decoding: rc.Decoding
    seed: int | None
    stops: tuple[str, ...]
    stream: bool
    usage: bool
    prompt_tokens: int


def read_request(
    body: bytes,
    limits: Limits,
    encode: Callable[..., list[int]],
    render: Callable[..., str] | None,
    *,
    chat: bool,
) -> Ask:
    """Reads the body of a request. `encode` is that of a tokenizer, with `special` for its own
    tokens around a text; `render` is the chat template."""
    given = parse(body)
    refuse_unknown(given, chat=chat)
    check_model(given.get("model"), limits.name)
    if chat:
        prompts = [encode(rendered(given.get("messages"), render), special=False)]
    else:
        prompts = read_prompts(given.get("prompt"), encode, limits.vocab)
    count = integer(given, "n", 1, limits.rows) or 1
    if len(prompts) * count > limits.rows:
        text = f"{len(prompts)} prompts with n={count} are more than {limits.rows} at once."
        raise Refused(400, text, "n" if chat else "prompt")
    stream, options = boolean(given, "stream"), given.get("stream_options") or {}
    if not isinstance(options, dict) or (options and not stream):
        raise Refused(400, "`stream_options` must be an object, with `stream`.", "stream_options")
    return Ask(
        [prompt for prompt in prompts for _ in range(count)],
        read_length(given, prompts, limits, chat=chat),
        read_decoding(given, limits.decoding),
        integer(given, "seed", -(2**63), 2**63 - 1),
        read_stops(given.get("stop")),
        stream,
        boolean(options, "include_usage"),
        sum(map(len, prompts)),
    )


def parse(body: bytes) -> dict[str, Any]:
    try:
        given = json.loads(body)
        body.decode()
        json.dumps(given, ensure_ascii=False).encode()  # refuses halves of surrogate pairs
    except (ValueError, RecursionError) as error:
        raise Refused(400, f"The body is not valid JSON in UTF-8: {error}.") from error
    if not isinstance(given, dict):
        raise Refused(400, "The body must be a JSON object.")
    return given


def refuse_unknown(given: dict[str, Any], *, chat: bool) -> None:
    own = ("messages", "max_completion_tokens") if chat else ("prompt",)
    for name, value in given.items():
        if name not in (*READ, *own, *ONLY, *IGNORED):
            raise Refused(400, f"Unknown parameter: '{name}'.", name, "unknown_parameter")
        same = lambda x: value == x and isinstance(value, bool) == isinstance(x, bool)  # noqa: B023
        if name in ONLY and not any(map(same, ONLY[name])):
            text = f"Unsupported value: '{name}' is not implemented by this server; leave it out."
            raise Refused(400, text, name, "unsupported_value")


def check_model(model: Any, name: str) -> None:
    if not isinstance(model, str):
        raise Refused(400, "You must provide a model parameter, a string.", "model")
    if model != name:
        text = f"The model '{model}' does not exist. This server has '{name}'."
        raise Refused(404, text, "model", "model_not_found")


def rendered(messages: Any, render: Callable[..., str] | None) -> str:
    """Returns the prompt of a chat."""
    if render is None:
        text = "This model has no chat template. Use /v1/completions."
        raise Refused(400, text, "messages", "unsupported_value")
    if not (isinstance(messages, list) and messages):
        raise Refused(400, "`messages` must be a list with at least one message.", "messages")
    chat = [read_message(message, f"messages[{i}]") for i, message in enumerate(messages)]
    try:
        return render(chat, add_generation_prompt=True)
    except Exception as error:  # a template may refuse, or fail on, any order of roles
        text = f"The model's chat template refuses these messages: {error}."
        raise Refused(400, text, "messages") from error


def read_message(message: Any, where: str) -> dict[str, str]:
    if not isinstance(message, dict) or message.get("role") not in ROLES:
        text = f"'{where}' must be an object with a role that is one of {', '.join(ROLES)}."
        raise Refused(400, text, f"{where}.role")
    if message.get("tool_calls") or message.get("function_call") or message.get("audio"):
        raise Refused(400, f"'{where}' has calls of tools, which are not served.", where)
    role = "system" if message["role"] == "developer" else message["role"]
    return {"role": role, "content": read_content(message.get("content"), f"{where}.content")}


def read_content(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [None]
    texts = [part.get("text") if isinstance(part, dict) else None for part in parts]
    kinds = [part.get("type") if isinstance(part, dict) else None for part in parts]
    if not parts or kinds != ["text"] * len(parts) or not all(isinstance(x, str) for x in texts):
        raise Refused(400, f"'{where}' must be a string, or a list of parts of text.", where)
    return "".join(map(str, texts))


def read_prompts(prompt: Any, encode: Callable[..., list[int]], vocab: int) -> list[list[int]]:
    """Returns the tokens of one prompt or several, which are strings or tokens."""
    is_token = lambda x: isinstance(x, int) and not isinstance(x, bool)
    if isinstance(prompt, str) or (isinstance(prompt, list) and prompt and is_token(prompt[0])):
        prompt = [prompt]
    if not (isinstance(prompt, list) and prompt):
        raise Refused(400, "`prompt` must be a string, a list of strings, or tokens.", "prompt")
    found = []
    for one in prompt:
        tokens = encode(one, special=True) if isinstance(one, str) else one
        if not (isinstance(tokens, list) and tokens and all(map(is_token, tokens))):
            text = "A prompt must be a string or a list of tokens, with at least one token."
            raise Refused(400, text, "prompt")
        if not all(0 <= token < vocab for token in tokens):
            raise Refused(400, f"The tokens of this model are 0 to {vocab - 1}.", "prompt")
        found.append(tokens)
    return found


def read_length(
    given: dict[str, Any], prompts: list[list[int]], limits: Limits, *, chat: bool
) -> int:
    """Returns the most new tokens, by default what the context has room for in a chat."""
    longest = max(map(len, prompts))
    room = limits.context - longest
    names = ("max_completion_tokens", "max_tokens") if chat else ("max_tokens",)
    asked = [x for x in (integer(given, name, 1, None) for name in names) if x is not None]
    least = asked[0] if asked else 1
    if room < least:
        text = (
            f"This server's maximum context length is {limits.context} tokens. The prompt has "
            f"{longest}, and {least} were requested for the answer."
        )
        param = "messages" if chat else "prompt"
        raise Refused(400, text, param, "context_length_exceeded")
    return asked[0] if asked else min(room, limits.new_tokens if chat else 16)


def read_decoding(given: dict[str, Any], default: rc.Decoding) -> rc.Decoding:
    """Returns the model's own decoding, with what the request asks for."""
    found = {
        "temperature": number(given, "temperature", 0, 2),
        "top_p": number(given, "top_p", 0, 1),
        "min_p": number(given, "min_p", 0, 1),
        "repetition_penalty": number(given, "repetition_penalty", 0, 10),
        "top_k": integer(given, "top_k", -1, None),
    }
    changes: dict[str, Any] = {name: x for name, x in found.items() if x is not None}
    # What excludes nothing: -1 or 0 for `top_k`, as elsewhere. A `top_p` of 0 is the best token.
    changes |= {name: None for name in ("top_k", "min_p") if changes.get(name, 1) <= 0}
    if changes.get("top_p") == 0:
        changes["temperature"] = 0
    # Logits divided by less would overflow.
    if changes.get("temperature", default.temperature) < 1e-4:
        changes = {k: x for k, x in changes.items() if k == "repetition_penalty"}
        default = default.without_sampling()
    try:
        return replace(default, **changes)
    except ValueError as error:
        raise Refused(400, str(error)) from error


def read_stops(stop: Any) -> tuple[str, ...]:
    stops = [stop] if isinstance(stop, str) else stop or []
    if not isinstance(stops, list) or len(stops) > 4 or not all(isinstance(x, str) for x in stops):
        raise Refused(400, "`stop` must be a string or a list of at most 4 strings.", "stop")
    return tuple(filter(None, stops))


def boolean(given: dict[str, Any], name: str) -> bool:
    value = given.get(name)
    if not (value is None or isinstance(value, bool)):
        raise Refused(400, f"`{name}` must be a boolean.", name, "invalid_type")
    return bool(value)


def integer(given: dict[str, Any], name: str, least: int, most: int | None) -> int | None:
    return _within(given, name, (int,), "an integer", least, most)


def number(given: dict[str, Any], name: str, least: int, most: int) -> Any:
    return _within(given, name, (int, float), "a number", least, most)


def _within(
    given: dict[str, Any], name: str, kinds: Any, what: str, least: int, most: int | None
) -> Any:
    value = given.get(name)
    if value is None:
        return None
    if not isinstance(value, kinds) or isinstance(value, bool):
        raise Refused(400, f"`{name}` must be {what}.", name, "invalid_type")
    if not (value >= least and (most is None or value <= most)):
        bounds = f"at least {least}" + ("" if most is None else f" and at most {most}")
        raise Refused(400, f"`{name}` is {value}. It must be {bounds}.", name, "invalid_value")
    return value


@dataclass(frozen=True)
class Reply:
    """The fields that all parts of one response share."""

    chat: bool
    model: str
    id: str
    created: int

    @staticmethod
    def to(name: str, *, chat: bool) -> "Reply":
        """A new response of the model `name`."""
        kind = "chatcmpl" if chat else "cmpl"
        return Reply(chat, name, f"{kind}-{uuid.uuid4().hex}", int(time.time()))

    def whole(self, texts: Sequence[str], finish: Sequence[Any], usage: Any) -> dict[str, Any]:
        """The body of a response that is not streamed."""
        content = lambda text: (
            {"message": {"role": "assistant", "content": text, "refusal": None}}
            if self.chat
            else {"text": text}
        )
        choices = [
            {"index": i, **content(text), "logprobs": None, "finish_reason": end}
            for i, (text, end) in enumerate(zip(texts, finish, strict=True))
        ]
        return self._body("", choices) | {"usage": usage}

    def chunk(self, row: int, text: str, finish: str | None, *, first: bool) -> dict[str, Any]:
        """One part of a streamed response."""
        delta: dict[str, Any] = {"role": "assistant"} if first else {}
        delta |= {"content": text} if text or first else {}
        content = {"delta": delta} if self.chat else {"text": text}
        end = {"logprobs": None, "finish_reason": finish}
        return self._body(".chunk", [{"index": row, **content, **end}])

    def last(self, usage: Any) -> dict[str, Any]:
        """The part of a streamed response that has its usage."""
        return self._body(".chunk", []) | {"usage": usage}

    def _body(self, part: str, choices: list[Any]) -> dict[str, Any]:
        kind = f"chat.completion{part}" if self.chat else "text_completion"
        head = {"id": self.id, "object": kind, "created": self.created, "model": self.model}
        return head | {"choices": choices}


def usage(prompt: int, new: int) -> dict[str, int]:
    return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}


def model_body(name: str, created: int) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": created, "owned_by": "redcoast"}
