"""Reads and checks requests of OpenAI's API for completions and chats.

Limits are checked first: a request that is too large is rejected before it is rendered or
tokenised.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..core._decoding import Decoding
from ._batching import Extras
from ._refused import Refused
from ._row_options import MOST_BIASES, MOST_ENDS, MOST_TOP, ends_of

Encode = Callable[..., list[int]]
Render = Callable[..., str]

# Parameters with the only supported values, and parameters that do not affect answers.
ONLY: dict[str, tuple[Any, ...]] = {
    "audio": (None,),
    "best_of": (None, 1),
    "function_call": (None, "none", "auto"),
    "functions": (None, []),
    "modalities": (None, ["text"]),
    "prediction": (None,),
    "reasoning_effort": (None,),
    "suffix": (None, ""),
    "tool_choice": (None, "none", "auto"),
    "verbosity": (None,),
    "web_search_options": (None,),
}
IGNORED = ("metadata", "parallel_tool_calls", "prompt_cache_key", "prompt_cache_retention")
IGNORED += ("safety_identifier", "service_tier", "store", "user")
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty")
SAMPLING += ("frequency_penalty", "logit_bias", "min_tokens", "stop_token_ids", "ignore_eos")
READ = ("model", "max_tokens", "n", "seed", "stop", "stream", "stream_options", "logprobs")
READ += ("response_format", *SAMPLING)
OF_CHATS = ("messages", "max_completion_tokens", "top_logprobs", "tools", "chat_template_kwargs")
OF_COMPLETIONS = ("prompt", "echo")
ROLES = ("system", "developer", "user", "assistant", "tool")
# Other keys of a message, which templates may show.
OF_MESSAGES = ("name", "tool_call_id", "tool_calls", "reasoning_content")
MOST_STOP = 1000  # characters of a stop string


@dataclass(frozen=True)
class Limits:
    """The limits of requests.

    - `name`: the name of its model; `vocab`: the size of the model's vocabulary.
    - `context`: the maximum number of tokens of a prompt and its answer; `characters`: the maximum
        number of characters of a prompt.
    - `rows`: the maximum number of rows of a request.
    - `new_tokens`: the default number of tokens of an answer in a chat; `decoding`: the default
        decoding.
    - `eos`: the tokens that end an answer.
    - `grammars`: creates the grammar of a `response_format`; None if not supported.
    """

    name: str
    vocab: int
    context: int
    rows: int
    new_tokens: int
    decoding: Decoding
    characters: int = 2**18
    eos: tuple[int, ...] = ()
    grammars: Callable[[Mapping[str, Any]], Callable[[], Any] | None] | None = None

    @property
    def most_bytes(self) -> int:
        """The maximum size of the body of a request, in bytes."""
        return 2**20 + 16 * self.rows * self.context


@dataclass(frozen=True)
class Ask:
    """A checked request. `prompts` has a row for each choice."""

    prompts: list[list[int]]
    new_tokens: int
    decoding: Decoding
    seed: int | None
    stops: tuple[str, ...]
    extras: Extras
    stream: bool
    usage: bool
    prompt_tokens: int


def read_request(
    body: bytes, limits: Limits, encode: Encode, render: Render | None, *, chat: bool
) -> Ask:
    """Reads the body of a request. `encode` tokenises a text, with special tokens around it if
    `special`; `render` renders the chat template."""
    given = parse_body(body, limits)
    refuse_unknown(given, chat=chat)
    check_model_name(given.get("model"), limits.name)
    stream, options = boolean(given, "stream"), given.get("stream_options") or {}
    if not isinstance(options, dict) or (options and not stream):
        raise Refused(400, "`stream_options` must be an object, with `stream`.", "stream_options")
    decoding = requested_decoding(given, limits)
    seed = integer(given, "seed", -(2**63), 2**63 - 1)
    stops = read_stops(given.get("stop"))
    count = integer(given, "n", 1, limits.rows) or 1
    texts = read_messages(given, limits, render) if chat else read_prompts(given, limits)
    if len(texts) * count > limits.rows:
        text = f"{len(texts)} prompts with n={count} are more than {limits.rows} at once."
        raise Refused(400, text, "n" if chat else "prompt")
    echo = not chat and boolean(given, "echo")
    extras = read_extras(given, limits, chat=chat)
    asked = read_asked_length(given, chat=chat, least=0 if echo else 1)
    param = "messages" if chat else "prompt"
    prompts = [tokens_of(text, encode, limits, param=param, special=not chat) for text in texts]
    new_tokens = choose_length(asked, prompts, limits, chat=chat)
    if decoding.min_new_tokens > new_tokens:
        text = (
            f"`min_tokens` is {decoding.min_new_tokens}, but the answer has {new_tokens} at most."
        )
        raise Refused(400, text, "min_tokens", "invalid_value")
    if extras.grammar is not None and (echo or decoding.min_new_tokens):
        text = "`response_format` is not supported with `echo` or `min_tokens`."
        raise Refused(400, text, "response_format", "unsupported_value")
    if echo:
        shown = [text if isinstance(text, str) else None for text in texts]
        extras = replace(extras, echo=tuple(text for text in shown for _ in range(count)))
    return Ask(
        [prompt for prompt in prompts for _ in range(count)],
        new_tokens,
        decoding,
        seed,
        stops,
        extras,
        stream,
        boolean(options, "include_usage"),
        sum(map(len, prompts)),
    )


def parse_body(body: bytes, limits: Limits) -> dict[str, Any]:
    if len(body) > limits.most_bytes:
        raise Refused(413, f"The body has more than {limits.most_bytes} bytes.")
    try:
        given = json.loads(body)
        body.decode()
        if b"\\ud" in body.lower():  # perhaps an unpaired surrogate
            json.dumps(given, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise Refused(400, f"The body is not valid JSON in UTF-8: {error}.") from error
    if not isinstance(given, dict):
        raise Refused(400, "The body must be a JSON object.")
    return given


def refuse_unknown(given: dict[str, Any], *, chat: bool) -> None:
    own = OF_CHATS if chat else OF_COMPLETIONS
    for name, value in given.items():
        if name not in (*READ, *own, *ONLY, *IGNORED):
            raise Refused(400, f"Unknown parameter: '{name}'.", name, "unknown_parameter")
        same = lambda x: value == x and isinstance(value, bool) == isinstance(x, bool)  # noqa: B023
        if name in ONLY and not any(map(same, ONLY[name])):
            text = f"Unsupported value: '{name}' is not implemented by this server; leave it out."
            raise Refused(400, text, name, "unsupported_value")


def check_model_name(model: Any, name: str) -> None:
    if not isinstance(model, str):
        raise Refused(400, "You must provide a model parameter, a string.", "model")
    if model != name:
        text = f"The model '{model[:200]}' does not exist. This server has '{name}'."
        raise Refused(404, text, "model", "model_not_found")


def read_messages(given: dict[str, Any], limits: Limits, render: Render | None) -> list[str]:
    """Returns the prompt of a chat."""
    messages = given.get("messages")
    if render is None:
        text = "This model has no chat template. Use /v1/completions."
        raise Refused(400, text, "messages", "unsupported_value")
    if not (isinstance(messages, list) and messages):
        raise Refused(400, "`messages` must be a list with at least one message.", "messages")
    if len(messages) > limits.context:  # each has a token at least
        raise Refused(400, f"`messages` has more than {limits.context} messages.", "messages")
    chat = [read_message(message, f"messages[{i}]") for i, message in enumerate(messages)]
    check_characters(sum(len(message["content"]) for message in chat), limits, "messages")
    options = read_template_options(given)
    if given.get("tool_choice") != "none" and (tools := read_tools(given.get("tools"))):
        options["tools"] = tools
    try:
        return [render(chat, **options)]
    except ValueError as error:  # a template may reject, or fail on, any order of roles
        text = f"The model's chat template rejects these messages: {error}."
        raise Refused(400, text, "messages") from error


def read_template_options(given: dict[str, Any]) -> dict[str, Any]:
    """Returns the variables that a client sets in the chat template."""
    options = given.get("chat_template_kwargs") or {}
    own = ("messages", "tools", "chat_template", "tokenize")
    if not isinstance(options, dict) or any(name in own for name in options):
        text = f"`chat_template_kwargs` must be an object without {', '.join(own)}."
        raise Refused(400, text, "chat_template_kwargs")
    return {"add_generation_prompt": True} | options


def read_tools(tools: Any) -> list[Any] | None:
    tools = tools or []
    is_tool = lambda x: (
        isinstance(x, dict)
        and x.get("type") == "function"
        and isinstance(x.get("function"), dict)
        and isinstance(x["function"].get("name"), str)
    )
    if not (isinstance(tools, list) and all(map(is_tool, tools))):
        text = "`tools` must be a list of objects of type 'function', with a `function` and a name."
        raise Refused(400, text, "tools")
    return tools or None


def read_message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, dict) or message.get("role") not in ROLES:
        text = f"'{where}' must be an object with a role that is one of {', '.join(ROLES)}."
        raise Refused(400, text, f"{where}.role")
    if message.get("function_call") or message.get("audio"):
        text = f"'{where}' has a `function_call` or `audio`, which are not supported."
        raise Refused(400, text, where)
    role, content = message["role"], message.get("content")
    read = {"role": "system" if role == "developer" else role}
    # An answer that only calls tools has no content.
    empty = content is None and role == "assistant"
    read["content"] = "" if empty else read_content(content, f"{where}.content")
    for name in OF_MESSAGES:
        if message.get(name) is not None:
            read[name] = message[name]
    if calls := read.get("tool_calls"):
        read["tool_calls"] = read_calls(calls, f"{where}.tool_calls")
    return read


def read_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    """Returns tool calls with objects as arguments, as templates expect."""
    read = []
    entries: list[Any] = calls if isinstance(calls, list) else [None]
    for call in entries:
        function: Any = call.get("function") if isinstance(call, dict) else None
        arguments = read_arguments(function) if isinstance(function, dict) else None
        if arguments is None or not isinstance(function.get("name"), str):
            text = (
                f"'{where}' must be a list of functions with names and JSON objects as arguments."
            )
            raise Refused(400, text, where)
        read.append(call | {"function": function | {"arguments": arguments}})
    return read


def read_arguments(function: dict[str, Any]) -> dict[str, Any] | None:
    """Returns the arguments of a call, which are text in the API; None if they are not an
    object."""
    arguments = function.get("arguments") or "{}"
    try:
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        return None
    return arguments if isinstance(arguments, dict) else None


def read_content(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [None]
    texts = [part.get("text") if isinstance(part, dict) else None for part in parts]
    kinds = [part.get("type") if isinstance(part, dict) else None for part in parts]
    if not parts or kinds != ["text"] * len(parts) or not all(isinstance(x, str) for x in texts):
        raise Refused(400, f"'{where}' must be a string, or a list of parts of text.", where)
    return "".join(map(str, texts))


def read_prompts(given: dict[str, Any], limits: Limits) -> list[str | list[int]]:
    """Returns one or several prompts, which are strings or tokens."""
    prompt = given.get("prompt")
    if isinstance(prompt, str) or (isinstance(prompt, list) and prompt and _is_token(prompt[0])):
        prompt = [prompt]
    if not (isinstance(prompt, list) and prompt):
        raise Refused(400, "`prompt` must be a string, a list of strings, or tokens.", "prompt")
    if len(prompt) > limits.rows:
        text = f"{len(prompt)} prompts are more than {limits.rows} at once."
        raise Refused(400, text, "prompt")
    for part in prompt:
        if isinstance(part, str):
            check_characters(len(part), limits, "prompt")
        elif not (isinstance(part, list) and all(map(_is_token, part))):
            text = "A prompt must be a string or a list of tokens, with at least one token."
            raise Refused(400, text, "prompt")
    return prompt


def _is_token(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def check_characters(count: int, limits: Limits, param: str) -> None:
    """Rejects a text that is too long for the context."""
    if count > limits.characters:
        text = (
            f"This server's maximum context length is {limits.context} tokens. The prompt has "
            f"{count} characters, and at most {limits.characters} are accepted."
        )
        raise Refused(400, text, param, "context_length_exceeded")


def tokens_of(
    prompt: str | list[int], encode: Encode, limits: Limits, *, param: str, special: bool
) -> list[int]:
    """Returns the tokens of a prompt, which are all in the vocabulary of the model."""
    if isinstance(prompt, str):
        check_characters(len(prompt), limits, param)
    tokens = encode(prompt, special=special) if isinstance(prompt, str) else prompt
    if not tokens:
        text = "A prompt must be a string or a list of tokens, with at least one token."
        raise Refused(400, text, param)
    if outside := [token for token in tokens if not 0 <= token < limits.vocab]:
        text = f"The prompt has the token {outside[0]}, but the tokens of this model are "
        raise Refused(400, f"{text}0 to {limits.vocab - 1}.", param)
    return tokens


def read_asked_length(given: dict[str, Any], *, chat: bool, least: int) -> int | None:
    """Returns the maximum number of new tokens, if the request specifies it."""
    names = ("max_completion_tokens", "max_tokens") if chat else ("max_tokens",)
    asked = [integer(given, name, least, None) for name in names]
    return next((x for x in asked if x is not None), None)


def choose_length(
    asked: int | None, prompts: list[list[int]], limits: Limits, *, chat: bool
) -> int:
    """Returns the maximum number of new tokens; by default, in a chat, as many as the context
    allows."""
    longest = max(map(len, prompts))
    room, least = limits.context - longest, 1 if asked is None else asked
    if room < least or room < 0:
        text = (
            f"This server's maximum context length is {limits.context} tokens. The prompt has "
            f"{longest}, and {least} were requested for the answer."
        )
        param = "messages" if chat else "prompt"
        raise Refused(400, text, param, "context_length_exceeded")
    return min(room, limits.new_tokens if chat else 16) if asked is None else asked


def requested_decoding(given: dict[str, Any], limits: Limits) -> Decoding:
    """Returns the model's default decoding, with the options of the request."""
    default = limits.decoding
    asked = {
        "temperature": number(given, "temperature", 0, 2),
        "top_p": number(given, "top_p", 0, 1),
        "min_p": number(given, "min_p", 0, 1),
        "repetition_penalty": number(given, "repetition_penalty", 0, 10),
        "top_k": integer(given, "top_k", -1, None),
        "min_new_tokens": integer(given, "min_tokens", 0, limits.context),
    }
    changes: dict[str, Any] = {name: x for name, x in asked.items() if x is not None}
    # A `top_k` of -1 or 0 excludes nothing, as elsewhere. A `top_p` of 0 selects the best token.
    changes |= {name: None for name in ("top_k", "min_p") if changes.get(name, 1) <= 0}
    if changes.get("top_p") == 0:
        changes["temperature"] = 0
    # Division of the logits by less would overflow.
    if changes.get("temperature", default.temperature) < 1e-4:
        kept = ("repetition_penalty", "min_new_tokens")
        changes = {name: x for name, x in changes.items() if name in kept}
        default = default.without_sampling()
    try:
        return replace(default, **changes, eos=read_ends(given, limits))
    except ValueError as error:
        raise Refused(400, str(error)) from error


