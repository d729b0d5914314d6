"""Reads and checks requests of OpenAI's API for completions and chats.

Limits are checked first: a request that is too large is rejected before it is rendered or
tokenised.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from ..core._decoding import Decoding
from ._batching import Extras
from ._grammar import Grammar
from ._openai_fields import Body, Limits, Refused, boolean, integer, is_integer, is_number, number
from ._openai_prompts import (
    Encode,
    Render,
    outside_vocabulary,
    read_messages,
    read_prompts,
    tokens_of,
)
from ._row_options import MOST_BIASES, MOST_ENDS, MOST_TOP, ends_of

# Parameters with the only supported values, and parameters that do not affect answers.
ONLY: dict[str, tuple[object, ...]] = {
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
MOST_STOP = 1000  # characters of a stop string


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
    request = parse_body(body, limits)
    refuse_unknown(request, chat=chat)
    check_model_name(request.get("model"), limits.name)
    stream, options = boolean(request, "stream"), request.get("stream_options") or {}
    if not isinstance(options, dict) or (options and not stream):
        raise Refused(400, "`stream_options` must be an object, with `stream`.", "stream_options")
    decoding = requested_decoding(request, limits)
    seed = integer(request, "seed", -(2**63), 2**63 - 1)
    stops = read_stops(request.get("stop"))
    count = integer(request, "n", 1, limits.rows) or 1
    if chat:
        param, texts = "messages", read_messages(request, limits, render)
        too_many = "n"  # there is one prompt
    else:
        param, texts = "prompt", read_prompts(request, limits)
        too_many = param
    if len(texts) * count > limits.rows:
        text = f"{len(texts)} prompts with n={count} are more than {limits.rows} at once."
        raise Refused(400, text, too_many)
    echo = not chat and boolean(request, "echo")
    extras = Extras(
        presence=number(request, "presence_penalty", -2, 2) or 0,
        frequency=number(request, "frequency_penalty", -2, 2) or 0,
        bias=read_bias(request.get("logit_bias"), limits),
        logprobs=_read_logprobs(request, chat=chat),
        grammar=read_format(request.get("response_format"), limits),
    )
    # With `echo`, a client may want the scores of its prompt alone.
    least = 1 - echo
    length = integer(request, "max_tokens", least, None)
    if chat and (newer := integer(request, "max_completion_tokens", least, None)) is not None:
        length = newer
    prompts: list[list[int]] = []
    shown: list[str | None] = []  # with `echo`, before the answers; tokens are not shown
    for prompt in texts:
        tokens = tokens_of(prompt, encode, limits, param=param, special=not chat)
        prompts += [tokens] * count
        if not isinstance(prompt, str):
            prompt = None
        shown += [prompt] * count
    new_tokens = choose_length(length, prompts, limits, chat=chat)
    if decoding.min_new_tokens > new_tokens:
        text = (
            f"`min_tokens` is {decoding.min_new_tokens}, but the answer has {new_tokens} at most."
        )
        raise Refused(400, text, "min_tokens", "invalid_value")
    if extras.grammar is not None and (echo or decoding.min_new_tokens):
        text = "`response_format` is not supported with `echo` or `min_tokens`."
        raise Refused(400, text, "response_format", "unsupported_value")
    if echo:
        extras = replace(extras, echo=tuple(shown))
    return Ask(
        prompts,
        new_tokens,
        decoding,
        seed,
        stops,
        extras,
        stream,
        boolean(options, "include_usage"),
        # A prompt counts once, whatever the number of its choices.
        prompt_tokens=sum(map(len, prompts)) // count,
    )


def parse_body(body: bytes, limits: Limits) -> Body:
    if len(body) > limits.most_bytes:
        raise Refused(413, f"The body has more than {limits.most_bytes} bytes.")
    try:
        request = json.loads(body)
        body.decode()  # `json.loads` takes UTF-16 and UTF-32, too
        if b"\\ud" in body.lower():  # perhaps an unpaired surrogate
            json.dumps(request, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise Refused(400, f"The body is not valid JSON in UTF-8: {error}.") from error
    if not isinstance(request, dict):
        raise Refused(400, "The body must be a JSON object.")
    return request


def refuse_unknown(request: Body, *, chat: bool) -> None:
    own = OF_COMPLETIONS
    if chat:
        own = OF_CHATS
    known = {*READ, *own, *ONLY, *IGNORED}
    for name, value in request.items():
        if name not in known:
            raise Refused(400, f"Unknown parameter: '{name}'.", name, "unknown_parameter")
        # In Python, `True == 1`.
        served = [(isinstance(other, bool), other) for other in ONLY.get(name, (value,))]
        if (isinstance(value, bool), value) not in served:
            text = f"Unsupported value: '{name}' is not implemented by this server; leave it out."
            raise Refused(400, text, name, "unsupported_value")


def check_model_name(model: object, name: str) -> None:
    if not isinstance(model, str):
        raise Refused(400, "You must provide a model parameter, a string.", "model")
    if model != name:
        text = f"The model '{model[:200]}' does not exist. This server has '{name}'."
        raise Refused(404, text, "model", "model_not_found")


def choose_length(
    limit: int | None, prompts: list[list[int]], limits: Limits, *, chat: bool
) -> int:
    """Returns the maximum number of new tokens; by default, in a chat, as many as the context
    allows."""
    longest = max(map(len, prompts))
    room = limits.context - longest
    least = 1
    if limit is not None:
        least = limit
    if room < least or room < 0:
        text = (
            f"This server's maximum context length is {limits.context} tokens. The prompt has "
            f"{longest}, and {least} were requested for the answer."
        )
        param = "prompt"
        if chat:
            param = "messages"
        raise Refused(400, text, param, "context_length_exceeded")
    if limit is not None:
        return limit
    default = 16  # of completions, as in OpenAI's API
    if chat:
        default = limits.new_tokens
    return min(room, default)


def requested_decoding(request: Body, limits: Limits) -> Decoding:
    """Returns the model's default decoding, with the options of the request."""
    default = limits.decoding
    options = {
        "temperature": number(request, "temperature", 0, 2),
        "top_p": number(request, "top_p", 0, 1),
        "min_p": number(request, "min_p", 0, 1),
        "repetition_penalty": number(request, "repetition_penalty", 0, 10),
        "top_k": integer(request, "top_k", -1, None),
        "min_new_tokens": integer(request, "min_tokens", 0, limits.context),
    }
    changes: Body = {name: value for name, value in options.items() if value is not None}
    # What excludes nothing: -1 or 0 for `top_k`, as elsewhere.
    for name in ("top_k", "min_p"):
        if changes.get(name, 1) <= 0:
            changes[name] = None
    if changes.get("top_p") == 0:  # the best token
        changes["temperature"] = 0
    # Division of the logits by less would overflow.
    if changes.get("temperature", default.temperature) < 1e-4:
        default = default.without_sampling()
        of_greedy = ("repetition_penalty", "min_new_tokens")
        changes = {name: changes[name] for name in of_greedy if name in changes}
    try:
        return replace(default, **changes, eos=read_ends(request, limits))
    except ValueError as error:
        raise Refused(400, str(error)) from error


