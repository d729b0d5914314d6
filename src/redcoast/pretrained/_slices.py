"""Maps slices of an array to slices of its published tensors, and back."""

import itertools as it
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from ._tensors import Tensor, factor_sizes, ranges, tensor_name, tensor_sizes

Box = tuple[slice, ...]
Span = tuple[int, int]


@dataclass(frozen=True)
class SlicesToBox:
    """Converts stacked slices of tensors to a box of the array, for NumPy and JAX arrays.

    The dimensions of the tensors are split into factors and sliced, transposed, merged into the
    dimensions of the array, and sliced again.
    """

    split: tuple[int, ...]
    cut: tuple[Span, ...]
    order: tuple[int, ...]
    merged: tuple[int, ...]
    trim: tuple[Span, ...]
    shape: tuple[int, ...]

    def __call__(self, read: Any) -> Any:
        x = read.reshape(self.split)[tuple(slice(*span) for span in self.cut)]
        x = x.transpose(self.order).reshape(self.merged)
        return x[tuple(slice(*span) for span in self.trim)].reshape(self.shape)


@dataclass(frozen=True)
class Window:
    """The data to read for a box of an array: the same slices of several tensors."""

    names: tuple[str, ...]
    slices: Box
    place: SlicesToBox


def locate(tensor: Tensor, leaf_shape: tuple[int, ...], box: Box) -> Window:
    """Locates a box of an array (one slice for each dimension) in its tensors."""
    sizes = factor_sizes(tensor, leaf_shape)
    box = tuple(slice(*part.indices(n)[:2]) for part, n in zip(box, leaf_shape, strict=True))
    lead = len(tensor.fields)
    at = it.product(*(range(part.start, part.stop) for part in box[:lead]))
    read = tuple(tensor_name(tensor, index) for index in at)
    right = [_part(g, part, sizes) for g, part in zip(tensor.right, box[lead:], strict=True)]
    spans = {f: (i[0], i[0] + 1) for f, i in tensor.fixed if isinstance(i, tuple)}
    spans = spans | {"1": (0, 1)} | {f: span for found, _, _ in right for f, span in found.items()}
    for f, first in ranges(tensor).items():
        spans[f] = (first + spans[f][0], first + spans[f][1])
    sizes = tensor_sizes(tensor, sizes)
    left = [_covering_slice(group, spans, sizes) for group in tensor.left]
    factors, moved = [*it.chain(*tensor.left)], [f for f in it.chain(*tensor.right) if f != "1"]
    rest = [i for i, f in enumerate(factors) if f not in moved]
    place = SlicesToBox(
        split=(len(read), *(n for _, extents, _ in left for n in extents)),
        cut=((0, len(read)), *(span for _, _, cuts in left for span in cuts)),
        order=(0, *(1 + i for i in rest), *(1 + factors.index(f) for f in moved)),
        merged=(len(read), *(size for _, size, _ in right)),
        trim=((0, len(read)), *(trim for _, _, trim in right)),
        shape=tuple(part.stop - part.start for part in box),
    )
    return Window(read, tuple(part for part, _, _ in left), place)


def _part(
    group: tuple[str, ...], part: slice, sizes: dict[str, int]
) -> tuple[dict[str, Span], int, Span]:
    """For a slice of one dimension of the array, returns the span of each factor that it needs, the
    product of these spans, and the span of the slice in it."""
    first, *others = group
    inner = prod(sizes[f] for f in others)
    low, high = part.start // inner, -(-part.stop // inner)
    spans = {first: (low, high)} | {f: (0, sizes[f]) for f in others}
    trim = (part.start - low * inner, part.stop - low * inner)
    return spans, (high - low) * inner, trim


def _covering_slice(
    group: tuple[str, ...], spans: dict[str, Span], sizes: dict[str, int]
) -> tuple[slice, list[int], list[Span]]:
    """For spans of the factors of one dimension of a tensor, returns a slice that covers them, the
    extents of the factors in that slice, and the span of each factor in it."""
    inner = [prod(sizes[f] for f in group[i + 1 :]) for i in range(len(group))]
    # A slice cuts only one factor. Factors that vary faster are complete in it; those that vary
    # slower have a single index.
    wide = [i for i, f in enumerate(group) if spans[f][1] - spans[f][0] > 1]
    cut = wide[0] if wide else len(group) - 1
    start = sum(spans[f][0] * inner[i] for i, f in enumerate(group[: cut + 1]))
    low, high = spans[group[cut]]
    extents = [1] * cut + [high - low] + [sizes[f] for f in group[cut + 1 :]]
    wanted = [(0, n) for n in extents[: cut + 1]] + [spans[f] for f in group[cut + 1 :]]
    return slice(start, start + (high - low) * inner[cut]), extents, wanted


def reading_order(tensor: Tensor) -> tuple[int, ...]:
    """Returns the dimensions of the array in the memory order of its tensors, slowest first."""
    rank = {f: i for i, f in enumerate(it.chain(*tensor.left))}
    lead = len(tensor.fields)
    where = [min((rank[f] for f in group if f in rank), default=0) for group in tensor.right]
    return (*range(lead), *(lead + d for d in sorted(range(len(where)), key=where.__getitem__)))


def insert(tensor: Tensor, part: np.ndarray, out: np.ndarray) -> None:
    """Writes the part of an array at one index of its leading dimensions into its tensor."""
    lead = (1,) * len(tensor.fields)
    sizes = factor_sizes(tensor, lead + part.shape)
    factors, moved = [*it.chain(*tensor.left)], [f for f in it.chain(*tensor.right) if f != "1"]
    at = {f: i[0] for f, i in tensor.fixed if isinstance(i, tuple)} | {"1": 0}
    at |= {f: slice(i, i + sizes[f]) for f, i in ranges(tensor).items()}
    extents = tensor_sizes(tensor, sizes)
    view = out.reshape([extents[f] for f in factors])  # a view, since `out` is contiguous
    order = [moved.index(f) for f in factors if f in moved]
    source = part.reshape([sizes[f] for f in moved]).transpose(order)
    view[tuple(at.get(f, slice(None)) for f in factors)] = source