def read_ends(given: dict[str, Any], limits: Limits) -> tuple[int, ...]:
    """Returns the tokens that end an answer."""
    ids = given.get("stop_token_ids") or []
    if not (isinstance(ids, list) and all(map(_is_token, ids))):
        text = "`stop_token_ids` must be a list of tokens."
        raise Refused(400, text, "stop_token_ids", "invalid_type")
    if outside := [token for token in ids if not 0 <= token < limits.vocab]:
        text = f"`stop_token_ids` has {outside[0]}. The tokens of this model are 0 to "
        raise Refused(400, f"{text}{limits.vocab - 1}.", "stop_token_ids", "invalid_value")
    own = () if boolean(given, "ignore_eos") else ends_of(limits.decoding, limits)
    ends = tuple(dict.fromkeys((*own, *ids)))
    if len(ends) > MOST_ENDS:
        text = f"`stop_token_ids` and the model's end tokens are more than {MOST_ENDS}."
        raise Refused(400, text, "stop_token_ids", "invalid_value")
    return ends


def read_extras(given: dict[str, Any], limits: Limits, *, chat: bool) -> Extras:
    """Reads the penalties, biases and options for log-probabilities."""
    if chat:
        wanted = boolean(given, "logprobs")
        count = integer(given, "top_logprobs", 0, MOST_TOP)
        if count and not wanted:
            text = "`top_logprobs` needs `logprobs` to be true."
            raise Refused(400, text, "top_logprobs", "invalid_value")
        logprobs = count or 0 if wanted else None
    else:
        off = given.get("logprobs") is False
        logprobs = None if off else integer(given, "logprobs", 0, MOST_TOP)
    return Extras(
        presence=number(given, "presence_penalty", -2, 2) or 0,
        frequency=number(given, "frequency_penalty", -2, 2) or 0,
        bias=read_bias(given.get("logit_bias"), limits),
        logprobs=logprobs,
        grammar=read_format(given.get("response_format"), limits),
    )


