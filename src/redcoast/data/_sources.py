"""Sources of examples: sequences, functions of the epoch, and streams."""

import collections
import contextlib
import inspect
import itertools
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol, TypeGuard, runtime_checkable

import jax
import numpy as np
from jaxtyping import PyTree

from ..core._donation import refuse_deleted_argument
from ..core._errors import listed, noting, short_repr
from ..core._owned import copied, have_places, held_elsewhere, memory_of
from ..distributed._heartbeat import doing
from ._columns import as_columns, is_table, refuse_arrow_column, rows_of_array, rows_of_table
from ._in_turn import InTurn, threads_at_work
from ._stack import Examples
from ._stream_state import decode_stream_state, encode_stream_state
from ._streams import (
    IteratorWithoutState,
    IteratorWithState,
    RepeatedStream,
    Stream,
    is_iterator,
    state_methods,
)
from ._token_windows import TokenWindows


@runtime_checkable
class Indexed(Protocol):
    """Examples with a length and an index: a list, an array, a dataset."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> PyTree: ...


class Epochs:
    """The examples of each epoch; called with an epoch, it returns them.

    - `length`: the number of examples in an epoch.
    """

    def __init__(self, examples: Indexed, length: int):
        self._examples, self.length = examples, length

    def __call__(self, epoch: int) -> Indexed:
        with self.using(epoch) as examples:
            return examples

    def count_now(self) -> int:
        """The number of examples, which the user may have changed since."""
        return len(self._examples)

    def using(self, epoch: int) -> AbstractContextManager[Indexed]:
        """Returns the examples of an epoch, which do not change until the context ends."""
        return contextlib.nullcontext(self._examples)


class _EpochsOfFunction(Epochs):
    """The examples that a function of the epoch returns.

    The function may return one object for all epochs and modify it, as datasets with a `set_epoch`
    do. So it is not called while examples of another epoch are read, and it is called again if it
    has since returned the same object for another epoch.
    """

    def __init__(self, make: Callable[[int], PyTree], first: PyTree, name: str, epochs: int | None):
        # The examples of two epochs are kept, because a batch may span both, and what the function
        # returned for each.
        examples = _rows_of(first, f"{name}(0)")
        super().__init__(examples, _length(examples, f"{name}(0)", epochs))
        self._of_epoch: dict[int, tuple[PyTree, Indexed]] = {0: (first, examples)}
        self._make, self._name = make, name
        self._readers: collections.Counter[int] = collections.Counter()
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def using(self, epoch: int) -> Iterator[Indexed]:
        with self._changed:
            if epoch not in self._of_epoch:
                # The function may change the object that is being read now.
                self._changed.wait_for(lambda: not self._readers.total())
                if epoch not in self._of_epoch:
                    self._load(epoch)
            _, examples = self._of_epoch[epoch]
            self._readers[epoch] += 1
        try:
            yield examples
        finally:
            with self._changed:
                self._readers[epoch] -= 1
                self._changed.notify_all()

    def _load(self, epoch: int) -> None:
        returned = self._make(epoch)
        examples = _rows_of(returned, f"{self._name}({epoch})")
        if len(examples) != self.length:
            raise ValueError(
                f"`{self._name}({epoch})` has {len(examples)} examples, but `{self._name}(0)` has "
                f"{self.length}. Every epoch must have the same number."
            )
        # An epoch for which the function returned the same object has been replaced by this one.
        others = [(e, x) for e, x in self._of_epoch.items() if x[0] is not returned]
        self._of_epoch = dict([*others[-1:], (epoch, (returned, examples))])


def read_source(
    examples: object, *, epochs: int | None = None, name: str = "examples", batched: bool = False
) -> Epochs | Stream:
    """Returns a reader of examples, by index or in sequence.

    - `examples`: an object with a length and an index; an iterable; an iterator; or a function that
        returns one of these, called with the epoch if it takes an argument.
    - `epochs`: how many times a stream is read; `None` for no end.
    - `name`: the name of the argument, for messages.
    - `batched`: whether the items may be batches.
    """
    if isinstance(examples, Epochs | Stream):
        return examples
    examples = _rows_of(examples, name)
    _refuse_columns(examples, name)
    if not batched:
        makes_batches = getattr(examples, "batch_sampler", True) is not None
        if hasattr(examples, "dataset") and makes_batches and not is_indexed(examples):
            kind = type(examples).__name__
            raise TypeError(
                f"`{name}` is of type {kind}, whose items are batches. Pass the `dataset` of the "
                f"{kind}, or `batch_size=None` to take its batches as they are."
            )
    if is_iterator(examples):
        has_state = state_methods(examples) is not None
        if has_state:
            return IteratorWithState(examples)
        return IteratorWithoutState(examples)
    if is_indexed(examples):
        return Epochs(examples, _length(examples, name, epochs))
    if hasattr(examples, "__iter__"):
        source: PyTree = examples
        return RepeatedStream(lambda epoch: source, epochs=epochs, name=name, sets_epoch=True)
    if not callable(examples):
        raise TypeError(
            f"`{name}` is of type {type(examples).__name__}. It must have a length and an index "
            "(a list, an array, a dataset), be an iterable, or be a function that returns one of "
            "these, such as a generator function."
        )
    return _read_function(examples, epochs, name)


def _rows_of(examples: PyTree, name: str) -> PyTree:
    """Examples whose item i is example i, of a tuple of arrays or of an array; others as they
    are."""
    if isinstance(examples, tuple):
        refuse_deleted_argument(name, *examples)
        columns = as_columns(examples, name)
        if columns is None:
            return examples
        return columns
    if isinstance(examples, jax.Array):
        refuse_deleted_argument(name, examples)
    return rows_of_array(examples)


def _read_function(make: Callable[..., PyTree], epochs: int | None, name: str) -> Epochs | Stream:
    call, shown_call = _with_epoch(make, name)
    first = call(0)
    _refuse_columns(first, f"{name}(0)")
    if is_indexed(rows_of_array(first)) and not is_iterator(first):
        return _EpochsOfFunction(call, first, name, epochs)
    if not hasattr(first, "__iter__"):
        raise TypeError(
            f"`{shown_call}` is of type {type(first).__name__}. It must be an iterable over "
            "examples, or have a length and an index."
        )
    unread = {0: first}  # the function may take long

    def begin(epoch: int) -> PyTree:
        if epoch in unread:
            return unread.pop(epoch)
        return call(epoch)

    return RepeatedStream(begin, epochs=epochs, name=name)


def _with_epoch(make: Callable[..., PyTree], name: str) -> tuple[Callable[[int], PyTree], str]:
    """A function of the epoch that calls `make`, with the epoch if it takes one, and how its first
    call is shown."""
    try:
        signature = inspect.signature(make)
    except ValueError:  # functions implemented in C may have no signature
        return make, f"{name}(0)"
    parameters = signature.parameters.values()
    if any(x.kind is x.KEYWORD_ONLY and x.name == "epoch" for x in parameters):
        return (lambda epoch: make(epoch=epoch)), f"{name}(epoch=0)"
    # It may be callable without an argument, and take the epoch all the same.
    is_named = any(x.kind is x.VAR_POSITIONAL or x.name == "epoch" for x in parameters)
    if not is_named and _can_be_called(signature):
        return (lambda epoch: make()), f"{name}()"
    if not _can_be_called(signature, 0):
        raise TypeError(
            f"`{name}` is a function of other arguments, `{signature}`. It is called without an "
            "argument, or with the number of the epoch. Bind the others, such as by "
            f"`functools.partial({name}, ...)`."
        )
    return make, f"{name}(0)"


def _can_be_called(signature: inspect.Signature, *arguments: int) -> bool:
    try:
        signature.bind(*arguments)
    except TypeError:
        return False
    return True


def by_epoch(examples: object, *, name: str = "examples") -> tuple[Epochs, int]:
    """Returns the examples of each epoch, and the number of examples in an epoch."""
    source = read_source(examples, name=name)
    if isinstance(source, Stream):
        raise TypeError(
            f"`{name}` is of type {type(examples).__name__}, a stream, which has no number of "
            f"examples. Pass an object with a length and an index, such as "
            f"`list(itertools.islice({name}, n))`."
        )
    return source, source.length


def is_indexed(examples: object) -> TypeGuard[Indexed]:
    """Returns whether examples have a length and an index."""
    if not (hasattr(examples, "__len__") and hasattr(examples, "__getitem__")):
        return False
    # A subclass that adds `__iter__` to a class with an index is meant to be iterated over.
    of_iter = _depth_of(type(examples), "__iter__")
    of_index = _depth_of(type(examples), "__getitem__")
    return of_iter >= of_index or _index_works(examples)


def _depth_of(cls: type, name: str) -> int:
    """How far up among the bases of a class a method is defined."""
    for depth, base in enumerate(cls.__mro__):
        if name in vars(base):
            return depth
    return len(cls.__mro__)


def _index_works(examples: PyTree) -> bool:
    """Whether indexing works; PyTorch's datasets inherit a method that only raises an error."""
    try:
        count = len(examples)
    except TypeError:  # the length is unknown, as for a loader of an iterable
        return False
    try:
        if count:
            # Only what is not implemented says that there is no index.
            examples[0]
    except NotImplementedError:
        return False
    return True


def _refuse_columns(examples: object, name: str) -> None:
    """Raises `TypeError` if the items of examples are columns or letters, or have no order."""
    if isinstance(examples, str | bytes | os.PathLike):
        what = "string"
        if isinstance(examples, os.PathLike):
            what = "path"
        raise TypeError(
            f"`{name}` is a {what}, {short_repr(examples)}. Pass examples, such as those of a "
            "dataset that was read from it."
        )
    kind = type(examples).__name__
    if isinstance(examples, set | frozenset):
        raise TypeError(
            f"`{name}` is a {kind}, whose order may differ in each process. Pass a list, such as "
            f"`sorted({name})`."
        )
    if isinstance(examples, type):
        raise TypeError(
            f"`{name}` is the class {examples.__name__}. Pass an object of it, such as "
            f"`{examples.__name__}(...)`."
        )
    refuse_arrow_column(examples, name)
    if is_table(examples):
        raise TypeError(
            f"`{name}` is a {kind}, whose items are columns. Pass its rows, "
            f"`{rows_of_table(examples, name)}`; a tuple of arrays of its columns; or "
            "`datasets.Dataset(table)`, which reads an Arrow table row by row."
        )
    if not isinstance(examples, Mapping):
        return
    split = next((key for key, part in examples.items() if _has_examples(part)), None)
    if split is not None:
        raise TypeError(
            f"`{name}` is a {kind} of several sets of examples. Pass one of them, such as "
            f"`{name}[{split!r}]`."
        )
    raise TypeError(
        f"`{name}` is a {kind}, whose items are columns. Its items must be examples, as in a list "
        "of dicts or a dataset; or pass a tuple of arrays, such as "
        f"`tuple({name}.values())`."
    )


