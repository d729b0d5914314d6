"""The state of a data stream as JSON."""

import base64
import copy
from typing import Any


def encode_stream_state(state: Any) -> Any:
    """Iterators give their state as plain data or as bytes."""
    if isinstance(state, bytes):
        return {"base64": base64.b64encode(state).decode()}
    return {"plain": copy.deepcopy(state)}  # some go on changing the object they gave


def decode_stream_state(encoded: dict[str, Any]) -> Any:
    """The inverse of `encode_stream_state`."""
    if "base64" in encoded:
        return base64.b64decode(encoded["base64"])
    return encoded["plain"]
