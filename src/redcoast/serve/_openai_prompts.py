"""The prompts of a request: messages of a chat, or texts and tokens to complete."""

import contextlib
import json
from collections.abc import Callable

from ._openai_fields import Body, Limits, Refused, is_integer

Encode = Callable[..., list[int]]
Render = Callable[..., str]

ROLES = ("system", "developer", "user", "assistant", "tool")
# Other keys of a message, which templates may show.
OF_MESSAGES = ("name", "tool_call_id", "tool_calls", "reasoning_content")


def read_messages(request: Body, limits: Limits, render: Render | None) -> list[str]:
    """Returns the prompt of a chat."""
    messages = request.get("messages")
    if render is None:
        text = "This model has no chat template. Use /v1/completions."
        raise Refused(400, text, "messages", "unsupported_value")
    if not (isinstance(messages, list) and messages):
        raise Refused(400, "`messages` must be a list with at least one message.", "messages")
    if len(messages) > limits.context:  # each has a token at least
        raise Refused(400, f"`messages` has more than {limits.context} messages.", "messages")
    chat: list[Body] = []
    characters = 0
    for i, message in enumerate(messages):
        checked = read_message(message, f"messages[{i}]")
        characters += len(checked["content"])
        chat.append(checked)
    check_characters(characters, limits, "messages")
    options = request.get("chat_template_kwargs") or {}
    own = ("messages", "tools", "chat_template", "tokenize")
    if not isinstance(options, dict) or any(name in own for name in options):
        text = f"`chat_template_kwargs` must be an object without {', '.join(own)}."
        raise Refused(400, text, "chat_template_kwargs")
    # The prompt ends with the beginning of an answer, unless the client says otherwise.
    options = {"add_generation_prompt": True} | options
    if request.get("tool_choice") != "none" and (tools := read_tools(request.get("tools"))):
        options["tools"] = tools
    try:
        return [render(chat, **options)]
    except ValueError as error:  # a template may reject, or fail on, any order of roles
        text = f"The model's chat template rejects these messages: {error}."
        raise Refused(400, text, "messages") from error


def read_tools(tools: object) -> list[Body] | None:
    # `null` and an empty list both mean that there are none.
    tools = tools or []
    if not (isinstance(tools, list) and all(map(_is_tool, tools))):
        text = "`tools` must be a list of objects of type 'function', with a `function` and a name."
        raise Refused(400, text, "tools")
    return tools or None


def _is_tool(value: object) -> bool:
    # {"type": "function", "function": {"name": "...", "parameters": {...}}}
    if not isinstance(value, dict) or value.get("type") != "function":
        return False
    function = value.get("function")
    return isinstance(function, dict) and isinstance(function.get("name"), str)


def read_message(message: object, where: str) -> Body:
    if not isinstance(message, dict) or message.get("role") not in ROLES:
        text = f"'{where}' must be an object with a role that is one of {', '.join(ROLES)}."
        raise Refused(400, text, f"{where}.role")
    if message.get("function_call") or message.get("audio"):
        text = f"'{where}' has a `function_call` or `audio`, which are not supported."
        raise Refused(400, text, where)
    role, content = message["role"], message.get("content")
    if content is None and role == "assistant":  # an answer that is calls of tools alone
        content = ""
    if role == "developer":  # the name of the system in newer versions of the API
        role = "system"
    checked: Body = {"role": role, "content": read_content(content, f"{where}.content")}
    for name in OF_MESSAGES:
        if message.get(name) is not None:
            checked[name] = message[name]
    if calls := checked.get("tool_calls"):
        checked["tool_calls"] = read_calls(calls, f"{where}.tool_calls")
    return checked


def read_calls(calls: object, where: str) -> list[Body]:
    """Returns tool calls with objects as arguments, as templates expect."""
    error = f"'{where}' must be a list of functions with names and JSON objects as arguments."
    if not isinstance(calls, list):
        raise Refused(400, error, where)
    checked: list[Body] = []
    for call in calls:
        function = None
        if isinstance(call, dict):
            function = call.get("function")
        if not isinstance(function, dict):
            raise Refused(400, error, where)
        # {"function": {"name": "...", "arguments": "{...}"}}
        arguments = function.get("arguments") or "{}"
        if isinstance(arguments, str):
            with contextlib.suppress(ValueError, RecursionError):  # remains text, and is refused
                arguments = json.loads(arguments)
        if not isinstance(arguments, dict) or not isinstance(function.get("name"), str):
            raise Refused(400, error, where)
        checked.append(call | {"function": function | {"arguments": arguments}})
    return checked


def read_content(content: object, where: str) -> str:
    """Returns a content, which is a text or a list of parts of one."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise Refused(400, _NO_TEXT.format(where), where)
    texts: list[str] = []
    for part in content:
        text = None
        if isinstance(part, dict):
            # {"type": "text", "text": "..."}
            text = part.get("text")
        if not isinstance(text, str) or part.get("type") != "text":
            raise Refused(400, _NO_TEXT.format(where), where)
        texts.append(text)
    return "".join(texts)


_NO_TEXT = "'{}' must be a string, or a list of parts of text."


def read_prompts(request: Body, limits: Limits) -> list[str | list[int]]:
    """Returns one or several prompts, which are strings or tokens."""
    prompt = request.get("prompt")
    # A single prompt is a text or a list of tokens.
    if isinstance(prompt, str) or (isinstance(prompt, list) and prompt and is_integer(prompt[0])):
        prompt = [prompt]
    if not (isinstance(prompt, list) and prompt):
        raise Refused(400, "`prompt` must be a string, a list of strings, or tokens.", "prompt")
    # All prompts of a request are rows of one batch.
    if len(prompt) > limits.rows:
        text = f"{len(prompt)} prompts are more than {limits.rows} at once."
        raise Refused(400, text, "prompt")
    for part in prompt:
        if isinstance(part, str):
            check_characters(len(part), limits, "prompt")
        elif not (isinstance(part, list) and all(map(is_integer, part))):
            raise Refused(400, _NO_PROMPT, "prompt")
    return prompt


_NO_PROMPT = "A prompt must be a string or a list of tokens, with at least one token."


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
        tokens = encode(prompt, special=special)
    else:
        tokens = prompt
    if not tokens:
        raise Refused(400, _NO_PROMPT, param)
    if outside := outside_vocabulary(tokens, limits):
        text = f"The prompt has the token {outside[0]}, but the tokens of this model are "
        raise Refused(400, f"{text}0 to {limits.vocab - 1}.", param)
    return tokens


def outside_vocabulary(tokens: list[int], limits: Limits) -> list[int]:
    # Indexing in JAX raises no error for them.
    return [token for token in tokens if not 0 <= token < limits.vocab]
