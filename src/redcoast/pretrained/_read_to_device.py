"""Reads arrays to accelerators in pieces, so that the host never stores a large array."""

import functools as ft
from collections.abc import Mapping
from math import prod

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ..core._iterate import map_in_threads
from ._lazy_tensor import Stored, aligned_empty, split_box
from ._read_plan import THREADS, ArrayToRead, ReadStep, read_window, steps_of
from ._slices import SlicesToBox


def fill_device(
    targets: Mapping[str, ArrayToRead], stored: Mapping[str, Stored], *, most: int
) -> dict[str, jax.Array]:
    """Creates arrays, all over the same devices, reading at most `most` elements at once."""
    # A mesh of its own: the mesh of the model need not have its axes here, and only the devices of
    # this process are written.
    devices = tuple(next(iter(targets.values())).starts)
    mesh = Mesh(np.array(devices), ("device",))
    small, large = {}, {}
    for path, target in targets.items():
        if prod(target.box_shape) <= most:
            small[path] = target
        else:
            large[path] = target
    buffers = _zeros(large, mesh)
    arrays: dict[str, jax.Array] = {}

    def read(step: ReadStep) -> tuple[ReadStep, list[np.ndarray], SlicesToBox | None]:
        return step, *_read(step, targets[step.path], stored, small=step.path in small)

    def steps():
        for path, target in targets.items():
            if path in small:
                yield from steps_of(path, target, most)
            else:
                # A step reads a piece for each device.
                yield from steps_of(path, target, max(1, most // len(devices)))

    for step, read_pieces, place in map_in_threads(read, steps(), **THREADS):
        target = targets[step.path]
        of_start = dict(zip(target.distinct_starts, read_pieces, strict=True))
        pieces = [of_start[target.starts[device]] for device in devices]
        pieces = jax.device_put(pieces, list(devices))
        if step.path in small:
            arrays[step.path] = target.assemble(dict(zip(devices, pieces, strict=True)))
            continue
        # The pieces of all devices as one array, concatenated along the first dimension.
        rows, *rest = pieces[0].shape
        shape, sharding = (mesh.size * rows, *rest), NamedSharding(mesh, P("device"))
        joined = jax.make_array_from_single_device_arrays(shape, sharding, pieces)
        # An argument of the program, as the piece is: one compilation serves all pieces of a shape.
        start = np.array([part.start for part in step.part], np.int32)
        buffer = _write(buffers[step.path], joined, start, place=place, mesh=mesh)
        # Waits, so that pieces do not accumulate on their way to the devices.
        buffers[step.path] = buffer.block_until_ready()
        if step.last:
            boxes = buffers.pop(step.path).addressable_shards
            arrays[step.path] = target.assemble({box.device: box.data for box in boxes})
    return arrays


def _read(
    step: ReadStep, target: ArrayToRead, stored: Mapping[str, Stored], *, small: bool
) -> tuple[list[np.ndarray], SlicesToBox | None]:
    """Returns the pieces for each distinct box, and how a device rearranges them."""
    pieces, places = [], []
    for window in step.windows:
        pieces.append(read_window(window, target.dtype, stored))
        places.append(window.place)
    # If all devices rearrange in the same way, one program is faster than the host.
    if len({*places}) == 1 and not small:
        return pieces, places[0]
    placed = []
    for place, piece in zip(places, pieces, strict=True):
        contiguous = np.ascontiguousarray(place(piece))
        placed.append(contiguous.astype(target.dtype, copy=False))
    return placed, None


def _zeros(targets: Mapping[str, ArrayToRead], mesh: Mesh) -> dict[str, jax.Array]:
    """Allocates the boxes of all devices, concatenated along the first dimension."""

    def shape(target: ArrayToRead) -> tuple[int, ...]:
        rows, *rest = target.box_shape
        return (mesh.size * rows, *rest)

    # One program for all arrays: a compilation takes as long as reading 100 MB.
    shapes = {path: jax.ShapeDtypeStruct(shape(t), t.dtype) for path, t in targets.items()}
    create = ft.partial(jax.tree.map, jnp.zeros_like, shapes)
    return jax.jit(create, out_shardings=NamedSharding(mesh, P("device")))()


# The buffer is donated, so it is changed in place.
@ft.partial(jax.jit, static_argnames=("place", "mesh"), donate_argnums=0)
def _write(
    buffer: jax.Array, pieces: jax.Array, start: jax.Array, *, place: SlicesToBox | None, mesh: Mesh
) -> jax.Array:
    """Writes one piece into the box of each device, at the same position in each."""

    def write(box, piece, start):
        if place is not None:
            piece = place(piece)
        return jax.lax.dynamic_update_slice(box, piece.astype(box.dtype), list(start))

    # One program for all devices, instead of a compilation for each.
    along = P("device")
    each = jax.shard_map(write, mesh=mesh, in_specs=(along, along, P()), out_specs=along)
    return each(buffer, pieces, start)


CACHED = 2**15  # elements that fit into a processor's cache


def fill_host(
    targets: Mapping[str, ArrayToRead], stored: Mapping[str, Stored], *, most: int
) -> dict[str, jax.Array]:
    """Creates arrays, reading at most `most` elements at once in each thread."""
    boxes: dict[str, list[np.ndarray]] = {}
    arrays: dict[str, jax.Array] = {}

    def write(step: ReadStep) -> ReadStep:
        target = targets[step.path]
        for box, window in zip(boxes[step.path], step.windows, strict=True):
            read = read_window(window, target.dtype, stored).astype(target.dtype, copy=False)
            copy_across(window.place(read), box[step.part])
        return step

    def steps():
        for path, target in targets.items():
            # When its first step is near, so that arrays that wait take no memory.
            boxes[path] = [
                aligned_empty(target.box_shape, target.dtype) for _ in target.distinct_starts
            ]
            yield from steps_of(path, target, most)

    for step in map_in_threads(write, steps(), **THREADS):
        if step.last:
            target = targets[step.path]
            of_start = dict(zip(target.distinct_starts, boxes.pop(step.path), strict=True))
            # The boxes are aligned, so JAX uses them without a copy.
            on_devices = {}
            for device, start in target.starts.items():
                on_devices[device] = jax.device_put(of_start[start], device)
            arrays[step.path] = target.assemble(on_devices)
    return arrays


def copy_across(source: np.ndarray, target: np.ndarray) -> None:
    """Copies an array into one with another memory order."""
    # NumPy copies extension types such as bfloat16 element by element.
    bits = f"u{source.dtype.itemsize}"
    source, target = source.view(bits), target.view(bits)
    # A few rows of the source at a time, so that the written part of the target stays in the cache.
    slowest = sorted(range(source.ndim), key=lambda d: -source.strides[d])
    for box in split_box(source.shape, slowest, CACHED):
        target[box] = source[box]
