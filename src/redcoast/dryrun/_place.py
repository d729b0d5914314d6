"""The devices to find a mesh for, attached or of a target, and what is known about them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.sharding import Mesh

from ..core._target import Target as Device
from ..core._target import target_of
from ..distributed._kv_store import exchange
from ..distributed._mesh import BATCH_AXES, make_mesh
from ..sharding import Hardware
from ..sharding.solver._hardware import hardware_of
from ._devices import target_devices
from ._links import axis_bandwidths
from ._roofline import peak
from ._target_name import TargetDevices, parse_target


@dataclass(frozen=True)
class Place:
    """Devices to compile for.

    **Attributes:**

    - `name`: The name of the devices, for tables.
    - `devices`: The devices.
    - `target`: The target they belong to; `None` for attached devices.
    - `usable`: Bytes of memory that a program can use on each; `None` if not known.
    - `notes`: Caveats about their figures, as sentences.
    - `compiler`: The compiler of a target's devices.
    """

    name: str
    devices: Sequence[Any]
    target: TargetDevices | None
    usable: int | None
    notes: tuple[str, ...] = ()
    compiler: str = ""

    @property
    def stands_in(self) -> bool:
        """Whether these are CPU devices in place of an accelerator's."""
        kind = "cpu" if self.target is None else self.target.chip.kind
        return kind != "cpu" and self.devices[0].platform == "cpu"

    @property
    def device(self) -> Device:
        """What models choose operations by. A CPU in place of a GPU has none of its kernels."""
        found = target_of(self.devices[0])
        return found if self.target is None else replace(found, platform=self.target.chip.kind)

    def mesh(self, sizes: Mapping[str, int]) -> Mesh:
        return make_mesh(**sizes, devices=self.devices)


def target_place(name: str) -> Place:
    """The devices of a target, which need not be present."""
    target = parse_target(name)
    found = target_devices(target)
    usable = target.chip.usable
    return Place(target.name, found.devices, target, usable, found.notes, found.compiler)


def attached_place() -> Place:
    """The attached devices of all processes; all processes must call this together."""
    devices = jax.devices()
    limits = [(device.memory_stats() or {}).get("bytes_limit") for device in jax.local_devices()]
    everyone = [limit for own in exchange("the memory of devices", limits) for limit in own]
    usable = None if None in everyone else min(everyone)
    return Place(f"{len(devices)} x {devices[0].device_kind}", devices, None, usable)


def hardware_of_target(target: TargetDevices, mesh: Mesh, dtype: str = "float32") -> Hardware:
    """The planner's hardware constants for a target, given the bandwidths along a mesh's axes.

    **Arguments:**

    - `target`, `mesh`: the target, and a mesh of its devices.
    - `dtype`: the dtype of the operands of contractions.
    """
    speeds = axis_bandwidths(target, mesh)
    batch = [speeds[axis] for axis in BATCH_AXES if mesh.shape[axis] > 1]
    cpu = target.chip.kind == "cpu"
    return Hardware(
        flops=peak(target.chip, dtype),
        model_bandwidth=speeds["model"],
        batch_bandwidth=min(batch or [speeds["model"]]),
        memory_bandwidth=target.chip.memory_bandwidth,
        memory=None if cpu else target.chip.usable,
        adds_first=not cpu,
        scatters=not cpu,
    )


def planner_hardware(place: Place, mesh: Mesh) -> Hardware:
    """The hardware constants that `fit` would use if it ran on these devices.

    `fit` reads only their memory. These constants do not depend on the compiler.
    """
    if place.target is None:
        return hardware_of(mesh)
    cpu = place.target.chip.kind == "cpu"
    # Emulated devices do not report their memory.
    memory = None if cpu else place.target.chip.usable
    return Hardware(memory=memory, adds_first=not cpu, scatters=not cpu)


def speeds_of(place: Place, mesh: Mesh) -> dict[str, float]:
    """Bytes per second along each axis; the planner's default if the links are unknown."""
    if place.target is not None:
        return axis_bandwidths(place.target, mesh)
    return dict.fromkeys(mesh.axis_names, float(Hardware.model_bandwidth))


def rate_of(place: Place, dtype: str) -> int | float:
    """Floating point operations per second; the planner's default for an unknown chip."""
    return Hardware.flops if place.target is None else peak(place.target.chip, dtype)
