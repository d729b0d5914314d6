"""Heartbeats between the processes of a run, and notices of failures."""

import contextlib
import json
import logging
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from ..core._output import forgiving
from ..core._read_json import JSONObject
from ._coordinator import LOST, forget_others
from ._kv_store import ProcessLost, failures, report_failure, reset_failures
from ._private_jax import key_value_store

logger = logging.getLogger("redcoast")

BEAT = 1.0  # seconds between heartbeats
DEAD = 20.0  # seconds without a heartbeat until a process counts as dead
SLOW = 60.0  # seconds in the user's code, or in reading data, after which the others warn about it
GRACE = 10.0  # seconds for the main thread to end after another process is lost
_KEY = "redcoast/watch"

# Errors of Gloo and of the coordination service are of several types, `ValueError` among them.
_OF_A_COLLECTIVE = re.compile(
    r"\bGloo\b|\b(NCCL|nccl)\b|"
    r"^(ABORTED|CANCELLED|DEADLINE_EXCEEDED|FAILED_PRECONDITION|INTERNAL|UNAVAILABLE|UNKNOWN): "
)

# The current activity of each thread of this process, and when it started.
_doing: dict[int, tuple[str, float]] = {}

# What this process has read of each stream, `{name: (epoch, examples)}`, and where its epochs
# ended, `{name: {epoch: examples}}`.
_read: dict[str, tuple[int, int]] = {}
_ends: dict[str, dict[str, int]] = {}


def has_read(name: str, epoch: int, examples: int, *, ended: bool = False) -> None:
    """Publishes how many examples of a stream this process has read.

    All processes must read as many in each epoch. Where one ends before another, they would wait
    for each other forever, or use rows of different batches.

    - `name`: the argument, such as `examples`.
    - `epoch`: the epoch, or the number of the evaluation.
    - `examples`: their number, from a place that is the same in all processes.
    - `ended`: whether the epoch has ended after them.
    """
    if jax.process_count() == 1:
        return
    if ended:
        _ends.setdefault(name, {})[str(epoch)] = examples  # JSON has no other keys
    else:
        _read[name] = (epoch, examples)


class doing:  # used like a function; a generator would take longer for each batch
    """Publishes what this thread is doing, so that the other processes can warn if it is slow."""

    def __init__(self, what: str):
        self._what = what
        self._before: tuple[str, float] | None = None
        self._is_seen = jax.process_count() > 1

    def __enter__(self) -> None:
        if self._is_seen:
            thread = threading.get_ident()
            self._before = _doing.get(thread)
            _doing[thread] = (self._what, time.monotonic())

    def __exit__(self, *_: object) -> None:
        if self._is_seen:
            thread = threading.get_ident()
            _doing.pop(thread)
            if self._before is not None:
                _doing[thread] = self._before


@contextlib.contextmanager
def watching() -> Iterator[None]:
    """Monitors the other processes of a run, and reports an error of this process to them.

    Warns about a process that is slow. Does nothing if there is only one process.

    Raises `ProcessLost` that names another process which has failed or died.
    """
    if jax.process_count() == 1:
        yield
        return
    forget_others(is_failure=False)
    with _Watch() as watch:
        try:
            yield
        except ProcessLost:
            forget_others(is_failure=True)
            raise
        except BaseException as error:
            # The script may catch the error, and then end.
            forget_others(is_failure=True)
            if _may_be_of_a_collective(error):
                # It may come from a collective that another process has left.
                watch.is_over.wait(DEAD + 5 * BEAT)
            if watch.reason is not None:
                raise ProcessLost(watch.reason) from error
            report_failure(error)
            raise


def _may_be_of_a_collective(error: BaseException | None) -> bool:
    """Whether an error, or its cause, is of a kind that a lost process can raise."""
    while error is not None:
        text = str(error)
        kind = isinstance(error, jax.errors.JaxRuntimeError | TimeoutError)
        if (kind or _OF_A_COLLECTIVE.search(text)) and "RESOURCE_EXHAUSTED" not in text:
            return True
        error = error.__cause__ or error.__context__
    return False


