"""Provides threads for emulated devices, whose collectives deadlock if XLA's pool is too small.

A device blocks a thread of the pool in each collective that it waits for, and may wait for several
at once. By default, the pool has as many threads as there are devices or cores, whichever is more.
Its size is read from the environment variable NPROC when JAX is first used.
"""

import logging
import os
import re
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from ._private_jax import has_chosen_devices

T = TypeVar("T")
logger = logging.getLogger("redcoast")

THREADS = 4  # for each device
_FEWEST = 2  # for each device; with fewer, some programs deadlock
OVERDUE = 120.0  # seconds after which a step on emulated devices is reported
_POLL = 10.0  # seconds
_FLAG = re.compile(r"--xla_force_host_platform_device_count=(\d+)")

_provided: str | None = None  # the NPROC that was set here
_warned: set[str] = set()


def provide_threads(count: int | None = None) -> None:
    """Sets NPROC for emulated devices, unless it is set or JAX has already been used.

    The default `count` is the number of devices in XLA_FLAGS or JAX's configuration.
    """
    if count is None:
        flagged = 0
        numbers = _FLAG.findall(os.environ.get("XLA_FLAGS", ""))
        if numbers:
            flagged = int(numbers[-1])  # XLA takes the last of several
        configured: int = getattr(jax.config, "jax_num_cpu_devices", -1)
        count = max(flagged, configured or 0)
    global _provided
    if count > 1 and not has_chosen_devices() and os.environ.get("NPROC") in (None, _provided):
        os.environ["NPROC"] = _provided = str(THREADS * count)


def warn_of_few_threads() -> None:
    """Warns once if JAX has emulated devices with too few threads. JAX must be initialised."""
    count = _local_cpu_devices()
    threads = pool_threads(count)
    if count > 1 and threads < _FEWEST * count and "threads" not in _warned:
        _warned.add("threads")
        logger.warning(
            "%d emulated devices share %d threads, and a program with several concurrent "
            "collectives may deadlock. %s",
            *(count, threads, _remedy(count)),
        )


def pool_threads(count: int) -> int:
    """The number of threads in XLA's pool for emulated devices."""
    threads = os.cpu_count() or 1
    setting = os.environ.get("NPROC", "")
    if setting.isdecimal():
        threads = int(setting)
    return max(threads, count)


def _local_cpu_devices() -> int:
    return sum(device.platform == "cpu" for device in jax.local_devices())


def _remedy(count: int) -> str:
    return (
        f"Set the environment variable NPROC={THREADS * count} before JAX is first used, or import "
        f"redcoast before that, or call `redcoast.emulate_devices({count})` at the top of the "
        "script."
    )


class Overdue:
    """Warns if a program on emulated devices does not return for minutes.

    It is notified when a call begins, and of an array of its result. A thread checks the last call.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._begun: float | None = None
        self._result: weakref.ref[Any] | None = None
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """Records that a call begins. As long as calls begin, none of them hangs."""
        self._begun, self._result = self._clock(), None
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._watch, name="redcoast-overdue", daemon=True
            )
            self._thread.start()

    def end(self, result: Any) -> None:
        """Records the array that a call has returned, which may still be computed, or `None`."""
        if result is None:
            self._begun = None
        else:
            self._result = weakref.ref(result)

    def look(self) -> None:
        """Warns once if the last call began long ago and its result is not ready."""
        begun = self._begun
        if begun is None or self._is_done() or self._clock() - begun < OVERDUE:
            return
        if "overdue" not in _warned:
            _warned.add("overdue")
            count = _local_cpu_devices()
            logger.warning(
                "A program on %d emulated devices has not returned for %.0f s. If it is not "
                "compiled or computed for that long, its collectives wait for each other: XLA has "
                "%d threads. %s",
                *(count, self._clock() - begun, pool_threads(count), _remedy(count)),
            )

    def _is_done(self) -> bool:
        """Whether the last call has returned, and its result is computed or no longer wanted."""
        if self._result is None:
            return False
        result = self._result()
        return result is None or result.is_deleted() or result.is_ready()

    def _watch(self) -> None:
        while True:
            time.sleep(_POLL)
            self.look()


_overdue = Overdue()


def overdue_on(mesh: Mesh) -> Overdue | None:
    """The watch for calls of a program on emulated devices; `None` on other devices."""
    on_cpu = mesh.devices.flat[0].platform == "cpu"
    if on_cpu and _local_cpu_devices() > 1 and mesh.size > 1:
        return _overdue
    return None


def call_watched(overdue: Overdue | None, run: Callable[..., T], *args: object) -> T:
    """Calls a jitted function while emulated devices are watched."""
    if overdue is None:
        return run(*args)
    # Emulated devices share the cores of one machine, on which a collective may starve.
    overdue.begin()
    last = None
    try:
        out = run(*args)
        # The last output of a step is a metric. The arrays of the state will be donated.
        last = next(filter(_is_plain, reversed(jax.tree.leaves(out))), None)
        return out
    finally:
        overdue.end(last)


def _is_plain(x: object) -> bool:
    """Whether this is an array that says whether it is ready, as a typed key does not."""
    return isinstance(x, jax.Array) and not jnp.issubdtype(x.dtype, jax.dtypes.extended)
