"""The chat template of a published model, rendered as `transformers` renders it."""

import datetime
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import nodes
from jinja2.exceptions import TemplateError
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

_SPECIAL = "special_tokens_map.json"
# Around the assistant's words, in a text that is rendered with marks. No text has these.
OPEN, CLOSE = "\ufdd0", "\ufdd1"


class Generation(Extension):
    """`{% generation %}`, which marks the assistant's words in some templates: as plain text, or
    between `OPEN` and `CLOSE` if the template is rendered with `mark_answers`."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("mark", [nodes.ContextReference()])
        return nodes.CallBlock(call, [], [], body).set_lineno(line)

    def mark(self, context: Any, caller: Callable[[], str]) -> str:
        return f"{OPEN}{caller()}{CLOSE}" if context.get("mark_answers") else caller()


def read_template(directory: Path) -> tuple[str | None, dict[str, Any]]:
    """Returns the chat template in a directory, if there is one, and the tokenizer's settings."""
    settings, more = (_read(directory / name) for name in ("tokenizer_config.json", _SPECIAL))
    # Tokens that only the second file has.
    settings |= {name: token for name, token in more.items() if settings.get(name) is None}
    if (directory / "chat_template.jinja").exists():
        return (directory / "chat_template.jinja").read_text("utf-8"), settings
    found = settings.get("chat_template")
    if isinstance(found, list):  # several, with names
        found = {entry["name"]: entry["template"] for entry in found}.get("default")
    return found, settings


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text("utf-8")) if path.exists() else {}


def renderer(template: str, settings: dict[str, Any]) -> Callable[..., str]:
    """Returns a template as a function from messages to text."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", Generation]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _refuse, "strftime_now": _now}
    compiled = environment.from_string(template)
    names = [name for name in settings if name.endswith("_token")]
    special = {"bos_token": "", "eos_token": ""} | {key: _text(settings[key]) for key in names}
    return lambda messages, **options: compiled.render(messages=messages, **special, **options)


def _text(token: Any) -> Any:
    return token["content"] if isinstance(token, dict) else token or ""


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None) -> str:
    # Jinja's own filter escapes the signs of HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


def _now(form: str) -> str:
    return datetime.datetime.now().strftime(form)
