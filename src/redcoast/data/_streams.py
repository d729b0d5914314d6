"""Streams: sources whose examples are read in sequence, with states that can be saved."""

import contextlib
import copy
import itertools
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, TypeGuard

from jaxtyping import PyTree

from ..core._errors import noting, short_repr
from ..core._owned import copied, memory_of
from ..core._read_json import JSONObject
from ._stream_state import (
    decode_stream_state,
    encode_if_storable,
    encode_stream_state,
    example_checksum,
)

logger = logging.getLogger("redcoast")
_REPORT = 100_000  # examples that are skipped without a message
_LONG = 1_000_000  # examples of an epoch that are read without a message
_REFUSED = (
    "Raised by `examples` when they were given the state of a checkpoint. Pass the examples that "
    "the run was started with, or choose another directory to start a new run."
)


class StateMethods(NamedTuple):
    """The two methods of a source or an iterator that return and restore its state."""

    save: Callable[[], PyTree]
    load: Callable[[PyTree], object]


# The names in Grain, and in PyTorch.
_NAMES = (("get_state", "set_state"), ("state_dict", "load_state_dict"))


def state_methods(source: object) -> StateMethods | None:
    """The methods that return and restore the state of a source; `None` if it has none."""
    for names in _NAMES:
        if all(hasattr(source, name) for name in names):
            return StateMethods(*(getattr(source, name) for name in names))
    return None


def is_iterator(examples: object) -> TypeGuard[Iterator[PyTree]]:
    """Whether examples can be read only once."""
    return hasattr(examples, "__next__")


def _has_length(source: object) -> bool:
    """Whether a source says how many examples it has."""
    try:
        len(source)  # pyright: ignore[reportArgumentType]
    except (TypeError, NotImplementedError):  # an endless dataset of TensorFlow has a method for it
        return False
    return True


class Stream:
    """An iterator over examples, whose state can be saved.

    - `epoch`: the epoch of the last returned example.
    - `resumes`: whether another process can restore a state.
    """

    epoch = 0
    resumes = True

    def __iter__(self) -> Iterator[PyTree]:
        return self

    def __next__(self) -> PyTree:
        raise NotImplementedError

    def get_state(self) -> PyTree:
        """Returns the state after the last returned example."""
        raise NotImplementedError

    def set_state(self, state: PyTree) -> None:
        """Continues after the example at which the state was taken."""
        raise NotImplementedError

    def peek(self, count: int) -> list[PyTree]:
        """Returns the next examples without advancing."""
        raise NotImplementedError


class IteratorWithState(Stream):
    """The stream of an iterator that has its own state."""

    def __init__(self, iterator: Iterator[PyTree]):
        methods = state_methods(iterator)
        assert methods is not None
        self._iterator, self._methods = iterator, methods

    def __next__(self) -> PyTree:
        return next(self._iterator)

    def get_state(self) -> PyTree:
        return self._methods.save()

    def set_state(self, state: PyTree) -> None:
        with noting(_REFUSED):
            self._methods.load(state)

    def peek(self, count: int) -> list[PyTree]:
        state = encode_stream_state(self.get_state())
        examples = list(itertools.islice(self._iterator, count))
        self.set_state(decode_stream_state(state))
        places = list(itertools.chain.from_iterable(map(memory_of, examples)))
        if len(set(places)) < len(places):  # it returns the same memory for several examples
            examples = list(map(copied, itertools.islice(self._iterator, count)))
            self.set_state(decode_stream_state(state))
        return examples


class _ReadAhead(Stream):
    """A stream that stores the examples that it has read and not yet returned."""

    def __init__(self, iterator: Iterator[PyTree] | None):
        self._iterator, self._ahead = iterator, deque[PyTree]()
        self._failed = False

    def peek(self, count: int) -> list[PyTree]:
        while len(self._ahead) < count:
            try:
                self._ahead.append(copied(self._read()))
            except StopIteration:
                break
        return list(map(copied, itertools.islice(self._ahead, count)))

    def _take(self) -> PyTree:
        """Returns the next example, which has perhaps been read."""
        if self._ahead:
            return self._ahead.popleft()
        return self._read()

    def _read(self) -> PyTree:
        assert self._iterator is not None
        try:
            return next(self._iterator)
        except StopIteration:
            raise
        except BaseException:
            self._failed = True  # after an error, a generator stops as if it had no more examples
            raise


