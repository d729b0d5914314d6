"""The fields of a request's body, their types and bounds; and the errors of OpenAI's API."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..core._decoding import Decoding
from ..core._read_json import JSONObject
from ._grammar import Grammar


class Refused(Exception):
    """An error that is returned to the client, with the status of the response."""

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None
    ):
        super().__init__(message)
        self.status, self.param, self.code = status, param, code


def error_body(error: Exception) -> tuple[int, dict[str, dict[str, str | None]]]:
    """Returns the status and the body of a response for an error."""
    if not isinstance(error, Refused):
        message = f"The server could not answer: {type(error).__name__}: {error}"
        error = Refused(500, message, code="internal_error")
    kinds = {429: "rate_limit_error", 500: "server_error", 503: "server_error"}
    kind = kinds.get(error.status, "invalid_request_error")
    body = {"message": str(error), "type": kind, "param": error.param, "code": error.code}
    return error.status, {"error": body}


Body = JSONObject


def boolean(request: Body, name: str) -> bool:
    value = request.get(name)
    if not (value is None or isinstance(value, bool)):
        raise Refused(400, f"`{name}` must be a boolean.", name, "invalid_type")
    return bool(value)


def integer(request: Body, name: str, least: int, most: int | None) -> int | None:
    return _bounded(request, name, least, most, is_integer, "an integer")


def number(request: Body, name: str, least: int, most: int) -> int | float | None:
    return _bounded(request, name, least, most, is_number, "a number")


def _bounded(
    request: Body,
    name: str,
    least: int,
    most: int | None,
    has_type: Callable[[object], bool],
    type_name: str,
) -> Any:
    value = request.get(name)
    if value is None:
        return None
    if not has_type(value):
        raise Refused(400, f"`{name}` must be {type_name}.", name, "invalid_type")
    # The comparisons are false for NaN.
    if value >= least and (most is None or value <= most):
        return value
    bounds = f"at least {least}"
    if most is not None:
        bounds += f" and at most {most}"
    text = f"`{name}` is {str(value)[:40]}. It must be {bounds}."
    raise Refused(400, text, name, "invalid_value")


def is_integer(value: object) -> bool:
    # In Python, `True` is an integer.
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


@dataclass(frozen=True)
class Limits:
    """The limits of requests.

    - `context`: the maximum number of tokens of a prompt and its answer; `characters`: the maximum
        number of characters of a prompt.
    - `new_tokens`: the default number of tokens of an answer in a chat; `decoding`: the default
        decoding.
    - `grammars`: creates the grammar of a `response_format`; None if not supported.
    """

    name: str  # of its model
    vocab: int  # the size of the model's vocabulary
    context: int
    rows: int  # the maximum number of rows of a request
    new_tokens: int
    decoding: Decoding
    characters: int = 2**18
    eos: tuple[int, ...] = ()  # the tokens that end an answer
    grammars: Callable[[Mapping[str, object]], Callable[[], Grammar] | None] | None = None

    @property
    def most_bytes(self) -> int:
        """The maximum size of the body of a request, in bytes."""
        return 2**20 + 16 * self.rows * self.context
