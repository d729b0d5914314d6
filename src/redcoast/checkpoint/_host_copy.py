"""Asynchronous copies of arrays to host memory."""

from collections.abc import Mapping
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, Sharding, SingleDeviceSharding

K = TypeVar("K")  # the names of the arrays
# By default XLA lets a process pin 64 GiB of host memory for GPUs. A save takes at most half of it.
MOST_BYTES = 2**35


def can_copy(arrays: Mapping[K, np.ndarray | jax.Array]) -> bool:
    """Whether `copy_to_host` supports these arrays; otherwise Orbax copies them synchronously."""
    count = 0
    for x in arrays.values():
        if not isinstance(x, jax.Array):
            continue
        if not isinstance(x.sharding, NamedSharding | SingleDeviceSharding):
            return False
        if not x.is_fully_addressable or _kind(x) not in _kinds(x):
            return False
        count += x.nbytes
    return count <= MOST_BYTES


def copy_to_host(arrays: Mapping[K, np.ndarray | jax.Array]) -> dict[K, np.ndarray | jax.Array]:
    """Copies one replica of each shard to host memory, keeping the sharding.

    It returns before the copies are finished. The originals may be donated at once: the runtime
    makes later computations wait for the copies.
    """
    copies: dict[K, np.ndarray | jax.Array] = {}
    on_device: dict[K, jax.Array] = {}
    host_shardings: dict[K, Sharding] = {}
    for name, x in arrays.items():
        if not isinstance(x, jax.Array):
            copies[name] = np.copy(x)
            continue
        replica = _first_replica(x)
        on_device[name] = replica
        host_shardings[name] = replica.sharding.with_memory_kind(_kind(replica))
    # One call for all, so that the copies of small arrays do not wait for each other.
    # A copy in any case: on a CPU, host memory could be that of the array.
    return copies | jax.device_put(on_device, host_shardings, may_alias=False)


def _kind(x: jax.Array) -> str:
    # On CPUs, a copy to `pinned_host` is tens of times slower.
    if _device(x).platform != "cpu":
        return "pinned_host"
    return "unpinned_host"


def _kinds(x: jax.Array) -> set[str]:
    return {memory.kind for memory in _device(x).addressable_memories()}


def _device(x: jax.Array) -> Any:
    return next(iter(x.sharding.device_set))


def _first_replica(x: jax.Array) -> jax.Array:
    """The array without its duplicate shards; nothing is copied."""
    sharding = x.sharding
    if not isinstance(sharding, NamedSharding):
        return x
    sharded_axes: set[str] = set()
    for entry in sharding.spec:
        if isinstance(entry, str):
            sharded_axes.add(entry)
        elif isinstance(entry, tuple):
            sharded_axes.update(entry)
    where: list[slice] = []
    for axis in sharding.mesh.axis_names:
        if axis in sharded_axes:
            where.append(slice(None))
        else:  # the array is replicated over it, and the first devices have all of it
            where.append(slice(1))
    everywhere = np.asarray(sharding.mesh.devices)
    # The mesh keeps its axes, those that the array is replicated over with size 1.
    devices = everywhere[tuple(where)]
    if devices.size == everywhere.size:
        return x
    data_of = {shard.device: shard.data for shard in x.addressable_shards}
    shards = [data_of[device] for device in devices.flat]
    mesh = Mesh(devices, sharding.mesh.axis_names, axis_types=sharding.mesh.axis_types)
    return jax.make_array_from_single_device_arrays(
        x.shape, NamedSharding(mesh, sharding.spec, memory_kind=sharding.memory_kind), shards
    )