def _has_examples(part: object) -> bool:
    """Whether a value of a dict is a set of examples, such as a split, and not a column."""
    if is_indexed(part):
        with contextlib.suppress(LookupError):  # of a series of pandas that has other keys
            return len(part) > 0 and isinstance(part[0], Mapping | tuple)
        return False
    return hasattr(part, "__iter__") and not hasattr(part, "__array__")


def count_examples(examples: object, name: str) -> int | None:
    """Returns the number of examples in an epoch; `None` for a stream or without examples."""
    if examples is None or isinstance(examples, Stream):
        return None
    source = read_source(examples, name=name)
    if not isinstance(source, Epochs):
        return None
    return source.length


def _length(examples: Indexed, name: str, epochs: int | None = None) -> int:
    if getattr(examples, "shape", None) == ():
        raise TypeError(
            f"`{name}` is an array of one number, without dimensions. Pass examples, such as an "
            "array whose first dimension counts them."
        )
    count = len(examples)
    if count == 0:
        raise ValueError(f"`{name}` is empty. Pass at least one example.")
    if is_endless(count) and epochs is not None:
        raise ValueError(
            f"`{name}` is endless, so an epoch of it has no end. Train for a number of `steps`, or "
            "pass a dataset that is not repeated."
        )
    return count


def is_endless(length: int) -> bool:
    """Whether this stands for no end, as the length of a dataset that Grain repeats does."""
    return length == sys.maxsize


def fetch(
    examples: Indexed, indices: list[int], in_turn: InTurn | None = None, *, stacks: bool = False
) -> Examples:
    """Returns a list of the examples with the given indices, fetched in one call if possible.

    With `stacks`, it may also be an array of them.

    They are copied if the dataset may write into them later. All calls of one loop share `in_turn`,
    and examples are used until the next call only.
    """
    try:
        with doing("reading examples"):
            return _fetch(examples, indices, in_turn, stacks)
    except BaseException as error:  # a context that adds the note would take longer
        noting(f"Raised by the examples with indices {listed(indices)}.").add_to(error)
        raise


