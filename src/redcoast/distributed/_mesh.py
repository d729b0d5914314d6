import math
import os
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ..core._errors import check_mesh

AXES = ("data", "fsdp", "model")
# Axes that a batch is split over: both hold different examples.
BATCH_AXES = ("data", "fsdp")


def make_mesh(
    *, data: int = -1, fsdp: int = 1, model: int = 1, devices: Sequence[Any] | None = None
) -> Mesh:
    """Arranges devices in a mesh with the axes `"data"`, `"fsdp"` and `"model"`.

    **Arguments:**

    - `data`: over how many groups of devices the batch is split, each with its own copy of
        the model.
    - `fsdp`: over how many devices parameters and optimizer state are stored split, to be
        gathered where they are used. The batch is split over them too.
    - `model`: over how many devices each large matrix, and the arithmetic with it, is split.
    - `devices`: the devices to arrange; all of `jax.devices()` by default.

    One of the three sizes may be -1: it takes the devices that the others leave.

    **Returns:**

    A `jax.sharding.Mesh` of three axes, always all of them, of type `AxisType.Auto`.
    Devices that talk fast (those of one host or one slice) are neighbours on `model`, and
    slower links fall on `data`.

    **Raises:**

    `ValueError` if the sizes do not use up the devices exactly.

    !!! Example

        ```python
        mesh = rc.make_mesh(model=4)  # on 8 devices: data=2, fsdp=1, model=4
        ```
    """
    if not isinstance(devices, Iterable | None):
        raise TypeError(f"`devices` is {devices!r}. It must be a list of devices of JAX.")
    devices = list(jax.devices() if devices is None else devices)
    shape = _resolve({"data": data, "fsdp": fsdp, "model": model}, len(devices))
    return Mesh(_arrange(devices, shape), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def _resolve(sizes: dict[str, int], count: int) -> tuple[int, ...]:
    """The sizes, with -1 replaced by what is left of `count` devices."""
    if count == 0:
        raise ValueError("A mesh needs at least one device, and `devices` is empty.")
    for axis, size in sizes.items():
        if not isinstance(size, int | np.integer):
            raise TypeError(f"A mesh axis has a whole number of devices, and not {axis}={size!r}.")
        if size < 1 and size != -1:
            raise ValueError(
                f"A mesh axis has at least one device, but {axis}={size} was asked for. "
                "Use a positive size, or -1 for the devices that the other axes leave."
            )
    free = [axis for axis, size in sizes.items() if size == -1]
    if len(free) > 1:
        raise ValueError(
            f"Only one axis can be -1, but {' and '.join(free)} are. Give all but one a size."
        )
    fixed = math.prod(size for size in sizes.values() if size != -1)
    if count % fixed or (not free and fixed != count):
        raise ValueError(_does_not_fit(sizes, fixed, count, free))
    return tuple(count // fixed if size == -1 else size for size in sizes.values())


def _does_not_fit(sizes: dict[str, int], fixed: int, count: int, free: list[str]) -> str:
    asked = ", ".join(f"{axis}={size}" for axis, size in sizes.items())
    divisors = [n for n in range(1, count + 1) if count % n == 0]
    rest = f"a product that divides {count}" if free else f"a product of {count}"
    hint = "" if free else ", or make one of them -1"
    fits = [
        f"{axis} in {_options(sizes, axis, count, divisors, bool(free))}"
        for axis, size in sizes.items()
        if size > 1 and _options(sizes, axis, count, divisors, bool(free))
    ]
    return (
        f"A mesh of {asked} needs {'a multiple of ' if free else ''}{fixed} devices, but there "
        f"are {count}. The sizes must have {rest}{hint}"
        + (f"; with the other sizes as they are, {' or '.join(fits)} would fit." if fits else ".")
    )


def _options(
    sizes: dict[str, int], axis: str, count: int, divisors: list[int], free: bool
) -> list[int]:
    """Sizes of one axis that would fit, the other sizes staying as they are."""
    others = math.prod(size for name, size in sizes.items() if name != axis and size != -1)
    if count % others:
        return []
    return [n for n in divisors if (count // others) % n == 0] if free else [count // others]


def _arrange(devices: list[Any], shape: tuple[int, ...]) -> np.ndarray:
    """An array of devices whose last axis varies over the fastest links."""
    slices = {getattr(device, "slice_index", None) for device in devices}
    if devices[0].platform == "tpu" and len(devices) > 1:
        return _arrange_tpu(devices, shape, len(slices))
    # In row-major order the last axis takes neighbours: first the devices of one process,
    # then those of the next, so that only the leading axes cross hosts.
    ordered = sorted(devices, key=_locality)
    array = np.empty(len(devices), dtype=object)
    array[:] = ordered
    return array.reshape(shape)


def _locality(device: Any) -> tuple[int, int, int]:
    return (getattr(device, "slice_index", None) or 0, device.process_index, device.id)


def _arrange_tpu(devices: list[Any], shape: tuple[int, ...], slices: int) -> np.ndarray:
    """Follows the torus inside a slice, and lets the leading axes cross slices."""
    from jax.experimental import mesh_utils

    if slices == 1:
        return mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    across, inside = _split_off(shape, slices)
    return mesh_utils.create_hybrid_device_mesh(
        inside, across, devices, allow_split_physical_axes=True
    )


def _split_off(shape: tuple[int, ...], count: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Factors `shape` into `count` groups, taken from the leading axes, and the rest."""
    across = []
    for size in shape:
        part = math.gcd(size, count)
        across.append(part)
        count //= part
    if count > 1:
        raise ValueError(
            f"A mesh of shape {shape} cannot be laid over {math.prod(across) * count} slices: "
            f"a factor of {count} is left over. Make `data` a multiple of the number of slices."
        )
    return tuple(across), tuple(size // part for size, part in zip(shape, across, strict=True))


def batch_shards(mesh: Mesh | AbstractMesh) -> int:
    """Over how many groups of devices a batch is split."""
    return math.prod(mesh.shape[axis] for axis in BATCH_AXES)


def batch_sharding(mesh: Mesh, rows: int) -> NamedSharding:
    """Splits the first dimension, if it divides; a ragged last batch is whole on all."""
    return NamedSharding(mesh, P(BATCH_AXES) if rows % batch_shards(mesh) == 0 else P())


def ambient_or_default(mesh: Mesh | None) -> Mesh:
    """The given mesh, or else the ambient one, or else all devices as `data`."""
    if mesh is not None:
        check_mesh(mesh)
        return mesh
    ambient = jax.sharding.get_mesh()
    return make_mesh() if ambient.empty else ambient


def emulate_devices(count: int) -> None:
    """Lets the CPU of this machine stand for several devices, to try a mesh without them.

    **Arguments:**

    - `count`: the number of devices to emulate. They share the machine's cores and memory.

    **Raises:**

    `ValueError` if `count` is not positive or if JAX has been used already in this process, for
    it chooses its devices when it is first used.

    !!! Example

        ```python
        rc.emulate_devices(8)
        mesh = rc.make_mesh(model=4)
        ```
    """
    if not isinstance(count, int):
        raise TypeError(f"`count` is {count!r}. It must be a whole number of devices.")
    if count < 1:
        raise ValueError(f"At least one device can be emulated, not {count}.")
    # A device blocks a thread of XLA's pool in each collective that it waits in, and there may
    # be several at once: with one thread for each device (the default), they deadlock.
    os.environ.setdefault("NPROC", str(4 * count))
    try:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError as error:
        raise ValueError(
            "Devices can be emulated only before JAX is first used in a process. Call "
            "`emulate_devices` at the top of the script."
        ) from error
