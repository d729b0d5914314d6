"""Errors of OpenAI's API."""


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
