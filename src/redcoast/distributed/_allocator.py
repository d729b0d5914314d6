"""Lets glibc keep the memory that a step on a CPU frees, in place of returning it to the system.

XLA allocates the temporaries of a step anew for each call. By default, glibc returns large blocks
when they are freed, and the system clears each page of the next ones at its first use: up to a
third of the time of a step. Blocks above 64 MiB are returned by every thread but the first,
whatever the threshold, unless all threads share one arena. A thread chooses its arena at its first
allocation, so this has to be set before JAX starts its threads.

Freed blocks that are a few bytes too small for the next ones add up: for aligned blocks, glibc
needs a little more than it keeps. So a thread returns them when they take much memory.
"""

import ctypes
import os
import threading
import time
from importlib.metadata import entry_points
from importlib.util import find_spec

import jax

from ._private_jax import has_chosen_devices

# "0" leaves glibc's allocator as it is.
VARIABLE = "REDCOAST_MALLOPT"
# The parameters of `mallopt` (malloc.h) that are set, with their values.
_SETTINGS = {
    -8: 1,  # M_ARENA_MAX: all threads share one arena
    -4: 0,  # M_MMAP_MAX: no block is a mapping of its own
    -1: 2**31 - 1,  # M_TRIM_THRESHOLD: bytes that stay with the process
}
# With one of these, a user sets the allocator.
_OF_GLIBC = ("ARENA_MAX", "MMAP_MAX_", "MMAP_THRESHOLD_", "TRIM_THRESHOLD_", "TOP_PAD_")
# With one of these, JAX may find accelerators that no installed package has.
_OF_PLUGINS = ("PJRT_NAMES_AND_LIBRARY_PATHS", "TPU_LIBRARY_PATH")
_POLL = 2.0  # seconds
_SPARE = 2**29  # free bytes that always stay with the process

_is_set = False  # whether the parameters are set in this process
_left_because = ""  # why they were not, in the last call
_watch: threading.Thread | None = None


def keep_freed_memory(*, on_cpu: bool | None = None) -> None:
    """Sets the parameters, if JAX will run on the CPU and has not started.

    `on_cpu` is whether that is known already. If it is `False`, JAX's configuration must say so; if
    it is `None`, it is enough that no accelerator's plugin is installed.

    Raises `ValueError` if `REDCOAST_MALLOPT` is neither 0 nor 1.
    """
    global _is_set, _left_because
    if _is_set:
        return
    _left_because = _obstacle(on_cpu) or ""
    if not _left_because:
        mallopt = ctypes.CDLL(None).mallopt
        refused = []
        for parameter, value in _SETTINGS.items():
            if mallopt(parameter, value) != 1:
                refused.append(parameter)
        _is_set = not refused
        _left_because = f"glibc refused the parameters {refused}"


def describe_allocator() -> str:
    """Whether the parameters are set in this process, and otherwise why they are not."""
    if _is_set:
        return f"glibc's, which keeps freed memory for steps on a CPU; {VARIABLE}=0 switches it off"
    return f"left as it is: {_left_because}"


def _obstacle(on_cpu: bool | None) -> str | None:
    """Why the parameters are not set; `None` if they can be."""
    switch = os.environ.get(VARIABLE) or "1"
    if switch not in ("0", "1"):
        raise ValueError(
            f"{VARIABLE} must be 1, or 0 to leave the allocator as it is, but is {switch!r}."
        )
    if switch == "0":
        return f"{VARIABLE}=0"
    if not _is_glibc():
        return "the C library is not glibc"
    if own := _own_settings():
        return f"{own} is set"
    if has_chosen_devices():
        return "JAX was used before `make_mesh`; JAX_PLATFORMS=cpu is not set"
    if on_cpu:
        return None
    return _accelerator(must_be_said=on_cpu is False)


def _is_glibc() -> bool:
    # Windows has no `confstr`, and other C libraries than glibc do not know the name.
    if "CS_GNU_LIBC_VERSION" not in getattr(os, "confstr_names", {}):
        return False
    version = os.confstr("CS_GNU_LIBC_VERSION") or ""
    return version.startswith("glibc")


def _own_settings() -> str | None:
    """The variable by which a user has set the allocator."""
    if "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return "GLIBC_TUNABLES"
    for name in _OF_GLIBC:
        variable = f"MALLOC_{name}"
        if variable in os.environ:
            return variable
    return None


def _accelerator(must_be_said: bool) -> str | None:
    """Why JAX may run on accelerators; `None` if it will run on the CPU."""
    platforms = jax.config.jax_platforms  # pyright: ignore[reportAttributeAccessIssue]
    if platforms:
        first = platforms.split(",")[0]
        if first == "cpu":
            return None
        return f"JAX_PLATFORMS={platforms}"
    if must_be_said:
        return "JAX_PLATFORMS=cpu is not set, and no mesh was made"
    modules = [name for name in ("libtpu", "jax_plugins") if find_spec(name) is not None]
    plugins = [plugin.name for plugin in entry_points(group="jax_plugins")]
    variables = [name for name in _OF_PLUGINS if os.environ.get(name)]
    if reasons := [*modules, *plugins, *variables]:
        return f"JAX may run on accelerators, because of {reasons[0]}; JAX_PLATFORMS=cpu is not set"
    return None


def watch_freed_memory() -> None:
    """Starts the thread that returns free memory to the system when it is much.

    JAX must have started: a process that forks before should have no threads.
    """
    global _watch
    if _is_set and _watch is None:
        _watch = threading.Thread(target=_return_memory, name="redcoast-allocator", daemon=True)
        _watch.start()


def is_much(free: int, most_used: int, available: int, installed: int) -> bool:
    """Whether the process should return its free memory; all in bytes.

    It keeps as much as it has used at a time, and less if a quarter of the machine is not left.
    """
    spare = _SPARE
    if available >= installed / 4:
        spare += most_used
    return free > spare


def _return_memory() -> None:
    library = ctypes.CDLL(None)
    allocated = getattr(library, "mallinfo2", None)  # glibc 2.33 and later
    if allocated is None or not os.path.exists("/proc/self/statm"):
        return
    allocated.restype = _Mallinfo
    most_used = 0
    while True:
        time.sleep(_POLL)
        used = allocated().uordblks
        most_used = max(most_used, used)
        page = os.sysconf("SC_PAGE_SIZE")
        with open("/proc/self/statm", encoding="ascii") as file:
            _, resident, shared, *_ = map(int, file.read().split())
        free = (resident - shared) * page - used
        available = os.sysconf("SC_AVPHYS_PAGES") * page
        installed = os.sysconf("SC_PHYS_PAGES") * page
        if is_much(free, most_used, available, installed):
            # 0: of the memory that is free, nothing is kept.
            library.malloc_trim(ctypes.c_size_t(0))


class _Mallinfo(ctypes.Structure):
    """`struct mallinfo2` of malloc.h."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )
