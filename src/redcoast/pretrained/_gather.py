"""Tensors put together on the host from arrays that are split over devices."""

import functools as ft
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, Sharding
from jax.sharding import PartitionSpec as P

from ._slices import insert
from ._tensors import Tensor, tensor_names

Part = tuple[str, tuple[int, ...]]


def parts_of(table: Mapping[str, Tensor], leaves: Mapping[str, Any]) -> dict[str, list[Part]]:
    """Which arrays each tensor is made of: their paths, and where in their leading dimensions."""
    parts: dict[str, list[Part]] = {}
    for path, tensor in table.items():
        for index, name in tensor_names(tensor, leaves[path].shape).items():
            parts.setdefault(name, []).append((path, index))
    return parts


def take(parts: list[Part], leaves: Mapping[str, Any]) -> list[Any]:
    """The parts of one tensor, where this process can read them; all processes take part."""
    return [_slice(leaves[path], index) for path, index in parts]


def put_together(
    parts: list[Part], taken: list[Any], table: Mapping[str, Tensor], shape: tuple[int, ...]
) -> np.ndarray:
    """One tensor on the host, of its parts."""
    out = np.empty(shape, taken[0].dtype)
    plain = np.dtype(f"u{out.itemsize}")  # NumPy copies its own types faster than bfloat16
    for (path, _), part in zip(parts, taken, strict=True):
        insert(table[path], np.asarray(part).view(plain), out.view(plain))
    return out


def _slice(leaf: Any, index: tuple[int, ...]) -> jax.Array:
    """What an array has at an index of its leading dimensions, where this process can read it."""
    if not isinstance(leaf, jax.Array):
        return leaf[index]
    copy = _copy_into(_readable(leaf.sharding, len(index)))
    return copy(leaf, np.array(index, np.int32))


def _readable(sharding: Sharding, lead: int) -> Sharding | None:
    """Split as the whole array is, or whole on all devices where other processes have parts."""
    if not isinstance(sharding, NamedSharding):
        return None
    readable = sharding.is_fully_addressable
    return NamedSharding(sharding.mesh, P(*sharding.spec[lead:]) if readable else P())


@ft.lru_cache
def _copy_into(sharding: Sharding | None) -> Any:
    # A copy even of what is not stacked: JAX keeps what the host reads as long as the array.
    return jax.jit(lambda leaf, at: jnp.copy(leaf[tuple(at)]), out_shardings=sharding)