def read_bias(bias: Any, limits: Limits) -> dict[int, float]:
    """Reads `logit_bias`, whose keys are token ids as strings."""
    bias = bias or {}
    if not isinstance(bias, dict) or len(bias) > MOST_BIASES:
        text = f"`logit_bias` must be an object of at most {MOST_BIASES} tokens."
        raise Refused(400, text, "logit_bias", "invalid_type")
    read = {}
    for key, value in bias.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        token = int(key) if key.isascii() and key.isdigit() and len(key) < 10 else -1
        if not (is_number and -100 <= value <= 100 and 0 <= token < limits.vocab):
            text = (
                f"`logit_bias` has {key[:20]!r}: {str(value)[:20]}. Its keys must be tokens, 0 to "
                f"{limits.vocab - 1}, and its values numbers from -100 to 100."
            )
            raise Refused(400, text, "logit_bias", "invalid_value")
        read[token] = float(value)
    return read


def read_format(form: Any, limits: Limits) -> Callable[[], Any] | None:
    """Returns a function that creates the grammar of a `response_format`; None for any text."""
    if form is None or form == {"type": "text"}:
        return None
    if limits.grammars is None:
        text = (
            "Unsupported value: 'response_format' needs `llguidance`, which is not installed where "
            "this server runs; leave it out."
        )
        raise Refused(400, text, "response_format", "unsupported_value")
    try:
        return limits.grammars(form)
    except ValueError as error:
        raise Refused(400, str(error), "response_format", "invalid_value") from error


def read_stops(stop: Any) -> tuple[str, ...]:
    stops = [stop] if isinstance(stop, str) else stop or []
    if not isinstance(stops, list) or len(stops) > 4 or not all(isinstance(x, str) for x in stops):
        raise Refused(400, "`stop` must be a string or a list of at most 4 strings.", "stop")
    if any(len(x) > MOST_STOP for x in stops):
        text = f"A string of `stop` has more than {MOST_STOP} characters."
        raise Refused(400, text, "stop", "invalid_value")
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
        text = f"`{name}` is {str(value)[:40]}. It must be {bounds}."
        raise Refused(400, text, name, "invalid_value")
    return value
