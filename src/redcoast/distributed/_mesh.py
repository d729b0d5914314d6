"""Meshes: their axes, their creation, and how a batch is split over them."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ..core._errors import check_integer, check_mesh, wrong_type
from ..core._frames import hide_frames
from ._allocator import keep_freed_memory, watch_freed_memory
from ._emulation import provide_threads, warn_of_few_threads

AXES = ("data", "fsdp", "model")
# An axis before these, of meshes that have stages.
PIPE = "pipe"
# The axes that a batch is sharded over.
BATCH_AXES = ("data", "fsdp")


@hide_frames
def make_mesh(
    *,
    data: int = -1,
    fsdp: int = 1,
    model: int = 1,
    pipe: int = 1,
    devices: Sequence[Any] | None = None,
) -> Mesh:
    """Arranges devices in a mesh with the axes `"data"`, `"fsdp"` and `"model"`.

    **Arguments:**

    - `data`: the number of data-parallel groups. The batch is sharded over them, and each has a
        copy of the model.
    - `fsdp`: the number of devices over which parameters and optimizer state are FSDP-sharded
        (ZeRO-3), and all-gathered where they are used. The batch is sharded over them too.
    - `model`: the degree of tensor parallelism: the number of devices over which each large
        matrix, and the computation with it, is sharded.
    - `pipe`: the number of pipeline stages. Each stage has a part of the layers, and microbatches
        are passed from stage to stage.
    - `devices`: the devices to arrange; `jax.devices()` by default.

    One of the sizes may be -1, and is then inferred from the number of devices.

    **Returns:**

    A `jax.sharding.Mesh` with all three axes (of size 1 if unused), of type `AxisType.Auto`; with
    several stages, `"pipe"` is a fourth axis before them. Devices with fast links (in one host or
    one slice) are neighbours along `model`. Slower links connect devices along `data`, and the
    slowest ones connect the stages.

    **Raises:**

    `ValueError` if the product of the sizes is not the number of devices; `TypeError` if a size is
    not an integer or `devices` is not a list.

    !!! Example

        ```python
        mesh = rc.make_mesh(model=4)  # on 8 devices: data=2, fsdp=1, model=4
        ```
    """
    if isinstance(devices, str | jax.Array) or not isinstance(devices, Iterable | None):
        raise wrong_type("devices", devices, "a list of JAX devices")
    provide_threads()
    keep_freed_memory()
    if devices is None:
        devices = jax.devices()
    devices = list(devices)
    for place, device in enumerate(devices):
        # Compilers for absent devices have devices of classes of their own.
        if not hasattr(device, "platform"):
            raise wrong_type(f"devices[{place}]", device, "a JAX device")
    warn_of_few_threads()
    watch_freed_memory()
    sizes = {"data": data, "fsdp": fsdp, "model": model}
    # Meshes without stages do not have the axis.
    if not _is_integer(pipe) or pipe != 1:
        sizes = {PIPE: pipe, **sizes}
    shape = _resolve(sizes, len(devices))
    return Mesh(_arrange(devices, shape), tuple(sizes), axis_types=(AxisType.Auto,) * len(shape))


def _resolve(sizes: dict[str, int], count: int) -> tuple[int, ...]:
    """Replaces -1 by `count` divided by the other sizes."""
    if count == 0:
        raise ValueError("A mesh needs at least one device, but `devices` is empty.")
    for axis, size in sizes.items():
        if not _is_integer(size):
            raise wrong_type(axis, size, "an integer")
        if size < 1 and size != -1:
            raise ValueError(
                f"`{axis}` must be at least 1, but is {size}. Use a positive size, or -1 for the "
                "devices that the other axes leave."
            )
    free = [axis for axis, size in sizes.items() if size == -1]
    if len(free) > 1:
        others = [axis for axis in free if axis != "data"]
        advice = "Give all but one a size."
        if len(others) == 1 and len(free) == 2:
            advice = f"`data` is -1 by default: pass `data=1` with `{others[0]}=-1`."
        raise ValueError(f"Only one axis can be -1, but {' and '.join(free)} are. {advice}")
    fixed = math.prod(size for size in sizes.values() if size != -1)
    if count % fixed or (not free and fixed != count):
        raise ValueError(_does_not_fit(sizes, fixed, count, free))
    if free:
        sizes = {**sizes, free[0]: count // fixed}
    return tuple(sizes.values())


def _is_integer(size: object) -> bool:
    # A bool is an int in Python.
    return isinstance(size, int | np.integer) and not isinstance(size, bool)


def _does_not_fit(sizes: dict[str, int], fixed: int, count: int, free: list[str]) -> str:
    axes = ", ".join(f"{axis}={size}" for axis, size in sizes.items())
    if free:
        needed, way = f"a multiple of {fixed}", f"a product that divides {count}"
    else:
        needed, way = f"{fixed}", f"a product of {count}, or make one of them -1"
    fits = []
    for axis, size in sizes.items():
        others = fixed // size  # the product of the other sizes
        if size > 1 and count % others == 0:
            fitting = [count // others]
            if free:
                fitting = divisors(count // others)
            fits.append(f"{axis} in {fitting}")
    if fits:
        way += f"; with the other sizes as they are, {' or '.join(fits)} would fit"
    message = (
        f"A mesh of {axes} needs {needed} devices, but there are {count}. The sizes must have "
        f"{way}."
    )
    if count == 1:
        message += f" To try this mesh on a CPU, first call `rc.emulate_devices({fixed})`."
    return message


def divisors(number: int) -> list[int]:
    """The divisors of a number, the smallest first."""
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def _arrange(devices: list[Any], shape: tuple[int, ...]) -> np.ndarray:
    """Arranges devices so that the fastest links are along the last axis."""
    if devices[0].platform == "tpu" and len(devices) > 1:
        from jax.experimental import mesh_utils

        # It follows the torus inside a slice; the leading axes cross slices.
        options = {"allow_split_physical_axes": True}
        slices = {getattr(device, "slice_index", None) for device in devices}
        if len(slices) == 1:
            return mesh_utils.create_device_mesh(shape, devices, **options)
        across, inside = _split_off(shape, len(slices))
        return mesh_utils.create_hybrid_device_mesh(inside, across, devices, **options)
    # Sorted by process and in row-major order, neighbours are along the last axis, and only the
    # leading axes cross hosts.
    array = np.empty(len(devices), dtype=object)
    array[:] = sorted(devices, key=_place)
    return array.reshape(shape)


def _place(device: Any) -> tuple[int, int, int]:
    slice_index = getattr(device, "slice_index", None) or 0
    return slice_index, device.process_index, device.id


def _split_off(shape: tuple[int, ...], count: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Factors `shape` into a shape of `count` slices, from the leading axes first, and the rest."""
    across = []
    for size in shape:
        part = math.gcd(size, count)
        across.append(part)
        count //= part
    if count > 1:
        raise ValueError(
            f"A mesh of shape {shape} does not divide over {math.prod(across) * count} slices: "
            f"a factor of {count} is left over. Make `data` a multiple of the number of slices."
        )
    return tuple(across), tuple(size // part for size, part in zip(shape, across, strict=True))


def batch_shards(mesh: Mesh | AbstractMesh) -> int:
    """The number of shards of a batch."""
    return math.prod(mesh.shape[axis] for axis in BATCH_AXES)


def batch_sharding(mesh: Mesh, rows: int, axis: int = 0) -> NamedSharding:
    """Shards the dimension of the rows if its size is divisible; otherwise replicates the batch."""
    if rows % batch_shards(mesh):
        return NamedSharding(mesh, P())
    return NamedSharding(mesh, P(*[None] * axis, BATCH_AXES))


def ambient_or_default(mesh: Mesh | None) -> Mesh:
    """Returns `mesh`; by default the ambient mesh, or else all devices along `data`."""
    if mesh is not None:
        check_mesh(mesh)
        return mesh
    ambient = jax.sharding.get_mesh()
    if ambient.empty:
        return make_mesh()
    return ambient


@hide_frames
def emulate_devices(count: int) -> None:
    """Emulates several devices on the CPU, to try a mesh without accelerators.

    **Arguments:**

    - `count`: the number of devices to emulate. They share the machine's cores and memory.

    With glibc, the memory that a step frees stays with the process, which makes steps faster. See
    [Benchmarks](../benchmarks.md#allocator).

    **Raises:**

    `ValueError` if `count` is not positive, or if JAX has already been used in this process,
    because JAX creates its devices at first use. `TypeError` if `count` is not an integer.

    !!! Example

        ```python
        rc.emulate_devices(8)
        mesh = rc.make_mesh(model=4)
        ```
    """
    count = check_integer("count", count)
    provide_threads(count)
    keep_freed_memory(on_cpu=True)
    try:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError as error:
        raise ValueError(
            "Devices can be emulated only before JAX is first used in a process. Call "
            "`emulate_devices` at the top of the script."
        ) from error
