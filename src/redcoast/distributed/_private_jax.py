"""The private APIs of JAX's distributed runtime that this package uses.

`tests/distributed/test_private_apis_jax_runtime.py` fails if a version of jaxlib lacks one of them.
"""

import contextlib
import ctypes
from collections.abc import Callable, Iterator
from typing import Any

from jax._src import clusters, distributed, xla_bridge
from jax._src.lib import _jax  # pyright: ignore[reportPrivateImportUsage]

# Starts the coordination service; its argument is `[address, count, linger, options]`, in JSON.
SERVICE_PROGRAM = """
import json, os, signal, sys, time

# Schedulers send these to all processes of a job, which still need the service afterwards.
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
    signal.signal(number, signal.SIG_IGN)
from jax._src.lib import _jax

address, count, linger, options = json.loads(sys.argv[1])
service = _jax.get_distributed_runtime_service(address, count, **options)
print("ready", flush=True)
# The others may still be disconnecting, or have yet to detect that process 0 is gone.
time.sleep(5 if sys.stdin.readline() else linger)
service.shutdown()
os._exit(0)
"""


def runtime() -> Any:
    """Returns the state of the runtime: `client`, `service`, and how this process has joined."""
    return distributed.global_state


def key_value_store() -> Any:
    """Returns the coordinator's key-value store, which all processes share."""
    return runtime().client


def launchers() -> list[Any]:
    """Returns the classes that detect the launchers of jobs, such as SLURM."""
    return clusters.ClusterEnv._cluster_types


def has_chosen_devices() -> bool:
    """Returns whether JAX has been used in this process."""
    return xla_bridge.backends_are_initialized()


def forget_connections() -> None:
    """Disconnects this process from the runtime without calling a destructor.

    The destructors wait for all processes at a barrier, so the objects must never be freed.
    """
    state = runtime()
    for connection in (state.client, state.service):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(connection))
    state.client = state.service = None


@contextlib.contextmanager
def service_from(make: Callable[..., Any]) -> Iterator[None]:
    """Makes `jax.distributed.initialize` start its service by calling `make`."""
    before = _jax.get_distributed_runtime_service
    _jax.get_distributed_runtime_service = make
    try:
        yield
    finally:
        _jax.get_distributed_runtime_service = before
