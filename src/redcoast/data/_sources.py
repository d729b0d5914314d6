"""Sources of examples: sequences, functions of the epoch, and streams."""

import base64
import collections
import contextlib
import copy
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from ..core._errors import listed, noting
from ..core._owned import copied, held_elsewhere, memory_of
from ..distributed._heartbeat import doing
from ._columns import as_columns
from ._in_turn import InTurn


def is_stream(examples: Any) -> bool:
    """Returns whether examples are an iterator with a state that can be saved, such as Grain's."""
    return all(hasattr(examples, name) for name in ("__next__", "get_state", "set_state"))


class Epochs:
    """The examples of each epoch; called with an epoch, it returns them.

    **Attributes:**

    - `length`: the number of examples in an epoch.
    """

    def __init__(self, examples: Any, length: int):
        self._examples, self.length = examples, length

    def __call__(self, epoch: int) -> Any:
        with self.using(epoch) as examples:
            return examples

    @contextlib.contextmanager
    def using(self, epoch: int) -> Iterator[Any]:
        """Gives the examples of an epoch, which do not change until the context ends."""
        yield self._examples


class _EpochsOfFunction(Epochs):
    """The examples that a function of the epoch returns.

    It may return one object for all epochs and change it, as datasets with a `set_epoch` do. So the
    function is not called while examples of another epoch are read, and called again for an epoch
    whose object it returned for another one since.
    """

    def __init__(self, make: Callable[[int], Any], name: str):
        first = make(0)
        # Those of the last two epochs are kept, because a batch may span both.
        super().__init__({0: first}, _length(first, f"{name}(0)"))
        self._make, self._name = make, name
        self._readers: collections.Counter[int] = collections.Counter()
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def using(self, epoch: int) -> Iterator[Any]:
        with self._changed:
            if epoch not in self._examples:
                self._changed.wait_for(lambda: not self._readers.total())
                if epoch not in self._examples:
                    self._load(epoch)
            examples = self._examples[epoch]
            self._readers[epoch] += 1
        try:
            yield examples
        finally:
            with self._changed:
                self._readers[epoch] -= 1
                self._changed.notify_all()

    def _load(self, epoch: int) -> None:
        found = self._make(epoch)
        if len(found) != self.length:
            raise ValueError(
                f"`{self._name}({epoch})` has {len(found)} examples, but `{self._name}(0)` has "
                f"{self.length}. Every epoch must have the same number."
            )
        others = [(e, x) for e, x in self._examples.items() if x is not found]
        self._examples = dict([*others[-1:], (epoch, found)])


def by_epoch(examples: Any, *, name: str = "examples") -> tuple[Epochs, int]:
    """Returns the examples of each epoch, and the number of examples in an epoch."""
    if isinstance(examples, Epochs):
        return examples, examples.length
    if isinstance(examples, Mapping):
        raise TypeError(
            f"`{name}` is a {type(examples).__name__}, whose items are columns. Its items must be "
            "examples, as in a list of dicts or a dataset."
        )
    if isinstance(examples, tuple):
        examples = as_columns(examples, name) or examples
    if hasattr(examples, "__len__") and hasattr(examples, "__getitem__"):
        length = _length(examples, name)
        return Epochs(examples, length), length
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
    found = _EpochsOfFunction(examples, name)
    return found, found.length


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


def fetch(examples: Any, indices: list[int], in_turn: InTurn | None = None) -> list[Any]:
    """Returns the examples with the given indices, fetched in one call if possible.

    They are copied if the dataset may write into them later. `in_turn` is that of the loop that
    reads the dataset.
    """
    note = noting(lambda _: [f"Raised by the examples with indices {listed(indices)}."])
    with note, doing("reading examples"):
        if type(examples) in _SEQUENCES or isinstance(examples, np.ndarray):
            return [examples[i] for i in indices]
        return (in_turn or InTurn())(lambda reuses: _read(examples, indices, reuses))


_SEQUENCES = (list, tuple, range)  # they call no function of the user


def _read(examples: Any, indices: list[int], reuses: bool) -> tuple[list[Any], bool]:
    """The examples, and whether they were copied because the dataset may write into them."""
    if hasattr(examples, "__getitems__"):  # faster for datasets on disk
        found = list(examples.__getitems__(indices))
        held = reuses or any(held_elsewhere(found))
        return (list(map(copied, found)) if held else found), held
    if not reuses:
        found = [examples[i] for i in indices]
        if not any(held_elsewhere(found)):
            return found, False
    # Each is copied before the next is read into the same memory.
    return [copied(examples[i]) for i in indices], True


class StreamReader:
    """Reads examples of a stream, which may give the same memory again and again.

    If an example has the memory of one that is still used, that one has been overwritten: the
    examples are read again, and each is copied before the next.

    **Arguments:**

    - `stream`: an iterator with `get_state` and `set_state`.
    - `used`: the number of calls whose examples may still be used.
    """

    def __init__(self, stream: Any, *, used: int = 0):
        self._stream, self._copies = stream, False
        self._used: collections.deque[tuple[list[Any], list[int]]] = collections.deque(maxlen=used)
        self.state = encode_stream_state(stream.get_state())  # after the last example

    def __call__(self, count: int) -> list[Any]:
        """Returns the next examples, fewer than `count` at the end of the stream."""
        found = self._read(count)
        if not self._copies:
            places = [place for x in found for place in memory_of(x)]
            # The examples are kept, so that no other has their memory by chance.
            others = [place for _, of_call in self._used for place in of_call]
            self._used.append((found, places))
            if len({*places, *others}) < len(places) + len(set(others)):
                self._used.clear()
                self._copies = True
                self._stream.set_state(decode_stream_state(self.state))
                found = self._read(count)
        self.state = encode_stream_state(self._stream.get_state())
        return found

    def _read(self, count: int) -> list[Any]:
        read = zip(range(count), self._stream, strict=False)
        return [copied(x) for _, x in read] if self._copies else [x for _, x in read]


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
