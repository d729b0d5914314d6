"""Places host arrays on devices. Each process provides the shards of its own devices."""

from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, Sharding
from jax.sharding import PartitionSpec as P
from jax.tree_util import KeyPath
from jax.typing import ArrayLike
from jaxtyping import PyTree

from ..core._donation import refuse_deleted
from ..core._dtypes import to_jax_dtype, tree_to_jax_dtypes
from ..core._frames import hide_frames
from ..core._pytree import ARRAYS, abstract_array, show_path
from ._mesh import ambient_or_default, batch_sharding, batch_shards

HostOrDevice = Any  # an array of NumPy or of JAX


def own_rows(mesh: Mesh, rows: int) -> list[int]:
    """Returns the indices of a batch's rows that are on the devices of this process."""
    if jax.process_count() == 1:
        return list(range(rows))
    # Several devices of the process may have the same rows.
    own = set()
    sharding = batch_sharding(mesh, rows)
    for index in sharding.addressable_devices_indices_map((rows,)).values():
        if index:
            own |= {*range(*index[0].indices(rows))}
    return sorted(own)


def place_rows(arrays: PyTree, mesh: Mesh, rows: int) -> PyTree:
    """Places a batch, sharded over the devices of all processes.

    - `arrays`: the rows of this process (`own_rows`), along the first dimension of each array.
    - `mesh`: the mesh to place them on.
    - `rows`: the number of rows of the global batch.

    Returns global arrays with `rows` rows.
    """
    if jax.process_count() == 1:
        return place_batch(arrays, mesh, kinds=(np.ndarray, jax.Array))
    sharding = batch_sharding(mesh, rows)
    place_of = {row: i for i, row in enumerate(own_rows(mesh, rows))}

    def place(x: HostOrDevice) -> jax.Array:
        # The batch was placed before, as by a source that makes batches on the devices.
        if isinstance(x, jax.Array) and _is_split_over(x, mesh):
            return x
        if _is_key(x):
            # NumPy has no keys, so their data is placed.
            return _wrap(place(jax.random.key_data(x)), x)
        host = _on_host(x)

        def part(index) -> np.ndarray:
            # The rows of a device are contiguous in the batch, and therefore in `host` too.
            start, stop, _ = index[0].indices(rows)
            return host[place_of[start] : place_of[start] + stop - start]

        return jax.make_array_from_callback((rows, *host.shape[1:]), sharding, part)

    return jax.tree.map(place, arrays)


def place_batch(arrays: PyTree, mesh: Mesh, *, kinds: tuple[type, ...] = (np.ndarray,)) -> PyTree:
    """Shards arrays along the first dimension if its size is divisible; replicates others.

    Each process passes the complete arrays, with the same values in all processes.
    """
    return jax.tree.map(lambda x: place_array(x, mesh, kinds=kinds), arrays)


def place_array(
    x: PyTree, mesh: Mesh, *, kinds: tuple[type, ...] = (np.ndarray,), axis: int = 0
) -> PyTree:
    """Places an array as `place_batch` does. `axis` is the dimension of the rows."""
    sharding = _batch_place(x, mesh, kinds, axis)
    if sharding is None:
        return x
    return put(x, sharding)


@hide_frames
def batch_shardings(tree: PyTree, mesh: Mesh | None = None) -> PyTree[NamedSharding | None]:
    """Returns shardings that split the first dimension over `data` and `fsdp`, like a batch.

    Use it for other state of a custom training loop: environments and replay buffers in
    reinforcement learning, whose first dimension is the environment, or one state for each client
    in federated learning. Each device then computes with its own rows.

    **Arguments:**

    - `tree`: any PyTree. Its arrays may be abstract (`jax.ShapeDtypeStruct`).
    - `mesh`: from [`redcoast.make_mesh`][]; by default the ambient mesh, or all devices as `data`.

    **Returns:**

    A tree of the same structure with a `NamedSharding` for each array and `None` for each leaf that
    is not an array. Arrays without dimensions are replicated.

    **Raises:**

    `ValueError` if the first dimension of an array is not divisible by data x fsdp.

    !!! Example

        ```python
        buffer = {"reward": jnp.zeros((8, 10_000)), "size": jnp.zeros((), jnp.int32)}
        shardings = rc.batch_shardings(buffer, rc.make_mesh())
        buffer = jax.device_put(buffer, shardings)
        ```
    """
    mesh = ambient_or_default(mesh)
    shards = batch_shards(mesh)

    def place(path: KeyPath, x: PyTree) -> NamedSharding | None:
        if not isinstance(x, ARRAYS):
            return None
        rows = next(iter(x.shape), None)
        if rows is None:
            return NamedSharding(mesh, P())
        if rows % shards:
            raise ValueError(
                f"{show_path(path, 'The array')} has shape {x.shape}, but its first dimension is "
                f"split over data x fsdp = {shards} devices. Use a multiple of {shards}."
            )
        return batch_sharding(mesh, rows)

    return jax.tree_util.tree_map_with_path(place, tree)


