"""Renders a chat template in a separate process with limited memory.

It is started by `_chat_template.py` as a script, and imports only Jinja and the standard library.
Messages are lines of JSON.
"""

import contextlib
import datetime
import json
import os
import resource
import sys
from collections.abc import Callable
from typing import NoReturn

from jinja2 import Template, nodes
from jinja2.exceptions import TemplateError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

# Marks around the assistant's words in a rendered text. No other text contains them.
OPEN, CLOSE = "\ufdd0", "\ufdd1"


class Generation(Extension):
    """`{% generation %}`, which marks the assistant's words in some templates: as plain text, or
    between `OPEN` and `CLOSE` if the template is rendered with `mark_answers`."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("mark", [nodes.ContextReference()])
        return nodes.CallBlock(call, [], [], body).set_lineno(line)

    def mark(self, context: Context, caller: Callable[[], str]) -> str:
        if context.get("mark_answers"):
            return f"{OPEN}{caller()}{CLOSE}"
        return caller()


def compile_template(template: str) -> Template:
    """Compiles a template as `transformers` does."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", Generation]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _refuse, "strftime_now": _now}
    return environment.from_string(template)


def _to_json(
    value: object, ensure_ascii: bool = False, indent: int | None = None, **options
) -> str:
    # Jinja's own filter escapes HTML characters.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


def _now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def serve_template(memory: int, characters: int) -> None:
    """Compiles the template in the first message, and renders it with the variables in the others.
    Each is answered with a text or an error."""
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    with contextlib.suppress(ValueError, OSError):  # macOS has no such limit
        most = memory
        if hard != resource.RLIM_INFINITY:
            most = min(memory, hard)
        resource.setrlimit(resource.RLIMIT_AS, (most, hard))
    incoming, outgoing = sys.stdin.buffer, sys.stdout.buffer
    compiled = None
    while line := incoming.readline():
        try:
            variables = json.loads(line)
            if compiled is None:
                compiled, text = compile_template(variables["template"]), ""
            else:
                text = compiled.render(**variables)
            if len(text) > characters:
                raise ValueError(f"the text has more than {characters} characters")
            text.encode()  # raises on unpaired surrogates
            answer = {"text": text}
        except MemoryError:
            answer = {"error": f"it takes more than {memory >> 20} MiB of memory"}
        except RecursionError:
            answer = {"error": "it is nested too deeply"}
        except Exception as error:
            answer = {"error": f"{error or type(error).__name__}"[:500]}
        outgoing.write(json.dumps(answer).encode() + b"\n")
        outgoing.flush()


if __name__ == "__main__":
    serve_template(*map(int, sys.argv[1:]))
    os._exit(0)
