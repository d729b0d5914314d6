"""Exchanges small JSON values between processes through the coordinator's key-value store."""

import contextlib
import itertools
import json
import time
from collections import defaultdict
from typing import Any

import jax
import numpy as np

from ._private_jax import key_value_store
from ._rendezvous import name_processes

# How many times each topic was exchanged. The count is the same in all processes.
_rounds: defaultdict[str, itertools.count] = defaultdict(itertools.count)
TIMEOUT = 600.0  # seconds; the other processes may still be compiling or reading data
# How many times a run has started or ended here. A failure in one run must not end the next.
_runs = itertools.count()
_run = next(_runs)


class ProcessLost(RuntimeError):
    """Raised in a run with several processes if another process has failed or died.

    !!! Example

        ```python
        options = {"collate_fn": collate_fn, "loss_fn": loss_fn, "batch_size": 4, "steps": 2}
        try:
            rc.fit(model, optimizer, examples, **options)
        except rc.ProcessLost as error:
            print(f"Start the job again: {error}")
        ```
    """

    __module__ = "redcoast"


def is_main() -> bool:
    """Whether this is process 0, which prints, logs and decides."""
    return jax.process_index() == 0


def exchange(topic: str, value: object, *, timeout: float = TIMEOUT) -> list[Any]:
    """Gathers a value from all processes, all of which must call this.

    The value is of a type that JSON supports, but may have numbers of NumPy. `topic` is what it is,
    for messages. Returns the values in the order of the processes. Raises `ProcessLost` if one of
    them has failed meanwhile, and `TimeoutError` if some did not respond in time.
    """
    count, own = jax.process_count(), jax.process_index()
    if count == 1:
        return [value]
    store, number = key_value_store(), next(_rounds[topic])
    key = f"redcoast/{topic}/{number}"
    store.key_value_set(f"{key}/{own}", json.dumps(value, default=_as_plain_number))
    deadline = time.monotonic() + timeout
    texts: list[str] = []
    missing: list[int] = []
    for other in range(count):
        text = _wait(store, f"{key}/{other}", deadline)
        if text is None:
            missing.append(other)
        else:
            texts.append(text)
    if missing:
        raise TimeoutError(
            f"No response from {name_processes(missing)} within {timeout:g} s about {topic}. A "
            "process that does not respond may have ended, may hang, or may run another program: "
            "look at its own output."
        )
    # Every process has read all values of the previous round, so they can be deleted.
    if number:
        store.key_value_delete(f"redcoast/{topic}/{number - 1}/{own}")
    return list(map(json.loads, texts))


def report_failure(error: BaseException) -> None:
    """Reports to the other processes why this one ends."""
    text = (str(error).splitlines() or [""])[0][:1000]
    with contextlib.suppress(jax.errors.JaxRuntimeError):  # the coordinator may be gone
        store = key_value_store()
        key = f"{_failed()}/{jax.process_index()}"
        store.key_value_set(key, f"{type(error).__name__}: {text}", allow_overwrite=True)


def failures() -> dict[int, str]:
    """The failures that other processes have reported, by process."""
    reasons: dict[int, str] = {}
    for key, text in key_value_store().key_value_dir_get(_failed()):
        process = int(key.rsplit("/", 1)[1])
        if process != jax.process_index():
            reasons[process] = text
    return reasons


def reset_failures() -> None:
    """Discards the failures reported so far; called when a run starts or ends."""
    global _run
    _run = next(_runs)


def _as_plain_number(value: object) -> Any:
    """A number of NumPy, which JSON does not support, as one of Python."""
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"A value to exchange is of type {type(value).__name__}, which JSON lacks.")


def _failed() -> str:
    return f"redcoast/failed/{_run}"


def decide(topic: str, value: object) -> Any:
    """Returns the value of process 0 in all processes."""
    own = None
    if is_main():
        own = value
    return exchange(topic, own)[0]


def get_within(store: Any, key: str, timeout_ms: int) -> str | None:
    """Waits for a value of the key-value store; returns None after the timeout."""
    try:
        return store.blocking_key_value_get(key, timeout_ms)
    except jax.errors.JaxRuntimeError as error:
        if "DEADLINE_EXCEEDED" not in str(error):
            raise
        return None


def _wait(store: Any, key: str, deadline: float) -> str | None:
    while True:
        left = deadline - time.monotonic()
        value = get_within(store, key, max(1, int(1000 * min(left, 1.0))))
        if value is not None:
            return value
        for other, text in failures().items():
            raise ProcessLost(f"Process {other} has failed: {text}")
        if left <= 0:
            return None
