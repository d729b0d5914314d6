"""Sends the parts of a matrix to the device that computes with it, and the results back.

Several matrices of one shape are divided over the devices. A device takes its matrices from an
array that is replicated, without communication, and the results are all-gathered. Of an array
whose matrices are divided into parts, the devices send each other these parts in one all-to-all,
and those of the results in another one. What is sent is written into the program, so that it does
not depend on the compiler, and a plan can count it.

The functions here run inside of `jax.shard_map`, on the arrays of one device.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from math import prod

import jax
import jax.numpy as jnp
from jaxtyping import Array

Axes = tuple[str, ...]


@dataclass(frozen=True)
class MatrixLayout:
    """How an array of several matrices is stored on a mesh.

    - `order`: the dimensions of the array: those along which matrices are stacked, and then those
        of one matrix.
    - `shape`: the shape of one matrix, for which dimensions of the array may be merged.
    - `stack`: the sizes of the stacked dimensions, and the axes over which each is sharded.
    - `sizes`: the sizes of the dimensions of one matrix, and `axes` those of the mesh over which
        each is sharded.
    """

    order: tuple[int, ...]
    shape: tuple[int, ...]
    stack: tuple[tuple[int, Axes], ...]
    sizes: tuple[int, ...]
    axes: tuple[Axes, ...]

    @property
    def count(self) -> int:
        """The number of matrices."""
        return prod(size for size, _ in self.stack)

    @property
    def stack_axes(self) -> Axes:
        """The axes over which the matrices are divided as they are stored."""
        return tuple(chain.from_iterable(axes for _, axes in self.stack))

    @property
    def matrix_axes(self) -> Axes:
        """The axes over which each matrix is divided as it is stored."""
        return tuple(chain.from_iterable(self.axes))

    def local_count(self, mesh: Mapping[str, int]) -> int:
        """The number of matrices that a device stores, or stores parts of."""
        return self.count // size_of(self.stack_axes, mesh)

    def local_sizes(self, mesh: Mapping[str, int]) -> tuple[int, ...]:
        """The sizes of the part of a matrix that a device stores."""
        pairs = zip(self.sizes, self.axes, strict=True)
        return tuple(size // size_of(axes, mesh) for size, axes in pairs)


def sizes_along(axes: Iterable[str], mesh: Mapping[str, int]) -> list[int]:
    """The number of devices along each of the axes."""
    return [mesh[axis] for axis in axes]


def size_of(axes: Iterable[str], mesh: Mapping[str, int]) -> int:
    """The number of devices along all of the axes."""
    return prod(sizes_along(axes, mesh))


@dataclass(frozen=True)
class MatrixPlace:
    """Where some matrices are among those of all devices.

    They are divided over the devices along `axes`. In each of `rounds`, every device has one. Those
    that remain are in a round of their own, or in one that others fill as well: this one is number
    `last`, and the first of them is on the device with the number `offset`.
    """

    axes: Axes
    count: int
    rounds: int
    rest: int
    last: int
    offset: int


def find_places(
    counts: Sequence[tuple[Axes, int]], mesh: Mapping[str, int]
) -> tuple[list[MatrixPlace], int]:
    """The places of groups of matrices that are divided over axes, and how many last rounds there
    are."""
    places: list[MatrixPlace] = []
    # The axes of each last round, and how many of its devices have a matrix.
    filled: list[tuple[Axes, int]] = []
    for axes, count in counts:
        devices = size_of(axes, mesh)
        rounds, rest = divmod(count, devices)
        last = offset = 0
        if rest:
            last = len(filled)
            for number, (others, filled_devices) in enumerate(filled):
                if others == axes and filled_devices + rest <= devices:
                    last, offset = number, filled_devices
                    break
            filled[last:] = [(axes, offset + rest), *filled[last + 1 :]]
        places.append(MatrixPlace(axes, count, rounds, rest, last, offset))
    return places, len(filled)


def to_owners(x: Array, layout: MatrixLayout, place: MatrixPlace, mesh: Mapping[str, int]) -> Array:
    """The matrices that this device computes with, `(rounds, *layout.shape)`, with one round more
    if matrices remain. In it, devices without a matrix have zeros.

    `x` has the part of each matrix that this device stores, `(matrices, *sizes)`.
    """
    sizes = layout.local_sizes(mesh)
    if 0 in layout.shape:
        return jnp.zeros((place.rounds + (place.rest > 0), *layout.shape), x.dtype)
    axes = _sent_over(layout, place)
    part_axes = [axis for axis in axes if axis in layout.matrix_axes]
    x = _in_rounds(x, place, size_of(axes, mesh))
    rounds = x.shape[0]
    x = x.reshape(rounds, *sizes_along(axes, mesh), *sizes)
    # Of what is replicated, this device takes what it computes with.
    dim = 1
    for axis in axes:
        if axis in part_axes:
            dim += 1
        else:
            x = jax.lax.dynamic_index_in_dim(x, jax.lax.axis_index(axis), dim, keepdims=False)
    if part_axes:
        x = x.reshape(rounds, size_of(part_axes, mesh), *sizes)
        x = jax.lax.all_to_all(x, tuple(part_axes), 1, 1, tiled=True)
    # (rounds, the devices that sent a part, along each axis, the sizes of a part)
    x = x.reshape(rounds, *sizes_along(part_axes, mesh), *sizes)
    x = x.transpose(_order_of_parts(layout, part_axes))
    return x.reshape(rounds, *layout.shape)


def from_owners(
    y: Array, layout: MatrixLayout, place: MatrixPlace, mesh: Mapping[str, int]
) -> Array:
    """The inverse of `to_owners`."""
    sizes = layout.local_sizes(mesh)
    if 0 in layout.shape:
        stored = place.count // size_of(set(place.axes) & set(layout.stack_axes), mesh)
        return jnp.zeros((stored, *sizes), y.dtype)
    axes = _sent_over(layout, place)
    part_axes = [axis for axis in axes if axis in layout.matrix_axes]
    replicated = [axis for axis in axes if axis not in layout.matrix_axes]
    rounds = y.shape[0]
    split: list[int] = []
    for size, of_dimension in zip(sizes, layout.axes, strict=True):
        split += sizes_along(of_dimension, mesh)
        split.append(size)
    order = _order_of_parts(layout, part_axes)
    # The places of the dimensions in the order, by dimension.
    inverse = sorted(range(len(order)), key=order.__getitem__)
    # (rounds, the devices that receive a part, along each axis, the sizes of a part)
    y = y.reshape(rounds, *split).transpose(inverse)
    if part_axes:
        y = y.reshape(rounds, size_of(part_axes, mesh), *sizes)
        y = jax.lax.all_to_all(y, tuple(part_axes), 1, 1, tiled=True)
    y = y.reshape(rounds, *sizes_along(part_axes, mesh), *sizes)
    if replicated:
        # (the devices along each replicated axis, rounds, those along the others, sizes)
        y = jax.lax.all_gather(y, tuple(replicated))
        y = y.reshape(*sizes_along(replicated, mesh), rounds, *y.shape[2:])
    # The device of a matrix, along each axis in the order of the mesh, follows its round.
    order = [len(replicated)]
    for axis in axes:
        if axis in replicated:
            order.append(replicated.index(axis))
        else:
            order.append(len(replicated) + 1 + part_axes.index(axis))
    y = y.transpose(*order, *range(len(order), y.ndim))
    y = y.reshape(rounds, size_of(axes, mesh), *sizes)
    return _out_of_rounds(y, place)


def _sent_over(layout: MatrixLayout, place: MatrixPlace) -> Axes:
    """The axes over which the matrices of an array are divided only to compute with them."""
    return tuple(axis for axis in place.axes if axis not in layout.stack_axes)


def _in_rounds(x: Array, place: MatrixPlace, devices: int) -> Array:
    """Matrices as `(rounds, devices, ...)`, with zeros where there is none."""
    sizes = x.shape[1:]
    if not place.rest:
        # Of a stack that the devices divide, each has neighbours, as it is stored then.
        return x.reshape(devices, -1, *sizes).swapaxes(0, 1)
    end = devices - place.offset - place.rest
    full = place.rounds * devices
    empty = [(0, 0)] * len(sizes)
    rest = jnp.pad(x[full:], ((place.offset, end), *empty))
    return jnp.concatenate([x[:full], rest]).reshape(place.rounds + 1, devices, *sizes)


def _out_of_rounds(x: Array, place: MatrixPlace) -> Array:
    """The inverse of `_in_rounds`."""
    sizes = x.shape[2:]
    if not place.rest:
        return x.swapaxes(0, 1).reshape(-1, *sizes)
    full = x[: place.rounds].reshape(-1, *sizes)
    rest = x[place.rounds, place.offset : place.offset + place.rest]
    return jnp.concatenate([full, rest])


def _order_of_parts(layout: MatrixLayout, part_axes: Sequence[str]) -> list[int]:
    """Dimensions in an order in which those of the parts are before those that they divide.

    Before, they are a round, the senders along each of the axes, and the sizes of a part.
    """
    order = [0]
    for d, axes in enumerate(layout.axes):
        order += [1 + part_axes.index(axis) for axis in axes]
        order.append(1 + len(part_axes) + d)
    return order
