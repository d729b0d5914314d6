"""How fast devices can send along each axis of a mesh that lies over a target's links."""

import math
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
from jax.sharding import Mesh
from jaxtyping import Int

from ..distributed._mesh import make_mesh
from ._target import Target

# The halves of a TPU7x are joined six times as fast as one link joins chips:
# https://cloud.google.com/tpu/docs/tpu7x
_BETWEEN_HALVES = 6


def axis_bandwidths(target: Target, mesh: Mesh) -> dict[str, float]:
    """Bytes per second that one device can send, at most, along each axis of a mesh.

    All groups of devices along an axis send at the same time. What a device sends is counted as
    in a ring: `(n - 1) / n` of the bytes that `n` devices gather. Where several of a group sit in
    one host (or on one chip), less of it has to leave than that, over the way out of each of them.

    **Arguments:**

    - `target`: What the mesh's devices are.
    - `mesh`: Devices of the target, or of the CPU in their place.

    **Returns:**

    Bytes per second by axis, such as `"model"`, and by several together, such as `"data+fsdp"`,
    over which there may be more ways than over either. Where nothing is sent, a link's.
    """
    places = _places(target, mesh)
    return {
        "+".join(mesh.axis_names[index] for index in axes): _slowest(target, places, axes)
        for count in range(1, mesh.devices.ndim + 1)
        for axes in combinations(range(mesh.devices.ndim), count)
    }


@dataclass(frozen=True)
class _Half:
    """A device of a slice, as far as it matters where it goes in a mesh."""

    id: int
    coords: tuple[int, ...]
    core_on_chip: int
    device_kind: str
    process_index: int = 0
    platform: str = "tpu"


def _places(target: Target, mesh: Mesh) -> Int[np.ndarray, "*mesh dimensions"]:
    """Of each device the coordinates of its chip (TPU), or the number of its host."""
    devices = mesh.devices
    if target.chip.kind != "tpu":
        return np.vectorize(lambda device: device.id // target.shape[1])(devices)[..., None]
    if not hasattr(devices.flat[0], "coords"):
        devices = make_mesh(**mesh.shape, devices=_halves(target)).devices
    dimensions = len(target.shape)
    flat = [device.coords[:dimensions] for device in devices.flat]
    return np.array(flat).reshape(*devices.shape, dimensions)


def _halves(target: Target) -> list[Any]:
    shape = (*target.shape, 1)[:3]
    cores = target.chip.cores
    return [
        _Half(
            chip * cores + core,
            tuple(map(int, np.unravel_index(chip, shape, order="F"))),
            core,
            target.chip.device_kind,
        )
        for chip in range(math.prod(shape))
        for core in range(cores)
    ]


def _slowest(
    target: Target, places: Int[np.ndarray, "*mesh dimensions"], axes: tuple[int, ...]
) -> float:
    """The bandwidth of the worst placed group of devices along some axes."""
    size = math.prod(places.shape[axis] for axis in axes)
    last = range(-1 - len(axes), -1)
    groups = np.moveaxis(places, axes, last).reshape(-1, size, places.shape[-1])
    return min(_bandwidth(target, group) for group in np.unique(groups, axis=0))


def _bandwidth(target: Target, group: Int[np.ndarray, "n dimensions"]) -> float:
    chip = target.chip
    places, counts = np.unique(group, axis=0, return_counts=True)
    n, apart, together = len(group), len(places), int(counts.max())
    within = chip.link_bandwidth * (_BETWEEN_HALVES if chip.cores > 1 and together > 1 else 1)
    if apart == 1:
        return within
    if chip.kind == "tpu":
        # Those on a chip that are in other groups send over the chip's links too.
        leaving = _torus(target, places) * together / chip.cores
    else:
        leaving = chip.host_bandwidth * together
    rate = leaving * ((n - 1) / n) / ((apart - 1) / apart)
    return rate if together == 1 else min(rate, within)


def _torus(target: Target, chips: Int[np.ndarray, "chips dimensions"]) -> float:
    """What one of a group of chips sends over its links: along all dimensions at once."""
    total = 0.0
    for dimension, size in enumerate(target.shape):
        taken = np.unique(chips[:, dimension])
        if len(taken) > 1:
            # If other groups lie in between, messages of as many groups share each link.
            step = int(np.diff(taken).min())
            ring = _wraps(target, size) and len(taken) * step == size
            total += target.chip.link_bandwidth * (2 if ring else 1) / step
    return total


def _wraps(target: Target, size: int) -> bool:
    """Whether the last chip along a dimension is linked to the first.

    Slices of whole cubes of 4 x 4 x 4 are closed in all dimensions; those of chips in a plane
    only in dimensions as long as the pod's: https://cloud.google.com/tpu/docs/v4 and v5e.
    """
    if target.chip.torus == 2:
        return size == 16
    return all(size % 4 == 0 for size in target.shape)
