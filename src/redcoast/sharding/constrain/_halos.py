"""Halos: what a device needs of the neighbouring parts of an array that is split in order."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P


@dataclass(frozen=True)
class SplitWindow:
    """A convolution along one dimension of the image, divided over the devices of `axes`.

    The image has `size` elements, the result `of_result`, and a device a part of each. The last
    parts have fewer elements, if these do not divide. A device has elements before and after its
    own, of one or more neighbours: `left` and `right`, fewer than its own if they are negative. It
    reads `length` of these, `step` further on in each part, and pads them with `padding`.
    """

    dim: int
    axes: tuple[str, ...]
    size: int
    of_result: int
    count: int
    length: int
    left: int = 0
    right: int = 0
    step: int = 0
    padding: tuple[int, int] = (0, 0)

    @property
    def own(self) -> int:
        return -(-self.size // self.count)


def split_spec(axes: Sequence[tuple[str, ...]]) -> P:
    return P(*[entry or None for entry in axes])


def in_equal_parts(x: jax.Array, windows: Sequence[SplitWindow], outside: float = 0) -> jax.Array:
    """An array with numbers `outside` at its end, so that its parts have the same size."""
    added = [(0, 0, 0)] * x.ndim
    for window in windows:
        added[window.dim] = (0, window.own * window.count - window.size, 0)
    if not any(map(any, added)):
        return x
    return jax.lax.pad(x, jnp.asarray(outside, x.dtype), added)


def without_rest(y: jax.Array, windows: Sequence[SplitWindow]) -> jax.Array:
    """A result without what `in_equal_parts` adds at its end."""
    sizes = list(y.shape)
    for window in windows:
        sizes[window.dim] = window.size
    if tuple(sizes) == y.shape:
        return y
    return jax.lax.slice(y, [0] * y.ndim, sizes)


def of_results(
    windows: Sequence[SplitWindow], dims: Sequence[int], other_dims: Sequence[int]
) -> list[SplitWindow]:
    """Windows with the size and the dimension of the result, or of a field, for the image's."""
    others: list[SplitWindow] = []
    for window in windows:
        dim = other_dims[dims.index(window.dim)]
        others.append(replace(window, dim=dim, size=window.of_result))
    return others


def with_halo(x: jax.Array, window: SplitWindow, outside: float = 0) -> jax.Array:
    """A part of an array, with elements of the neighbouring parts, or without some of its own.

    Devices at the edges get the number `outside`, which is the padding of the operation.
    """
    d, own, count = window.dim, x.shape[window.dim], window.count
    start, stop = max(0, -window.left), own - max(0, -window.right)
    # Whole parts of the next neighbours, and some rows of the one after these.
    left_parts, left_rows = divmod(max(0, window.left), own)
    right_parts, right_rows = divmod(max(0, window.right), own)
    # The transpose of a split is a concatenation, where slices are padded to the whole part each.
    cuts = sorted({0, start, own - left_rows, right_rows, stop, own})
    sizes = [end - begin for begin, end in pairwise(cuts)]
    pieces = dict(zip(cuts, jax.lax.split(x, sizes, axis=d), strict=False))
    at = jax.lax.axis_index(window.axes)

    def between(begin: int, end: int) -> list[jax.Array]:
        return [piece for cut, piece in pieces.items() if begin <= cut < end]

    def received(rows: list[jax.Array], distance: int) -> jax.Array:
        # (from, to): nobody sends to the devices at an edge, which receive zeros.
        pairs = [(i, i + distance) for i in range(count) if 0 <= i + distance < count]
        edge = jax.lax.ppermute(jnp.concatenate(rows, axis=d), window.axes, pairs)
        if outside:
            sender = at - distance
            is_outside = (sender < 0) | (sender >= count)
            edge = jnp.where(is_outside, jnp.asarray(outside, edge.dtype), edge)
        return edge

    in_order = between(start, stop)
    for distance in range(1, left_parts + 1):
        in_order.insert(0, received(between(0, own), distance))
    if left_rows:
        in_order.insert(0, received(between(own - left_rows, own), left_parts + 1))
    for distance in range(1, right_parts + 1):
        in_order.append(received(between(0, own), -distance))
    if right_rows:
        in_order.append(received(between(0, right_rows), -right_parts - 1))
    y = jnp.concatenate(in_order, axis=d)
    if not window.step:
        return y
    # With a negative step, the last device begins at 0 and the first one furthest on.
    begin = at * window.step - min(0, window.step * (count - 1))
    return jax.lax.dynamic_slice_in_dim(y, begin, window.length, axis=d)
