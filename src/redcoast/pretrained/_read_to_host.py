"""Reads arrays to CPU devices, directly into the memory of the arrays."""

from collections.abc import Mapping

import jax
import numpy as np

from ..core._iterate import map_in_threads
from ._lazy_tensor import Stored, aligned_empty, split_box
from ._read_plan import THREADS, ArrayToRead, ReadStep, read_window, steps_of

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
            on_devices = {d: jax.device_put(of_start[a], d) for d, a in target.starts.items()}
            arrays[step.path] = target.assemble(on_devices)
    return {path: arrays[path] for path in targets}


def copy_across(source: np.ndarray, target: np.ndarray) -> None:
    """Copies an array into one with another memory order."""
    # NumPy copies extension types such as bfloat16 element by element.
    bits = f"u{source.dtype.itemsize}"
    source, target = source.view(bits), target.view(bits)
    # A few rows of the source at a time, so that the written part of the target stays in the cache.
    slowest = sorted(range(source.ndim), key=lambda d: -source.strides[d])
    for box in split_box(source.shape, slowest, CACHED):
        target[box] = source[box]
