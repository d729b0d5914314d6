"""Numbers of devices along axes of a mesh, whose `sizes` are by axis."""

from collections.abc import Mapping, Sequence
from math import prod


def parts(axes: Sequence[str], sizes: Mapping[str, int]) -> int:
    """The number of devices of these axes together."""
    return prod(map(sizes.__getitem__, axes))


def used_axes(axes: Sequence[str], sizes: Mapping[str, int]) -> tuple[str, ...]:
    """Those of the axes that have more than one device."""
    return tuple(axis for axis in axes if sizes[axis] > 1)