def read_ends(request: Body, limits: Limits) -> tuple[int, ...]:
    """Returns the tokens that end an answer."""
    ids = request.get("stop_token_ids") or []
    if not (isinstance(ids, list) and all(map(is_integer, ids))):
        text = "`stop_token_ids` must be a list of tokens."
        raise Refused(400, text, "stop_token_ids", "invalid_type")
    if outside := outside_vocabulary(ids, limits):
        text = f"`stop_token_ids` has {outside[0]}. The tokens of this model are 0 to "
        raise Refused(400, f"{text}{limits.vocab - 1}.", "stop_token_ids", "invalid_value")
    own = ()
    if not boolean(request, "ignore_eos"):
        own = ends_of(limits.decoding, limits)
    ends = tuple(dict.fromkeys((*own, *ids)))  # each once
    if len(ends) > MOST_ENDS:
        text = f"`stop_token_ids` and the model's end tokens are more than {MOST_ENDS}."
        raise Refused(400, text, "stop_token_ids", "invalid_value")
    return ends


def _read_logprobs(request: Body, *, chat: bool) -> int | None:
    """The number of alternatives to each token; None without log-probabilities."""
    if not chat:
        if request.get("logprobs") is False:
            return None
        return integer(request, "logprobs", 0, MOST_TOP)
    # In chats, two parameters say it.
    is_wanted = boolean(request, "logprobs")
    count = integer(request, "top_logprobs", 0, MOST_TOP) or 0
    if is_wanted:
        return count
    if count:
        text = "`top_logprobs` needs `logprobs` to be true."
        raise Refused(400, text, "top_logprobs", "invalid_value")
    return None


def read_bias(bias: object, limits: Limits) -> dict[int, float]:
    """Reads `logit_bias`, whose keys are token ids as strings."""
    bias = bias or {}
    if not isinstance(bias, dict) or len(bias) > MOST_BIASES:
        text = f"`logit_bias` must be an object of at most {MOST_BIASES} tokens."
        raise Refused(400, text, "logit_bias", "invalid_type")
    biases: dict[int, float] = {}
    for key, value in bias.items():
        # `isdigit` is true of other scripts' digits, and long numbers take long to convert.
        is_token = key.isascii() and key.isdigit() and len(key) < 10 and int(key) < limits.vocab
        if not (is_token and is_number(value) and -100 <= value <= 100):
            text = (
                f"`logit_bias` has {key[:20]!r}: {str(value)[:20]}. Its keys must be tokens, 0 to "
                f"{limits.vocab - 1}, and its values numbers from -100 to 100."
            )
            raise Refused(400, text, "logit_bias", "invalid_value")
        biases[int(key)] = float(value)
    return biases


def read_format(form: Any, limits: Limits) -> Callable[[], Grammar] | None:
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


def read_stops(stop: object) -> tuple[str, ...]:
    stops = stop or []
    if isinstance(stop, str):
        stops = [stop]
    if not isinstance(stops, list) or len(stops) > 4 or not all(isinstance(x, str) for x in stops):
        raise Refused(400, "`stop` must be a string or a list of at most 4 strings.", "stop")
    if any(len(x) > MOST_STOP for x in stops):
        text = f"A string of `stop` has more than {MOST_STOP} characters."
        raise Refused(400, text, "stop", "invalid_value")
    return tuple(filter(None, stops))
