"""The chat template of a model, rendered as `transformers` renders it.

A template is a program that is distributed with the weights. It is rendered in a separate process
with limited memory, which is terminated if it takes too long.
"""

import contextlib
import json
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path

from ...core._packages import require_package
from ...core._read_json import read_json
from .._files import file_inside, read_bounded
from .._settings import Settings

SECONDS = 5.0  # the limit for a rendering
STARTING = 60.0  # seconds for the process to start
MEMORY = 2**29  # bytes of the process
CHARACTERS = 2**24  # of a rendered text
MOST_BYTES = 2**20  # of a template
OPEN, CLOSE = "\ufdd0", "\ufdd1"  # as in `_template_worker.py`
_SPECIAL = "special_tokens_map.json"
_WORKER = Path(__file__).with_name("_template_worker.py")


def read_template(directory: Path) -> tuple[str | None, Settings]:
    """Returns the chat template in a directory, if there is one, and the tokenizer's settings.

    Raises `ValueError` that names the file if it is outside the directory, is too large, or has
    another format.
    """
    settings, more = _settings(directory, "tokenizer_config.json"), _settings(directory, _SPECIAL)
    # Tokens that only the second file contains.
    settings |= {name: token for name, token in more.items() if settings.get(name) is None}
    if (directory / "chat_template.jinja").exists():
        path = file_inside(directory, "chat_template.jinja")
        try:
            return read_bounded(path, MOST_BYTES).decode(), settings
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is not text in UTF-8: {error}.") from error
    return named_template(settings.get("chat_template"), directory), settings


def _settings(directory: Path, name: str) -> Settings:
    if (directory / name).exists():
        return read_json(file_inside(directory, name))
    return {}


def named_template(template: object, path: Path) -> str | None:
    """Returns the template in the settings, or the one named `default` if there are several."""
    if isinstance(template, list):
        named: Settings = {}
        for x in template:
            if not isinstance(x, dict) or not isinstance(x.get("name"), str):
                raise ValueError(f"{path} has a `chat_template` without a name in its list.")
            named[x["name"]] = x.get("template")
        # Others are for tools or documents, and a caller would have to ask for them by name.
        template = named.get("default")
    if not (template is None or isinstance(template, str)):
        raise ValueError(
            f"{path} has a `chat_template` of type {type(template).__name__}. It must be a string, "
            "or a list of templates with names."
        )
    return template


def special_tokens(settings: Settings, path: Path) -> dict[str, str]:
    """The texts of the special tokens in a tokenizer's settings, by name."""
    special = {"bos_token": "", "eos_token": ""}
    for name, token in settings.items():
        if name.endswith("_token") and not isinstance(token, bool):  # not `add_bos_token`
            text = token or ""
            if isinstance(token, dict):
                text = token.get("content")
            if not isinstance(text, str):
                raise ValueError(
                    f"{path} has the `{name}` {str(token)[:60]}. It must be a string, or an object "
                    "with a string as its `content`."
                )
            special[name] = text
    return special


def renderer(
    template: str, settings: Settings, path: Path = Path("The model")
) -> Callable[..., str]:
    """Returns a template as a function from messages to text, with variables by name.

    Raises `ValueError` if the template cannot be compiled. The function raises it if the template
    rejects the messages, or needs too much memory or time.
    """
    if len(template) > MOST_BYTES:
        raise ValueError(f"{path} has a chat template of more than {MOST_BYTES} characters.")
    require_package("jinja2", f"The chat template of {path}")
    process = TemplateProcess(template)
    special = special_tokens(settings, path)
    try:
        process.start()
    except ValueError as error:
        raise ValueError(f"{path} has a chat template that cannot be used: {error}.") from error

    def render(messages: object, **variables: object) -> str:
        return process.render(special | variables | {"messages": messages})

    return render


class TemplateProcess:
    """A template in a separate process, which is restarted after it was terminated."""

    def __init__(self, template: str):
        self.template = template
        # One message at a time: answers come in the order of the questions.
        self.lock = threading.Lock()
        self.process: subprocess.Popen[bytes] | None = None
        self.end = lambda: None

    def start(self) -> None:
        """Starts the process, and compiles the template in it."""
        with self.lock:
            self._start()

    def render(self, variables: Settings) -> str:
        with self.lock:
            if self.process is None or self.process.poll() is not None:
                self._start()
            return self._ask(variables, SECONDS)

    def _start(self) -> None:
        self.end()
        # Without the script's directory on the path, because its modules are not meant for this
        # process.
        command = [sys.executable, "-P", str(_WORKER), str(MEMORY), str(CHARACTERS)]
        pipe = subprocess.PIPE
        process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL)
        self.process = process
        # Also ends the process when this object is collected, or Python exits.
        self.end = weakref.finalize(self, _end, process)
        self._ask({"template": self.template}, STARTING)

    def _ask(self, variables: Settings, seconds: int | float) -> str:
        """Sends a message, and returns the text of the answer."""
        process = self.process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        deadline = time.monotonic() + seconds
        # Ends the process, and thus the line that is read.
        timer = threading.Timer(seconds, process.kill)
        timer.start()
        try:
            # The process reads a whole line before it does anything else.
            process.stdin.write(json.dumps(variables).encode() + b"\n")
            process.stdin.flush()
            answer = json.loads(process.stdout.readline())
        except (OSError, ValueError):
            reason = "its process ended, perhaps because it takes too much memory"
            if time.monotonic() >= deadline:
                reason = f"it takes more than {seconds:g} seconds"
            self.end()
            raise ValueError(reason) from None
        finally:
            timer.cancel()
        if "error" in answer:
            raise ValueError(answer["error"].rstrip("."))
        return answer["text"]


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    for pipe in (process.stdin, process.stdout):
        with contextlib.suppress(OSError):
            pipe.close()  # pyright: ignore[reportOptionalMemberAccess]
    process.wait()