class IteratorWithoutState(_ReadAhead):
    """The stream of an iterator that can neither be read again nor restored."""

    resumes = False

    def __init__(self, iterator: Iterator[PyTree]):
        # The iterator may write into the memory of an example for the next one.
        super().__init__(map(copied, iterator))
        self._count = 0

    def __next__(self) -> PyTree:
        example = self._take()
        self._count += 1
        return example

    def get_state(self) -> PyTree:
        return {"count": self._count}

    def set_state(self, state: PyTree) -> None:
        if state != self.get_state() or self._failed:
            raise ValueError(
                "`examples` is an iterator without a state, which cannot go back to an earlier "
                "example. Pass a function that returns a new iterator."
            )


class RepeatedStream(_ReadAhead):
    """The stream of a source that is read from its beginning in each epoch.

    Its state has the epoch, the number of examples read in it, and checksums of some of them. If
    the source or its iterator has a state that can be stored, that state is restored. If there is
    none, or if it does not restore the same examples (a shuffle buffer), examples are skipped from
    the beginning of the epoch.

    - `begin`: `begin(epoch)` returns an iterable over the examples of an epoch.
    - `epochs`: the number of epochs; `None` for no end.
    - `name`: the name of the argument, for messages.
    - `sets_epoch`: whether to call the method `set_epoch` of the iterable, if it has one.
    """

    def __init__(
        self,
        begin: Callable[[int], Iterable[PyTree]],
        *,
        epochs: int | None,
        name: str,
        sets_epoch: bool = False,
    ):
        super().__init__(None)
        self._sets_epoch = sets_epoch
        self._begin, self._epochs, self._name = begin, epochs, name
        self._has_length = False
        self._methods: StateMethods | None = None
        self._initial: PyTree = None  # the state of a source before it was read
        self._reading, self._count = 0, 0  # the epoch that is read, and its examples so far
        self._anchor: JSONObject | None = None  # an encoded state of the source
        # The first and last example after the anchor, or without one after the last state, and
        # their number.
        self._since: list[PyTree] = []
        self._moved = False  # since the last state was returned
        self._state = self._describe()

    def __next__(self) -> PyTree:
        while True:
            try:
                example = self._take()
            except StopIteration:
                self._end_epoch()
                continue
            self._count += 1
            if self._count == _LONG and not self._reading:
                self._report_long_epoch()
            self.epoch = self._reading
            first, _, number = self._since or (example, example, 0)
            self._since, self._moved = [first, example, number + 1], True
            return example

    def peek(self, count: int) -> list[PyTree]:
        if self._finished():
            return []
        return super().peek(count)

    def get_state(self) -> JSONObject:
        if self._moved:
            self._state, self._moved = self._describe(), False
            # The state of the source does not include examples that were read ahead.
            anchor = None
            if self._methods is not None and not self._ahead:
                anchor = encode_if_storable(self._methods.save())
            if anchor is not None or self._anchor is None:
                self._anchor, self._since = anchor, []
        return dict(self._state)

    def set_state(self, state: JSONObject) -> None:
        if not isinstance(state, dict) or not {"epoch", "count", "since"} <= set(state):
            raise ValueError(
                f"The run was started with an iterator that has its own state, and "
                f"`{self._name}` is of another kind. Pass the same kind of `{self._name}`, or "
                "choose another directory to start a new run."
            )
        at = (self._reading, self._count)
        # It is there already, as after a batch that was read to the end.
        if at == (state["epoch"], state["count"]) and not self._moved and not self._failed:
            return
        self._failed = False
        self._ahead.clear()
        self._reading = self.epoch = state["epoch"]
        self._iterator = self._methods = None
        if state["count"]:
            self._go_to(state)
        self._count, self._since, self._anchor = state["count"], [], None
        self._moved = False
        if self._methods is not None and self._count:
            self._anchor = encode_if_storable(self._methods.save())
        self._state = dict(state)

    def _describe(self) -> JSONObject:
        first, last, number = self._since or (None, None, 0)
        checks = []
        if self._since:
            checks = [example_checksum(first), example_checksum(last)]
        return {
            "epoch": self._reading,
            "count": self._count,
            "anchor": self._anchor,
            "since": number,
            "checks": checks,
        }

    def _go_to(self, state: JSONObject) -> None:
        """Reads up to a state, from the nearest position that restores the same examples."""
        count, epoch, since = (state[name] for name in ("count", "epoch", "since"))
        # If the source restores its state exactly, its next examples have the saved checksums.
        if state["anchor"] is not None:
            anchor = decode_stream_state(state["anchor"])
            problem = "does not restore its next examples exactly"
            try:
                if self._skip(since, since, anchor) == state["checks"]:
                    return
            except Exception as error:  # the source refuses the state, as if it were of another one
                problem = f"cannot be restored, {short_repr(error)}"
            logger.warning(
                "The state of `%s` %s. The %d examples of epoch %d that were read before are "
                "skipped instead.",
                *(self._name, problem, count, epoch),
            )
        skipped = self._skip(count, since, None)
        # The source may have been read since, and continue from there.
        if skipped != state["checks"] and self._initial is not None:
            skipped = self._skip(count, since, self._initial)
        if skipped is None:
            raise ValueError(
                f"`{self._name}` has fewer examples in epoch {epoch} than the {count} that the run "
                "had read. Pass the same examples, in a source that was not read before, or choose "
                "another directory to start a new run."
            )
        if skipped != state["checks"]:
            logger.warning(
                "`%s` gave other examples than before the run was stopped, so the run does not "
                "continue exactly. Its order must depend on the epoch only: seed it.",
                self._name,
            )

    def _skip(self, skipped: int, since: int, start: PyTree) -> list[int] | None:
        """Reads examples of the epoch from a state of the source, or from its beginning.

        Returns checksums of the first and the last of the `since` examples before the place, or
        `None` if there are not that many.
        """
        self._start(start)
        checks: list[int] = []
        for i in range(skipped):
            if i == _REPORT:
                logger.warning(
                    "Skipping the first %d examples of epoch %d, which the run has read before. "
                    "A source with an index, or with a state, resumes at once.",
                    *(skipped, self._reading),
                )
            try:
                example = self._read()
            except StopIteration:
                return None
            if i == skipped - since:
                checks.append(example_checksum(example))
            if i == skipped - 1:
                checks.append(example_checksum(example))
        return checks

    def _start(self, state: PyTree) -> None:
        """Begins to read an epoch, from a state of the source or from its beginning."""
        self._iterator = None  # an old iterator must not share the state of the source
        source: Iterable[PyTree] = self._begin(self._reading)
        if not isinstance(source, Iterable):
            raise TypeError(
                f"`{self._name}({self._reading})` is of type {type(source).__name__}. It must be "
                "an iterable over examples, or have a length and an index."
            )
        self._has_length = _has_length(source)
        if state_methods(source) is not None and not is_iterator(source):
            with contextlib.suppress(Exception):  # some objects refuse to be copied
                source = copy.copy(source)  # it keeps the restored state
        set_epoch = getattr(source, "set_epoch", None)
        if self._sets_epoch and set_epoch is not None:
            set_epoch(self._reading)  # such as a dataset that shuffles with a buffer
        methods = state_methods(source)
        if methods is not None and self._initial is None:
            self._initial = copy.deepcopy(methods.save())
        if methods is not None and state is not None:
            methods.load(copy.deepcopy(state))
        iterator = iter(source)
        if methods is None and (methods := state_methods(iterator)) and state is not None:
            methods.load(state)
        self._iterator, self._methods = iterator, methods

    def _read(self) -> PyTree:
        if self._failed:
            self.set_state(self._state)
        if self._finished():
            raise StopIteration
        if self._iterator is None:
            self._start(None)
        return super()._read()

    def _report_long_epoch(self) -> None:
        if self._epochs is None or self._has_length:
            return
        logger.warning(
            "`%s` has given %s items in its first epoch, which has not ended. If it is endless, "
            "the run does not end either: pass `steps` in place of `epochs`, or a part of it, such "
            "as `itertools.islice` returns. If it ends, ignore this warning.",
            *(self._name, f"{_LONG:,}"),
        )

    def _finished(self) -> bool:
        return self._epochs is not None and self._reading >= self._epochs

    def _end_epoch(self) -> None:
        """Goes to the next epoch; raises `StopIteration` after the last one."""
        if self._finished():
            raise StopIteration
        if self._count == 0 and self._reading == 0:
            raise StopIteration
        if self._count == 0:
            raise ValueError(
                f"`{self._name}` gave no examples in epoch {self._reading}: it can be read only "
                "once. Pass a function that returns a new iterator, such as a generator function."
            )
        self._reading, self._count = self._reading + 1, 0
        self._iterator, self._anchor, self._since, self._moved = None, None, [], True
        if self._finished():
            raise StopIteration