def abstract_batch(arrays: PyTree, mesh: Mesh, axis: int = 0) -> PyTree:
    """The shapes and shardings of arrays that `place_array` places. Abstract arrays count as NumPy
    arrays."""

    def describe(x: PyTree) -> PyTree:
        if isinstance(x, jax.ShapeDtypeStruct) and x.sharding is not None:
            return x
        sharding = _batch_place(x, mesh, (np.ndarray, jax.ShapeDtypeStruct), axis)
        if sharding is None:
            return x
        return abstract_array(x, sharding)

    return jax.tree.map(describe, arrays)


def _batch_place(x: PyTree, mesh: Mesh, kinds: tuple[type, ...], axis: int) -> Sharding | None:
    """The sharding of an array that `place_array` places; `None` if the array is not moved."""
    if isinstance(x, jax.Array) and _is_split_over(x, mesh):
        return None
    alone = isinstance(x, np.ndarray) and stays_on_host(mesh)
    if alone or not isinstance(x, kinds) or np.ndim(x) <= axis:
        if not _is_local(x):
            return None
        # Process-local arrays, such as a key, have to be replicated over all devices.
        return NamedSharding(mesh, P())
    if jnp.issubdtype(x.dtype, jax.dtypes.extended) and not isinstance(x, jax.Array):
        return None  # abstract keys: NumPy has none
    return batch_sharding(mesh, x.shape[axis], axis)


def stays_on_host(mesh: Mesh) -> bool:
    """Whether arrays of NumPy are not moved: a single CPU device takes them without a copy."""
    is_one_cpu = mesh.size == 1 and mesh.devices.flat[0].platform == "cpu"
    return is_one_cpu and not forbids_implicit_transfers()


def allowed_transfers() -> AbstractContextManager[None]:
    """Inside, JAX permits the transfers of a public function, which are meant, also if a setting of
    the user finds unwanted ones around it."""
    return jax.transfer_guard("allow")


def forbids_implicit_transfers() -> bool:
    """Whether a setting of JAX refuses arrays of NumPy as arguments of compiled functions."""
    # Pyright does not know it.
    return getattr(jax.config, "jax_transfer_guard_host_to_device") == "disallow"  # noqa: B009


def _is_split_over(x: jax.Array, mesh: Mesh) -> bool:
    """Whether the devices of a mesh already have different parts of an array.

    `collate_fn` may read only the parts of this process's devices, and return such arrays.
    """
    if isinstance(x, Tracer) or x.is_fully_replicated:
        return False
    return mesh.size > 1 and x.sharding.device_set == set(mesh.devices.flat)


def put(x: HostOrDevice, sharding: Sharding, *, may_alias: bool | None = None) -> jax.Array:
    """Places an array with a sharding; all processes pass the complete array, with equal values."""
    if isinstance(x, np.ndarray):
        x = to_jax_dtype(x, "An array")
    if may_alias is False and isinstance(x, np.ndarray | np.generic):
        x = np.array(x)  # on CPUs, JAX uses the memory of NumPy arrays whatever `may_alias` says
    if jax.process_count() == 1 or (isinstance(x, jax.Array) and not _is_local(x)):
        return jax.device_put(x, sharding, may_alias=may_alias)
    if _is_key(x):
        return _wrap(put(jax.random.key_data(x), sharding), x)
    # Not `device_put`, which compares the values of all processes each time.
    host = _on_host(x)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def place_tree(tree: PyTree, shardings: PyTree, *, copy: bool = False) -> PyTree:
    """Places the leaves of a tree with their shardings; leaves whose sharding is `None` stay."""
    refuse_deleted(
        tree,
        "The model, or the state that it is a part of,",
        "Pass the model of the state that the last step returned, or a copy made before the step.",
    )
    tree = tree_to_jax_dtypes(tree, "the model or state")
    leaves, structure = jax.tree.flatten(tree)
    may_alias = None
    if copy:
        may_alias = False
    for i, sharding in enumerate(structure.flatten_up_to(shardings)):
        if sharding is not None:
            leaves[i] = put(leaves[i], sharding, may_alias=may_alias)
    return structure.unflatten(leaves)


def copy_tree(tree: PyTree) -> PyTree:
    """Copies the JAX arrays of a tree, also while a function is traced."""

    def copy(x: PyTree) -> PyTree:
        if not isinstance(x, jax.Array):
            return x
        if _is_key(x):
            return _wrap(jnp.copy(jax.random.key_data(x)), x)
        return jnp.copy(x)

    return jax.tree.map(copy, tree)


def whole(x: ArrayLike) -> np.ndarray:
    """Copies a complete array to the host; a collective if processes hold different shards."""
    if isinstance(x, jax.Array) and not (x.is_fully_addressable or x.is_fully_replicated):
        return multihost_utils.process_allgather(x, tiled=True)
    return np.asarray(x)


def _on_host(x: HostOrDevice) -> np.ndarray:
    return to_jax_dtype(np.asarray(x), "An array")


def _is_key(x: HostOrDevice) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _wrap(data: jax.Array, keys: jax.Array) -> jax.Array:
    """Creates keys from their data, of the same kind as `keys`."""
    return jax.random.wrap_key_data(data, impl=jax.random.key_impl(keys))


def _is_local(x: object) -> bool:
    """Whether there are several processes and only this one's devices hold the array."""
    return jax.process_count() > 1 and isinstance(x, jax.Array) and x.is_fully_addressable