class _Watch:
    """A context in which a thread monitors the other processes.

    If this process cannot continue because of another one, `is_over` is set, and `reason` says why.
    """

    def __init__(self):
        self._thread = threading.Thread(target=self._run, name="redcoast-watch", daemon=True)
        self._ended = threading.Event()
        self.is_over = threading.Event()
        self.reason: str | None = None
        self._seen: dict[int, tuple[int, float]] = {}  # the last heartbeat, and its time
        self._hosts: dict[int, str] = {}
        self._warned: dict[int, float] = {}

    def __enter__(self) -> "_Watch":
        reset_failures()
        _read.clear()
        _ends.clear()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        # The run is over in this process: from now on a missing heartbeat is not a failure.
        self._ended.set()
        self._thread.join(5)
        reset_failures()
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            _publish({"beat": -1})

    def _run(self) -> None:
        for beat in range(sys.maxsize):
            try:
                beat_of_this = {"beat": beat, "host": socket.gethostname(), "doing": _longest()}
                # Copies, because other threads add to them.
                ends = {name: dict(of_epoch) for name, of_epoch in list(_ends.items())}
                _publish(beat_of_this | {"ends": ends})
                reason = self._look()
            except jax.errors.JaxRuntimeError as error:
                reason = (
                    "Process 0, which coordinates the others, can no longer be reached: "
                    + str(error).splitlines()[0]
                )
            if reason is not None:
                return self._end(reason)
            if self._ended.wait(BEAT):
                return

    def _look(self) -> str | None:
        """Returns why this run cannot continue, if another process is lost."""
        for other, text in failures().items():
            return f"{self._name(other)} has failed: {text}"
        now = time.monotonic()
        for key, text in key_value_store().key_value_dir_get(_KEY):
            other = int(key.rsplit("/", 1)[1])
            message = json.loads(text)
            beat = message["beat"]  # -1 after the end of the run there
            if beat < 0 or other == jax.process_index():
                self._seen.pop(other, None)
                continue
            self._hosts[other] = message["host"]
            if (reason := self._compare(other, message["ends"])) is not None:
                report_failure(ValueError(reason))
                return reason
            # Times of this machine only: clocks of several machines differ.
            if self._seen.get(other, (None, 0.0))[0] != beat:
                self._seen[other] = (beat, now)
            self._warn(other, message["doing"])
        for other, (_, since) in self._seen.items():
            if now - since > DEAD:
                return f"{self._name(other)} has died: no heartbeat for {now - since:.0f} s."
        return None

    def _compare(self, other: int, ends: dict[str, dict[str, int]]) -> str | None:
        """Returns in which stream another process has not as many examples as this one."""
        for name, of_epoch in ends.items():
            epoch_now, count = _read.get(name, (None, 0))
            for epoch, length in of_epoch.items():
                own = _ends.get(name, {}).get(epoch)
                has_more = own is None and epoch_now == int(epoch) and count > length
                if has_more or own not in (None, length):
                    return (
                        f"`{name}` gave {length} examples on process {other}, and {own or 'more'} "
                        f"on process {jax.process_index()}. A stream must give the same examples "
                        "on all processes; with `split_by_host`, each has its own."
                    )
        return None

    def _warn(self, other: int, activity: Sequence[Any] | None) -> None:
        """Warns if an activity, `[name, seconds]`, takes long, and again when it has doubled."""
        what, seconds = activity or ("", 0.0)
        if seconds < self._warned.get(other, SLOW):
            if seconds < SLOW:
                self._warned.pop(other, None)
            return
        self._warned[other] = 2 * seconds
        logger.warning(
            "%s has been in %s for %.0f s, and the other processes are waiting for it.",
            *(self._name(other), what, seconds),
        )

    def _name(self, other: int) -> str:
        name = f"Process {other}"
        if host := self._hosts.get(other):
            name += f" on {host}"
        return name

    def _end(self, reason: str) -> None:
        self.reason = reason
        self.is_over.set()
        if not self._ended.wait(GRACE):
            # The main thread waits forever in a collective, and nothing else can end it.
            words = f"redcoast: {reason} This process exits."
            print(words, file=forgiving(sys.stderr), flush=True)
            os._exit(LOST)


def _publish(what: JSONObject) -> None:
    key = f"{_KEY}/{jax.process_index()}"
    key_value_store().key_value_set(key, json.dumps(what), allow_overwrite=True)


def _longest() -> tuple[str, float] | None:
    now = time.monotonic()
    # A copy, because other threads add to it.
    activities = [(now - since, what) for what, since in list(_doing.values())]
    if not activities:
        return None
    seconds, what = max(activities)
    return what, round(seconds, 1)
