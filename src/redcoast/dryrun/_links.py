"""The bandwidth along each axis of a mesh on a target's network of links."""

import math
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from jax.sharding import Mesh
from jaxtyping import Int

from ..distributed._mesh import make_mesh
from ._target_name import TargetDevices

# The link between the halves of a TPU7x is six times as fast as one link between chips:
# https://cloud.google.com/tpu/docs/tpu7x
_BETWEEN_HALVES = 6


def axis_bandwidths(target: TargetDevices, mesh: Mesh) -> dict[str, float]:
    """The maximum bytes per second that one device can send along each axis of a mesh.

    All groups of devices along an axis send at the same time. The bytes that a device sends are
    counted as in a ring: `(n - 1) / n` of the bytes that `n` devices gather. If several devices of
    a group are in one host (or on one chip), fewer bytes leave the host, and they are shared by the
    links of all these devices.

    `mesh` has the target's devices, or CPU devices in their place. Returns bytes per second by
    axis, such as `"model"`, and by several axes together, such as `"data+fsdp"`, for which more
    links may be available than for either. An axis of size 1 has the bandwidth of a link.
    """
    places = _places(target, mesh)
    dimensions = dict(enumerate(mesh.axis_names))
    bandwidths: dict[str, float] = {}
    for count in range(1, len(dimensions) + 1):
        for axes in combinations(dimensions, count):
            name = "+".join(map(dimensions.__getitem__, axes))
            size = math.prod(places.shape[axis] for axis in axes)
            last = range(-1 - len(axes), -1)
            # (groups, devices of a group, dimensions). Groups at the same places are equally fast.
            groups = np.moveaxis(places, axes, last).reshape(-1, size, places.shape[-1])
            rates = [_bandwidth(target, group) for group in np.unique(groups, axis=0)]
            bandwidths[name] = min(rates)
    return bandwidths


def slow_axes(target: TargetDevices, mesh: Mesh) -> frozenset[str]:
    """The axes of a mesh along which neighbours are in different hosts (GPUs) or slices (TPUs)."""
    groups = _places(target, mesh)[..., 0]
    slow: set[str] = set()
    for dimension, axis in enumerate(mesh.axis_names):
        if np.ptp(groups, axis=dimension).any():
            slow.add(axis)
    return frozenset(slow)


@dataclass(frozen=True)
class _Half:
    """The attributes of a TPU device that decide its place in a mesh."""

    id: int
    coords: tuple[int, ...]
    core_on_chip: int
    slice_index: int
    device_kind: str
    process_index: int = 0
    platform: str = "tpu"


def _places(target: TargetDevices, mesh: Mesh) -> Int[np.ndarray, "*mesh dimensions"]:
    """For each device, its slice and the coordinates of its chip (TPU), or its host."""
    devices = mesh.devices
    if target.chip.kind != "tpu":
        _, cards = target.shape
        # Devices are numbered host by host.
        hosts = np.vectorize(lambda device: device.id // cards)(devices)
        return hosts[..., None]
    if not hasattr(devices.flat[0], "coords"):
        # CPU devices stand in for the chips, which would be in another order in the mesh.
        devices = make_mesh(**mesh.shape, devices=_halves(target)).devices
    dimensions = len(target.shape)
    places = []  # (devices, 1 + dimensions)
    for device in devices.flat:
        slice_index = getattr(device, "slice_index", None) or 0
        places.append((slice_index, *device.coords[:dimensions]))
    return np.array(places).reshape(*devices.shape, 1 + dimensions)


def _halves(target: TargetDevices) -> list[_Half]:
    # JAX's coordinates have three dimensions, of which the first varies fastest.
    shape = (*target.shape, 1)[:3]
    cores = target.chip.cores
    chips = math.prod(shape)
    halves = []
    for number in range(target.slices):
        for chip in range(chips):
            coords = tuple(map(int, np.unravel_index(chip, shape, order="F")))
            for core in range(cores):
                half = _Half(
                    id=len(halves),
                    coords=coords,
                    core_on_chip=core,
                    slice_index=number,
                    device_kind=target.chip.device_kind,
                )
                halves.append(half)
    return halves


def _bandwidth(target: TargetDevices, group: Int[np.ndarray, "n dimensions"]) -> float:
    """The bandwidth of each device of a group, whose links on the slowest level limit it."""
    chip = target.chip
    hosts = group[:, :1]  # or slices
    within = chip.link_bandwidth
    if chip.kind == "tpu":
        slices = np.unique(hosts)
        within = min(_in_slice(target, group[group[:, 0] == number, 1:]) for number in slices)
    return _between(hosts, within, leaving=chip.host_bandwidth)


def _in_slice(target: TargetDevices, group: Int[np.ndarray, "n dimensions"]) -> float:
    """The bandwidth of devices of one slice."""
    chip = target.chip
    chips = np.unique(group, axis=0)
    within = chip.link_bandwidth
    if chip.cores > 1 and len(group) > len(chips):
        within *= _BETWEEN_HALVES
    # Devices of the same chip in other groups use its links too.
    return _between(group, within, leaving=_torus(target, chips) / chip.cores)


def _between(places: Int[np.ndarray, "n dimensions"], within: float, *, leaving: float) -> float:
    """The bandwidth of devices at several places (hosts, slices or chips), in each of which it is
    `within`; each device has `leaving` of what leaves its place."""
    distinct, counts = np.unique(places, axis=0, return_counts=True)
    n, apart = len(places), len(distinct)
    together = int(counts.max())  # devices of the group at one place
    if apart == 1:
        return within
    # The devices at a place share what leaves it.
    # Their bytes are counted as (n - 1) / n, of which (apart - 1) / apart leave.
    rate = leaving * together * ((n - 1) / n) / ((apart - 1) / apart)
    if together == 1:
        return rate
    return min(rate, within)


def _torus(target: TargetDevices, chips: Int[np.ndarray, "chips dimensions"]) -> float:
    """The bandwidth of one chip of a group over its links, along all dimensions at once.

    Slices of complete 4 x 4 x 4 cubes wrap around in all dimensions; two-dimensional slices only in
    dimensions as long as the pod's: https://cloud.google.com/tpu/docs/v4 and v5e.
    """
    total = 0.0
    of_cubes = all(size % 4 == 0 for size in target.shape)
    for dimension, size in enumerate(target.shape):
        positions = np.unique(chips[:, dimension])
        if len(positions) == 1:
            continue
        # If the chips of other groups are in between, all these groups share each link.
        step = int(np.diff(positions).min())
        wraps = of_cubes
        if target.chip.torus == 2:
            wraps = size == 16
        links = 1
        if wraps and len(positions) * step == size:
            links = 2  # in a ring, every chip has two neighbours
        total += target.chip.link_bandwidth * links / step
    return total
