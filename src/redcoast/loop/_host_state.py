"""A copy of a sharded state in host memory."""

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding
from jaxtyping import PyTree

from ..core._pytree import Static, join, split


@dataclass(frozen=True)
class _HostArray:
    """The shards of an array that this process can address, once each."""

    shape: tuple[int, ...]
    sharding: Sharding
    parts: dict[str, np.ndarray]  # by the index of the shard
    devices: dict[Any, str]
    key_impl: Any  # of a typed PRNG key, which is stored as its data

    def to_devices(self) -> jax.Array:
        shards = [jax.device_put(self.parts[at], device) for device, at in self.devices.items()]
        array = jax.make_array_from_single_device_arrays(self.shape, self.sharding, shards)
        if self.key_impl is None:
            return array
        return jax.random.wrap_key_data(array, impl=self.key_impl)


@dataclass(frozen=True)
class HostState:
    """The result of `copy_state_to_host`."""

    arrays: list[_HostArray]
    static: Static

    def to_devices(self) -> PyTree:
        """The state as it was, with the same shardings."""
        return join([x.to_devices() for x in self.arrays], self.static)


def copy_state_to_host(state: PyTree) -> HostState:
    """Copies the arrays of a state; each process copies the parts on its own devices."""
    arrays, static = split(state)
    return HostState(list(map(_to_host, arrays)), static)


def _to_host(x: jax.Array) -> _HostArray:
    impl = None
    if jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key):
        # A typed key is no array of NumPy; its data is.
        impl = jax.random.key_impl(x)
    data = x
    if impl is not None:
        data = jax.random.key_data(x)
    # Devices that hold the same shard share one copy of it.
    parts: dict[str, np.ndarray] = {}
    devices: dict[Any, str] = {}
    for shard in data.addressable_shards:
        at = devices[shard.device] = str(shard.index)
        if at not in parts:
            parts[at] = np.array(shard.data)  # a copy: the next step donates the array
    return _HostArray(data.shape, data.sharding, parts, devices, impl)
