"""Models with separate layers, for programs that read all weights many times."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, PyTree

from ..core._target import target


class StackedLayers(eqx.Module):
    """The arrays of several layers, stacked along the first dimension."""


class ByLayer(eqx.Module):
    """One array for each layer, in place of an array that is stacked over layers."""

    arrays: tuple[Array, ...]


def by_layer(model: PyTree) -> PyTree:
    """On CPUs, replaces the stacked arrays of redcoast's models by views of each layer.

    The views share the memory of the stacked arrays. Only layers that are not aligned as XLA
    requires are copied. A program on stacked arrays would copy the weights of each layer. On other
    devices, and in a trace, the model is returned unchanged.
    """
    tracing = isinstance(jnp.zeros(()), Tracer)  # then there is no memory to view
    if tracing or target().platform != "cpu":
        return model
    return jax.tree.map(_split, model, is_leaf=_is_stack)


def _is_stack(x: object) -> bool:
    return isinstance(x, StackedLayers)


def _split(x: PyTree) -> PyTree:
    return jax.tree.map(_views, x) if _is_stack(x) else x


def _views(x: PyTree) -> PyTree:
    # Layers that are themselves split over devices cannot be viewed.
    if not isinstance(x, jax.Array) or x.sharding.shard_shape(x.shape)[0] != x.shape[0]:
        return x
    shards = [(s.device, np.asarray(s.data)) for s in x.addressable_shards]  # without a copy
    return ByLayer(tuple(_view(x, shards, i) for i in range(x.shape[0])))


def _view(x: Array, shards: list[tuple[Any, np.ndarray]], i: int) -> Array:
    if isinstance(x.sharding, NamedSharding):
        sharding = NamedSharding(x.sharding.mesh, P(*x.sharding.spec[1:]))
        # The rest of a layer may be split: each device has the same part of it as of the stack.
        parts = [jax.device_put(data[i], device, may_alias=True) for device, data in shards]
        return jax.make_array_from_single_device_arrays(x.shape[1:], sharding, parts)
    # An array that is not committed stays so, or it could not meet arrays of other devices.
    device, data = shards[0]
    return jax.device_put(data[i], device if x.committed else None, may_alias=True)
