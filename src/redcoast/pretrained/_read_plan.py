"""The arrays to create from files, the steps to read them, and reads of all or one of the layers of
an array."""

import functools as ft
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from ._lazy_tensor import Stored, aligned_empty, box_shape, split_box
from ._slices import Box, Window, locate, reading_order
from ._tensors import Tensor, tensor_names

# Threads that read, and steps that are read before they are needed.
_WORKERS = min(4, os.cpu_count() or 1)
THREADS: dict[str, Any] = {"workers": _WORKERS, "ahead": _WORKERS, "name": "redcoast-read"}


@dataclass(frozen=True)
class ArrayToRead:
    """An array to create, its tensors, and its sharding: each device holds a box of it.

    It may be a part of the array of the tensors, which has `first` more elements before it, and
    `layers` elements in all, along its first dimension.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    tensor: Tensor
    sharding: Sharding
    first: int = 0
    layers: int | None = None

    def layers_from(self, first: int, count: int) -> "ArrayToRead":
        """A part of the array along its first dimension, which is not sharded."""
        shape = (count, *self.shape[1:])
        return replace(self, shape=shape, first=first, layers=self.shape[0])

    @ft.cached_property
    def starts(self) -> dict[Any, tuple[int, ...]]:
        """The start indices of the box of each device of this process."""
        boxes = self.sharding.addressable_devices_indices_map(self.shape)
        starts: dict[Any, tuple[int, ...]] = {}
        for device, box in boxes.items():
            start = tuple(part.start or 0 for part in box or ())  # `None` along whole dimensions
            if self.layers is not None:
                start = (self.first + start[0], *start[1:])
            starts[device] = start
        return starts

    @ft.cached_property
    def distinct_starts(self) -> list[tuple[int, ...]]:
        """The start indices without duplicates, which replicated boxes have."""
        return list(dict.fromkeys(self.starts.values()))

    @ft.cached_property
    def box_shape(self) -> tuple[int, ...]:
        return self.sharding.shard_shape(self.shape)

    def assemble(self, boxes: Mapping[Any, jax.Array]) -> jax.Array:
        shards = [boxes[device] for device in self.starts]
        return jax.make_array_from_single_device_arrays(self.shape, self.sharding, shards)


@dataclass(frozen=True)
class ReadStep:
    """One part of every box, and the window to read for it in each distinct box."""

    path: str
    part: Box
    windows: tuple[Window, ...]
    last: bool  # whether it is the last step of its array


def steps_of(path: str, target: ArrayToRead, most: int) -> Iterator[ReadStep]:
    """Yields the steps of an array, in the order of storage. Each step reads at most `most`
    elements of a box."""
    parts = split_box(target.box_shape, reading_order(target.tensor), most)
    shape = target.shape
    if target.layers is not None:  # that of the array of the tensors
        shape = (target.layers, *shape[1:])
    for i, part in enumerate(parts, 1):
        windows = []
        for start in target.distinct_starts:
            # The same part of each box, as a box of the array.
            box: list[slice] = []
            for first, of_box in zip(start, part, strict=True):
                box.append(slice(first + of_box.start, first + of_box.stop))
            windows.append(locate(target.tensor, shape, tuple(box)))
        yield ReadStep(path, part, tuple(windows), i == len(parts))


def read_window(window: Window, dtype: np.dtype, stored: Mapping[str, Stored]) -> np.ndarray:
    """Reads the same slices of several tensors and stacks them; casts to `dtype` if the dtypes of
    the tensors differ."""
    dtypes = {stored[name].dtype for name in window.names}
    if len(dtypes) == 1:
        dtype = dtypes.pop()
    out = aligned_empty([len(window.names), *box_shape(window.slices)], dtype)
    for i, name in enumerate(window.names):
        row = out[i, ...]  # an array also if the tensor is a single number
        if stored[name].dtype == dtype:
            stored[name].read(window.slices, row)
        else:
            row[...] = stored[name].take(window.slices)
    return out


def read_whole(
    tensor: Tensor, leaf: jax.Array | np.ndarray, stored: Mapping[str, Stored]
) -> jax.Array | np.ndarray:
    """Reads the tensors of an array; tensors that the file lacks are taken from `leaf`."""
    names = tensor_names(tensor, leaf.shape)
    # The whole array at once, with the dtype and the sharding of the model's.
    if stored.keys() >= {*names.values()}:
        window = locate(tensor, leaf.shape, tuple(map(slice, leaf.shape)))
        read = read_window(window, leaf.dtype, stored)
        array = window.place(read).astype(leaf.dtype)
        if isinstance(leaf, jax.Array):
            return jax.device_put(array, leaf.sharding)
        return array
    # The layers that are not in the file stay as they are.
    for index, name in names.items():
        if name in stored:
            part = read_at(tensor, leaf.shape, index, stored).astype(leaf.dtype)
            leaf = jnp.asarray(leaf).at[index].set(part)
    return leaf


def read_at(
    tensor: Tensor, shape: tuple[int, ...], index: tuple[int, ...], stored: Mapping[str, Stored]
) -> np.ndarray:
    """Reads an array of this shape at one index of its leading dimensions."""
    rest = shape[len(index) :]
    at = tuple(slice(i, i + 1) for i in index)
    window = locate(tensor, shape, (*at, *map(slice, rest)))
    # One tensor, as a stack of one.
    part = window.place(stored[window.names[0]].take(window.slices)[None])
    return part.reshape(rest)
