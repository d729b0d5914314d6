"""Sources of examples: sequences, functions of the epoch, and streams."""

import base64
import copy
import functools as ft
from collections.abc import Callable, Mapping
from typing import Any

from ..core._errors import listed, noting
from ..distributed._heartbeat import doing


def is_stream(examples: Any) -> bool:
    """Returns whether examples are an iterator with a state that can be saved, such as Grain's."""
    return all(hasattr(examples, name) for name in ("__next__", "get_state", "set_state"))


def by_epoch(examples: Any, *, name: str = "examples") -> tuple[Callable[[int], Any], int]:
    """Returns a function from the epoch to its examples, and the number of examples in an epoch."""
    if isinstance(examples, Mapping):
        raise TypeError(
            f"`{name}` is a {type(examples).__name__}, whose items are columns. Its items must be "
            "examples, as in a list of dicts or a dataset."
        )
    if isinstance(examples, tuple) and _are_columns(examples):
        raise TypeError(
            f"`{name}` is a tuple of {len(examples)} arrays with {len(examples[0])} rows each, "
            f"which are columns. Its items must be examples, as in `list(zip(*{name}))`."
        )
    if hasattr(examples, "__len__") and hasattr(examples, "__getitem__"):
        return lambda epoch: examples, _length(examples, name)
    if is_stream(examples):
        raise TypeError(
            f"`{name}` is of type {type(examples).__name__}, a stream, which has no number of "
            f"examples. Pass an object with a length and an index, such as "
            f"`list(itertools.islice({name}, n))`."
        )
    if not callable(examples):
        raise TypeError(
            f"`{name}` is of type {type(examples).__name__}. It must have a length and an index "
            "(a list, an array, a dataset), be a function from the epoch to such an object, or be "
            "an iterator with `get_state` and `set_state`, such as Grain's."
            + _alternative(examples, name)
        )
    make: Callable[[int], Any] = examples
    length = _length(make(0), f"{name}(0)")

    @ft.lru_cache(maxsize=2)  # a batch may span two epochs
    def of_epoch(epoch: int) -> Any:
        found = make(epoch)
        if len(found) != length:
            raise ValueError(
                f"`{name}({epoch})` has {len(found)} examples, but `{name}(0)` has {length}. "
                "Every epoch must have the same number."
            )
        return found

    return of_epoch, length


def _are_columns(examples: tuple[Any, ...]) -> bool:
    """Whether a tuple holds arrays of as many rows, but different shapes, such as `(x, y)`."""
    shapes = {getattr(x, "shape", None) for x in examples}
    rows = {shape[0] if shape else 0 for shape in shapes}
    return len(shapes) > 1 and len(rows) == 1 and rows != {0}


def _alternative(examples: Any, name: str) -> str:
    if hasattr(examples, "dataset"):  # a loader of batches, such as PyTorch's
        return f" Pass the `dataset` of the {type(examples).__name__}."
    if hasattr(examples, "__iter__"):
        return f" `list({name})` has both, if it fits in memory."
    return ""


def count_examples(examples: Any, name: str = "examples") -> int | None:
    """Returns the number of examples in an epoch; `None` for a stream or without examples."""
    return None if examples is None or is_stream(examples) else by_epoch(examples, name=name)[1]


def _length(examples: Any, name: str) -> int:
    if len(examples) == 0:
        raise ValueError(f"`{name}` is empty. Pass at least one example.")
    return len(examples)


def fetch(examples: Any, indices: list[int]) -> list[Any]:
    """Returns the examples with the given indices, fetched in one call if possible."""
    note = noting(lambda _: [f"Raised by the examples with indices {listed(indices)}."])
    with note, doing("reading examples"):
        if hasattr(examples, "__getitems__"):  # faster for datasets on disk
            return list(examples.__getitems__(indices))
        return [examples[i] for i in indices]


def encode_stream_state(state: Any) -> Any:
    """Encodes the state of an iterator, which is plain data or bytes, for JSON."""
    if isinstance(state, bytes):
        return {"base64": base64.b64encode(state).decode()}
    return {"plain": copy.deepcopy(state)}  # some iterators modify it later


def decode_stream_state(encoded: dict[str, Any]) -> Any:
    """Inverts `encode_stream_state`."""
    if "base64" in encoded:
        return base64.b64decode(encoded["base64"])
    return copy.deepcopy(encoded["plain"])
