"""Gathers published tensors on the host from sharded arrays."""

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
    """Maps each tensor to its parts: paths of arrays, and indices in their leading dimensions."""
    parts: dict[str, list[Part]] = {}
    for path, tensor in table.items():
        for index, name in tensor_names(tensor, leaves[path].shape).items():
            parts.setdefault(name, []).append((path, index))
    return parts


def take(parts: list[Part], leaves: Mapping[str, Any]) -> list[Any]:
    """Returns the parts of one tensor as arrays that this process can read.

    All processes must call this.
    """
    return [_slice(leaves[path], index) for path, index in parts]


def put_together(
    parts: list[Part], taken: list[Any], table: Mapping[str, Tensor], shape: tuple[int, ...]
) -> np.ndarray:
    """Assembles a tensor on the host from its parts."""
    out = np.empty(shape, taken[0].dtype)
    plain = np.dtype(f"u{out.itemsize}")  # NumPy copies its own types faster than bfloat16
    for (path, _), part in zip(parts, taken, strict=True):
        insert(table[path], np.asarray(part).view(plain), out.view(plain))
    return out


def _slice(leaf: Any, index: tuple[int, ...]) -> jax.Array:
    """Indexes the leading dimensions of an array; the result is readable by this process."""
    if not isinstance(leaf, jax.Array):
        return leaf[index]
    sharding = None
    if isinstance(leaf.sharding, NamedSharding):
        # Replicated if other processes hold parts of it.
        here = leaf.sharding.is_fully_addressable
        # The indexed dimensions are gone, so their axes are, too.
        spec = P(*leaf.sharding.spec[len(index) :]) if here else P()
        sharding = NamedSharding(leaf.sharding.mesh, spec)
    # The index is an argument of the program, so one compilation serves all layers.
    return _copy_into(sharding)(leaf, np.array(index, np.int32))


@ft.lru_cache
def _copy_into(sharding: Sharding | None) -> Any:
    # Arrays that are not stacked are copied too: JAX caches the host's copy for the lifetime of an
    # array, and this copy is dropped soon.
    return jax.jit(lambda leaf, at: jnp.copy(leaf[tuple(at)]), out_shardings=sharding)
