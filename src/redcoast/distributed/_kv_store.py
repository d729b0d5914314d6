"""What processes tell each other on the host, without the devices: small values, as JSON."""

import contextlib
import itertools
import json
import time
from collections import defaultdict
from typing import Any

import jax

from ._rendezvous import name_processes

# How often each topic was exchanged: all processes count alike, for they run the same program.
_rounds: defaultdict[str, itertools.count] = defaultdict(itertools.count)
TIMEOUT = 600.0  # seconds: the others may still compile, or read their data
# How often a run has begun or ended here: an error that all have survived is none of the next.
_runs = itertools.count()
_run = next(_runs)


class ProcessLost(RuntimeError):
    """Raised in a run of several processes if another of them has failed, died or hangs."""


def is_main() -> bool:
    """Whether this is the process that prints, logs and decides."""
    return jax.process_index() == 0


def exchange(topic: str, value: Any, *, timeout: float = TIMEOUT) -> list[Any]:
    """The values of all processes, in their order. All must call this, as often as each other.

    **Arguments:**

    - `topic`: what it is about, for the message if a process does not answer.
    - `value`: what JSON can hold.
    - `timeout`: after how many seconds to give up.

    **Raises:**

    `ProcessLost` that names a process which has failed meanwhile. `TimeoutError` that names those
    which did not say theirs in time.
    """
    count, own = jax.process_count(), jax.process_index()
    if count == 1:
        return [value]
    store, number = key_value_store(), next(_rounds[topic])
    key = f"redcoast/{topic}/{number}"
    store.key_value_set(f"{key}/{own}", json.dumps(value))
    deadline = time.monotonic() + timeout
    found = [_wait(store, f"{key}/{other}", deadline) for other in range(count)]
    if missing := [other for other, text in enumerate(found) if text is None]:
        raise TimeoutError(
            f"Of {name_processes(missing)} there was no word within {timeout:g} s about {topic}. "
            "It may have ended, hang, or run another program: its own output tells."
        )
    # Whoever is here has read all of the round before, so that nobody needs that any more.
    if number:
        store.key_value_delete(f"redcoast/{topic}/{number - 1}/{own}")
    return [json.loads(text or "null") for text in found]


def tell_failure(error: BaseException) -> None:
    """Lets the other processes know why this one ends."""
    text = (str(error).splitlines() or [""])[0][:1000]
    with contextlib.suppress(jax.errors.JaxRuntimeError):  # it may be the coordinator that is gone
        store = key_value_store()
        key = f"{_failed()}/{jax.process_index()}"
        store.key_value_set(key, f"{type(error).__name__}: {text}", allow_overwrite=True)


def failures() -> dict[int, str]:
    """What other processes have said of why they end."""
    found = key_value_store().key_value_dir_get(_failed())
    said = {int(key.rsplit("/", 1)[1]): text for key, text in found}
    return {other: text for other, text in said.items() if other != jax.process_index()}


def turn_page() -> None:
    """A run begins, or ends: what failed until now is over."""
    global _run
    _run = next(_runs)


def _failed() -> str:
    return f"redcoast/failed/{_run}"


def agree(values: dict[str, Any], *, timeout: float = TIMEOUT) -> None:
    """Makes sure that all processes have the same values.

    **Raises:**

    `ValueError` on all of them if not, which names what differs, and who has what.
    """
    everyone = exchange("configuration", values, timeout=timeout)
    first = json.loads(json.dumps(values)) if len(everyone) == 1 else everyone[0]
    differ = [name for name in first if any(other.get(name) != first[name] for other in everyone)]
    if differ:
        raise ValueError(
            "The processes of this run disagree. "
            + " ".join(
                _difference(name, [other.get(name) for other in everyone]) for name in differ
            )
            + " Start all of them with the same code, arguments and data."
        )


def decide(topic: str, value: Any) -> Any:
    """What process 0 says, on all processes."""
    return exchange(topic, value if is_main() else None)[0]


def key_value_store() -> Any:
    """The store that the coordinator keeps for all processes."""
    # JAX has no public name for it.
    from jax._src import distributed

    return distributed.global_state.client


def _wait(store: Any, key: str, deadline: float) -> str | None:
    while True:
        left = deadline - time.monotonic()
        try:
            return store.blocking_key_value_get(key, max(1, int(1000 * min(left, 1.0))))
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
        for other, text in failures().items():
            raise ProcessLost(f"Process {other} has failed: {text}")
        if left <= 0:
            return None


def _difference(name: str, values: list[Any]) -> str:
    """Who has what of one value."""
    who: dict[str, list[int]] = {}
    for process, value in enumerate(values):
        who.setdefault(json.dumps(value), []).append(process)
    said = "; ".join(f"{value} on {name_processes(ids)}" for value, ids in who.items())
    return f"{name}: {said}."
