"""Asynchronous copies of arrays to host memory."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding

# By default XLA lets a process pin 64 GiB of host memory for GPUs. A save takes at most half of it.
MOST_BYTES = 2**35


def can_copy(arrays: Mapping[Any, Any]) -> bool:
    """Whether `copy_to_host` supports these arrays; otherwise Orbax copies them synchronously."""
    known = (NamedSharding, SingleDeviceSharding)
    on_device = [x for x in arrays.values() if isinstance(x, jax.Array)]
    return (
        all(isinstance(x.sharding, known) and x.is_fully_addressable for x in on_device)
        and all(_kind(x) in _kinds(x) for x in on_device)
        and sum(x.nbytes for x in on_device) <= MOST_BYTES
    )


def copy_to_host(arrays: Mapping[Any, Any]) -> dict[Any, Any]:
    """Copies one replica of each shard to host memory, keeping the sharding.

    It returns before the copies are finished. The originals may be donated at once: the runtime
    makes later computations wait for the copies.
    """
    copies = {name: np.copy(x) for name, x in arrays.items() if not isinstance(x, jax.Array)}
    first = {name: _first_replica(x) for name, x in arrays.items() if name not in copies}
    places = {name: x.sharding.with_memory_kind(_kind(x)) for name, x in first.items()}
    return copies | jax.device_put(first, places, may_alias=False)


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
    parts = (part if isinstance(part, tuple) else (part,) for part in sharding.spec)
    used = {axis for part in parts for axis in part}
    where = tuple(slice(None if axis in used else 1) for axis in sharding.mesh.axis_names)
    everywhere = np.asarray(sharding.mesh.devices)
    devices = everywhere[where]
    if devices.size == everywhere.size:
        return x
    held = {shard.device: shard.data for shard in x.addressable_shards}
    mesh = Mesh(devices, sharding.mesh.axis_names, axis_types=sharding.mesh.axis_types)
    shards = [held[device] for device in devices.flat]
    return jax.make_array_from_single_device_arrays(
        x.shape, NamedSharding(mesh, sharding.spec), shards
    )
