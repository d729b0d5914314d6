"""The devices to find a mesh for, attached or of a target, and what is known about them."""

import itertools as it
from dataclasses import replace

import jax
from jax.sharding import Mesh

from ..distributed._kv_store import exchange
from ..distributed._mesh import BATCH_AXES
from ..sharding import Hardware
from ..sharding.solver._hardware import hardware_for, hardware_of
from ._devices import Place, place_of
from ._links import axis_bandwidths
from ._roofline import peak
from ._target_name import parse_target


def target_place(name: str) -> Place:
    """The devices of a target, which need not be present."""
    return place_of(parse_target(name))


def attached_place() -> Place:
    """The attached devices of all processes; all processes must call this together."""
    devices = jax.devices()
    limits = []
    for device in jax.local_devices():
        stats = device.memory_stats() or {}
        limits.append(stats.get("bytes_limit"))
    everyone = list(it.chain.from_iterable(exchange("the memory of devices", limits)))
    usable = None
    # The device with the least memory limits all. CPU devices report none.
    if None not in everyone:
        usable = min(everyone)
    return Place(f"{len(devices)} x {devices[0].device_kind}", devices, None, usable)


def planner_hardware(place: Place, mesh: Mesh) -> Hardware:
    """The hardware constants that `fit` would use if it ran on these devices.

    `fit` reads only their memory. The other constants depend on the compiler alone.
    """
    if place.target is None:
        return hardware_of(mesh)
    chip = place.target.chip
    # Emulated devices do not report their memory.
    usable = None if chip.kind == "cpu" else chip.usable
    return hardware_for(chip.kind, usable)


def target_hardware(place: Place, mesh: Mesh, dtype: str = "float32") -> Hardware:
    """The hardware constants of a target, with its bandwidths along a mesh's axes.

    For attached devices, these are the planner's constants. `dtype` is the operands' dtype.
    """
    hardware, target = planner_hardware(place, mesh), place.target
    if target is None:
        return hardware
    speeds = axis_bandwidths(target, mesh)
    # A batch is sent along all of its axes, at the speed of the slowest.
    batch = [speeds[axis] for axis in BATCH_AXES if mesh.shape[axis] > 1]
    return replace(
        hardware,
        flops=peak(target.chip, dtype),
        model_bandwidth=speeds["model"],
        batch_bandwidth=min(batch or [speeds["model"]]),
        memory_bandwidth=target.chip.memory_bandwidth,
    )
