"""Models with separate layers, for programs that read all weights many times."""

import functools as ft
from math import prod
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, PyTree

from ..core._pytree import map_where
from ..core._target import target


class StackedLayers(eqx.Module):
    """The arrays of several layers, stacked along the first dimension."""


class ByLayer(eqx.Module):
    """One array for each layer, in place of an array that is stacked over layers."""

    arrays: tuple[Array, ...]


# The share of a device's memory that copies of the layers' weights may take.
MOST_COPIED = 0.25


def by_layer(model: PyTree) -> PyTree:
    """On CPUs and GPUs, replaces the stacked arrays of redcoast's models by arrays of each layer.

    A program on stacked arrays would copy the weights of each layer each time that it reads them.
    On CPUs, the arrays are views, which share the memory of the stacked arrays. Only layers that
    are not aligned as XLA requires are copied. On GPUs, all layers are copied, once in each call or
    in each run of a traced program, unless the copies take too much memory. On other devices, and
    in traces for CPUs, the model is returned unchanged.
    """
    platform = target().platform
    if platform == "cpu":
        leaves = jax.tree.leaves(model)
        # In a trace, and under transformations such as `jax.vmap`, there is no memory to view.
        if any(isinstance(x, Tracer) for x in (jnp.zeros(()), *leaves)):
            return model
        split = ft.partial(jax.tree.map, _views)  # the arrays of one stack
        return map_where(_is_stack, split, model, is_leaf=_is_stack)
    if platform != "gpu":
        return model
    is_copied = jax.tree.map(_whole_stacks, model, is_leaf=_is_stack)
    stacks, rest = eqx.partition(model, is_copied)
    arrays = jax.tree.leaves(stacks)
    if not arrays or not _have_room(arrays):
        return model
    layers = _copy_layers(stacks, tuple(_layer_sharding(x) for x in arrays))
    return eqx.combine(rest, layers)


def _whole_stacks(x: PyTree) -> PyTree:
    """Which arrays of a model are stacks with whole layers on each device."""
    if not _is_stack(x):
        return False
    return jax.tree.map(_has_whole_layers, x)


def _has_whole_layers(x: object) -> bool:
    if isinstance(x, Tracer):
        return True
    # Layers that are themselves split over devices cannot be taken apart.
    return isinstance(x, jax.Array) and x.sharding.shard_shape(x.shape)[0] == x.shape[0]


def _have_room(arrays: list[Array]) -> bool:
    """Whether GPUs have room for copies of these arrays."""
    # Several processes would have to agree, since each knows the memory of its own devices alone.
    if any(isinstance(x, Tracer) for x in arrays):
        if jax.process_count() > 1:
            return False
        device = jax.local_devices()[0]
        # Shardings are not known in a trace. Each device may have all of an array.
        size = sum(x.size * x.dtype.itemsize for x in arrays)
    else:
        if not all(x.is_fully_addressable for x in arrays):
            return False
        device = arrays[0].addressable_shards[0].device
        size = sum(prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in arrays)
    return size <= MOST_COPIED * _memory(device)


def _memory(device: Any) -> int:
    """The bytes that JAX may use of a device.

    0 if they are not known, as of the CPU that compiles a program for a GPU that is not here.
    """
    return (device.memory_stats() or {}).get("bytes_limit", 0)


def _layer_sharding(x: Array) -> NamedSharding | None:
    """The sharding of a layer: each device has the same part of it as of the stack."""
    if isinstance(x, Tracer):
        return None
    if isinstance(x.sharding, NamedSharding):
        return NamedSharding(x.sharding.mesh, P(*x.sharding.spec[1:]))
    return None


@ft.partial(jax.jit, static_argnums=1)
def _copy_layers(stacks: PyTree, shardings: tuple[NamedSharding | None, ...]) -> PyTree:
    arrays, structure = jax.tree.flatten(stacks)
    copies: list[ByLayer] = []
    for stack, sharding in zip(arrays, shardings, strict=True):
        layers = jnp.unstack(stack)
        if sharding is not None:
            layers = jax.lax.with_sharding_constraint(layers, sharding)
        copies.append(ByLayer(layers))
    return structure.unflatten(copies)


def _is_stack(x: object) -> bool:
    return isinstance(x, StackedLayers)


def _views(x: PyTree) -> PyTree:
    """An array of whole layers as views of them; other leaves as they are."""
    if not isinstance(x, jax.Array) or not _has_whole_layers(x):
        return x
    sharding = _layer_sharding(x)
    devices = [shard.device for shard in x.addressable_shards]
    stacks = [np.asarray(shard.data) for shard in x.addressable_shards]  # without a copy
    if sharding is None and not x.committed:
        devices = [None]  # Committed to a device, it could not meet arrays of other devices.
    layers: list[Array] = []
    for i in range(x.shape[0]):
        parts: list[Array] = []
        for device, stack in zip(devices, stacks, strict=True):
            parts.append(jax.device_put(stack[i], device, may_alias=True))
        if sharding is None:
            layers += parts
        else:
            shape = x.shape[1:]
            layers.append(jax.make_array_from_single_device_arrays(shape, sharding, parts))
    return ByLayer(tuple(layers))
