"""The shardings of a model that is being loaded."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, Sharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import PyTree

from ..core._pytree import leaf_paths
from ..sharding import infer_shardings
from ._registry import Family

PLANNED_TOKENS = 128  # in a row


def choose_shardings(
    abstract: PyTree, family: Family, config: Any, mesh: Mesh | None, shardings: PyTree | None
) -> dict[str, Sharding]:
    """Returns the sharding of each array by its path: as given, as planned for the mesh, or on
    JAX's default device."""
    arrays = leaf_paths(abstract, jax.ShapeDtypeStruct)
    if shardings is not None:
        return _check(leaf_paths(shardings, Sharding), arrays, mesh)
    if mesh is None:
        # Where JAX puts a new array, which `jax.default_device` may have changed.
        device = next(iter(jnp.zeros(()).devices()))
        return dict.fromkeys(arrays, SingleDeviceSharding(device))
    if mesh.size == 1:
        return dict.fromkeys(arrays, NamedSharding(mesh, P()))
    inputs = inputs_to_plan(family, config, mesh)
    planned = infer_shardings(abstract, mesh, fn=lambda model, *args: model(*args), args=inputs)
    return leaf_paths(planned, Sharding)


def inputs_to_plan(family: Family, config: Any, mesh: Mesh) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Returns the abstract inputs for planning: from the family's `example_inputs`, if it has them;
    otherwise tokens for a decoder or for both parts of an encoder-decoder, at most as many in a row
    as the model has positions."""
    if own := getattr(family.hf, "example_inputs", None):
        return own(config, mesh.size)
    length = min(PLANNED_TOKENS, getattr(config, "positions", PLANNED_TOKENS))
    # A row for each device, so that the rows can be divided over any axes.
    tokens = jax.ShapeDtypeStruct((mesh.size, length), jnp.int32)
    return (tokens, tokens) if hasattr(family.model, "encode") else (tokens,)


def _check(
    shardings: dict[str, Sharding], arrays: Mapping[str, Any], mesh: Mesh | None
) -> dict[str, Sharding]:
    if odd := shardings.keys() ^ arrays.keys():
        raise ValueError(
            "`shardings` must have one sharding for each array of the model, such as "
            f"`rc.infer_shardings` returns; {', '.join(sorted(odd))} is in only one of the two."
        )
    meshes = {s.mesh for s in shardings.values() if isinstance(s, NamedSharding)}
    if len({frozenset(s.device_set) for s in shardings.values()}) > 1:
        raise ValueError("`shardings` use several sets of devices. All must use the same devices.")
    if mesh is not None and meshes != {mesh}:
        raise ValueError("`shardings` use another mesh than `mesh`. Pass only one of the two.")
    return shardings
