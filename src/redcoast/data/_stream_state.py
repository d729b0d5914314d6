"""States of streams as JSON, and checksums by which examples are recognised."""

import base64
import copy
import itertools
import json
import sys
import zlib
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from ..core._read_json import JSONObject


def encode_stream_state(state: PyTree) -> JSONObject:
    """Encodes the state of an iterator for JSON.

    A state can be saved if it is plain data, bytes, or a tree of these and of arrays, such as
    PyTorch's tensors. Any other state is only copied.
    """
    encoded = encode_if_storable(state)
    if encoded is None:
        return {"plain": copy.deepcopy(state)}
    return encoded


def encode_if_storable(state: PyTree) -> JSONObject | None:
    """Encodes a state for JSON; returns `None` if it cannot be."""
    if isinstance(state, bytes):
        return {"base64": base64.b64encode(state).decode()}
    try:
        if json.loads(json.dumps(state)) == state:
            return {"plain": copy.deepcopy(state)}  # some iterators modify it later
    except (TypeError, ValueError):
        pass  # arrays are no JSON
    try:
        return {"tree": _encode(state)}
    except TypeError:
        return None


def decode_stream_state(encoded: JSONObject) -> PyTree:
    """Inverts `encode_stream_state`."""
    if "base64" in encoded:
        return base64.b64decode(encoded["base64"])
    if "tree" in encoded:
        return _decode(encoded["tree"])
    return copy.deepcopy(encoded["plain"])


def _encode(x: PyTree) -> JSONObject:
    if x is None or isinstance(x, bool | int | float | str):
        return {"value": x}
    if isinstance(x, bytes):
        return {"bytes": base64.b64encode(x).decode()}
    if isinstance(x, dict):
        # In JSON, the keys of objects are strings.
        return {"dict": [[_encode(key), _encode(value)] for key, value in x.items()]}
    if isinstance(x, list | tuple):
        kind = "tuple"
        if isinstance(x, list):
            kind = "list"
        return {kind: [_encode(value) for value in x]}
    if not hasattr(x, "__array__") or not hasattr(x, "shape"):
        raise TypeError(f"A state with {type(x).__name__} cannot be stored as JSON.")
    array = np.asarray(x)
    return {
        "array": base64.b64encode(array.tobytes()).decode(),
        "dtype": array.dtype.str,  # with the order of its bytes, as `<f4`
        "shape": list(array.shape),
        "library": type(x).__module__.partition(".")[0],
    }


def _decode(x: JSONObject) -> PyTree:
    if "value" in x:
        return x["value"]
    if "bytes" in x:
        return base64.b64decode(x["bytes"])
    if "dict" in x:
        return {_decode(key): _decode(value) for key, value in x["dict"]}
    if "list" in x:
        return [_decode(value) for value in x["list"]]
    if "tuple" in x:
        return tuple(_decode(value) for value in x["tuple"])
    array = np.frombuffer(base64.b64decode(x["array"]), np.dtype(x["dtype"])).reshape(x["shape"])
    # The library that the state belongs to has been imported; a file never causes an import.
    library = sys.modules.get(x["library"], np)
    return library.asarray(array.copy())


def example_checksum(example: PyTree) -> int:
    """A checksum of the arrays, numbers and strings of an example."""
    return zlib.crc32(b"".join(_bytes_of(example)))


def _bytes_of(x: PyTree) -> list[bytes]:
    if x is None or isinstance(x, bool | int | float | str):
        # Text from file names may have letters that are no valid UTF-8.
        return [repr(x).encode(errors="surrogatepass")]
    if isinstance(x, bytes):
        return [x]
    if isinstance(x, Mapping):
        parts: list[bytes] = []
        for key, value in x.items():
            parts += _bytes_of(key)
            parts += _bytes_of(value)
        return parts
    if isinstance(x, list | tuple):
        return list(itertools.chain.from_iterable(map(_bytes_of, x)))
    if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    if hasattr(x, "__array__"):
        array = np.asarray(x)
        if array.dtype != object:
            return [str((array.dtype, array.shape)).encode(), array.tobytes()]
    return [type(x).__name__.encode()]  # such as an image, whose contents are not compared