def _fetch(examples: Indexed, indices: list[int], in_turn: InTurn | None, stacks: bool) -> Examples:
    if type(examples) is TokenWindows:  # it returns copies
        windows = examples.__getitems__(indices)
        if stacks:
            return windows
        return list(windows)
    if type(examples) in _SEQUENCES or isinstance(examples, np.ndarray):
        return [examples[i] for i in indices]
    if in_turn is None:
        return InTurn()(lambda reuses: _read(examples, indices, reuses))
    # Examples with a place each may be read without a lock and without copies, by one thread.
    if not in_turn.reads_places or threads_at_work():
        return in_turn(lambda reuses: _read(examples, indices, reuses))
    read = list(_read_all(examples, indices))
    if have_places(read, len(examples)):
        return read
    in_turn.reads_places = False
    return in_turn(lambda reuses: _read(examples, indices, reuses, read))


_SEQUENCES = (list, tuple, range)  # indexing them calls no user code


def _read_all(examples: PyTree, indices: list[int]) -> Sequence[PyTree]:
    if hasattr(examples, "__getitems__"):  # faster for datasets on disk
        return examples.__getitems__(indices)
    return [examples[i] for i in indices]


def _read(
    examples: Indexed, indices: list[int], reuses: bool, read: list[PyTree] | None = None
) -> tuple[list[PyTree], bool]:
    """The examples, and whether they were copied because the dataset may write into them.

    `read` are the examples if they were read just now.
    """
    if hasattr(examples, "__getitems__"):
        if read is None:
            read = list(_read_all(examples, indices))
        is_shared = reuses or any(held_elsewhere(read))
        if is_shared:
            read = list(map(copied, read))
        return read, is_shared
    if not reuses:
        if read is None:
            read = list(_read_all(examples, indices))
        if not any(held_elsewhere(read)):
            return read, False
    # Each is copied before the next is read into the same memory.
    return [copied(examples[i]) for i in indices], True


class StreamReader:
    """Reads examples of a stream, which may return the same memory for several examples.

    If an example shares memory with one that is still in use, the earlier one has been overwritten.
    The examples are then read again, and each is copied before the next one is read.

    - `used`: the number of calls whose examples may still be used.
    - `epoch`: the epoch of the first example of the last call.
    - `state`: the encoded state after the last example.
    - `ended`: the epochs that ended in the last call, each with the number of examples before.
    """

    def __init__(self, stream: Stream, *, used: int = 0):
        self.epoch = stream.epoch
        self._stream, self._copies = stream, False
        self._used: collections.deque[tuple[list[PyTree], list[int]]] = collections.deque(
            maxlen=used
        )
        self.state = encode_stream_state(stream.get_state())
        self.ended: list[tuple[int, int]] = []
        self._last_epoch = stream.epoch  # of the examples that were read before

    def __call__(self, count: int) -> list[PyTree]:
        """Returns the next examples, fewer than `count` at the end of the stream."""
        examples = self._read(count)
        if not self._copies:
            places = list(itertools.chain.from_iterable(map(memory_of, examples)))
            others: set[int] = set()
            for _, places_of_call in self._used:
                others.update(places_of_call)
            # The examples are kept alive, so that their memory is not reused by chance.
            self._used.append((examples, places))
            # Some memory occurs twice: the stream writes into what it returned before.
            if len({*places, *others}) < len(places) + len(others):
                self._used.clear()
                self._copies = True
                self._stream.set_state(decode_stream_state(self.state))
                examples = self._read(count)
        self._last_epoch = self._stream.epoch
        self.state = encode_stream_state(self._stream.get_state())
        return examples

    def _read(self, count: int) -> list[PyTree]:
        examples: list[PyTree] = []
        epoch, self.ended = self._last_epoch, []
        for i, example in zip(range(count), self._stream, strict=False):
            if self._stream.epoch != epoch:
                self.ended.append((epoch, i))
                epoch = self._stream.epoch
            if i == 0:
                self.epoch = epoch
            if self._copies:
                example = copied(example)
            examples.append(example)
        if len(examples) < count:
            self.ended.append((epoch, len(examples)))
        return examples
