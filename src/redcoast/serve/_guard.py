"""Checks the key and the host name of requests."""

import hmac
import ipaddress
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from starlette.responses import JSONResponse

from ._openai_fields import Refused, error_body

OPEN_PATHS = ("/health",)  # for load balancers, which send no key
Application = Callable[[Any, Any, Any], Awaitable[None]]


def guard(app: Application, *, key: str | None, host: str | None) -> Application:
    """Rejects requests without the key, if there is one, and requests for other host names, if the
    server only listens on this machine.

    A web page may have a host name that resolves to this machine (DNS rebinding). Its requests
    contain that host name.
    """
    local = host is not None and is_this_machine(host)

    async def guarded(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            # In ASGI, pairs of bytes.
            headers = {name.lower(): value for name, value in scope["headers"]}
            try:
                if local:
                    check_host(headers)
                if key is not None and scope["path"] not in OPEN_PATHS:
                    check_api_key(headers, key)
            except Refused as error:
                status, body = error_body(error)
                more = None
                if status == 401:
                    more = {"WWW-Authenticate": "Bearer"}
                await JSONResponse(body, status, more)(scope, receive, send)
                return
        await app(scope, receive, send)

    return guarded


def is_this_machine(host: str) -> bool:
    """Whether an address or a host name can only be reached from this machine."""
    if host.lower().rstrip(".") == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def check_host(headers: Mapping[bytes, bytes]) -> None:
    text = headers.get(b"host", b"").decode("latin-1")
    end = ":"  # of the name: the port follows
    if text.startswith("["):
        end = "]"  # an IPv6 address has colons itself
    name = text.partition(end)[0]
    if not is_this_machine(name):
        raise Refused(
            403,
            f"This server only answers requests for localhost, not for {text[:100]!r}. To "
            "serve other machines, start it with `--host 0.0.0.0` and an `--api-key`.",
            code="invalid_host",
        )


def check_api_key(headers: Mapping[bytes, bytes], key: str) -> None:
    scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
    # The comparison takes the same time wherever the keys differ.
    same = hmac.compare_digest(token.strip(), key.encode())
    if scheme.lower() != b"bearer" or not same:
        text = "Incorrect API key provided: send the key of `--api-key` as a bearer token."
        raise Refused(401, text, code="invalid_api_key")
