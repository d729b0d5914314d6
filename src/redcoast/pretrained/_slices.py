"""Maps slices of an array to slices of its published tensors, and back."""

import functools as ft
import itertools as it
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..models._inputs import AnyArray
from ._tensors import Tensor, factor_sizes, product_of, ranges, tensor_name, tensor_sizes

Box = tuple[slice, ...]
Span = tuple[int, int]


@dataclass(frozen=True)
class SlicesToBox:
    """Converts stacked slices of tensors to a box of the array, for NumPy and JAX arrays.

    The dimensions of the tensors are split into factors and sliced, transposed, merged into the
    dimensions of the array, and sliced again.
    """

    split: tuple[int, ...]  # the tensors, and the factors of their dimensions
    cut: tuple[Span, ...]  # of each factor
    order: tuple[int, ...]  # of the factors in the array
    merged: tuple[int, ...]  # the tensors, and the dimensions of the array
    trim: tuple[Span, ...]  # of each dimension
    shape: tuple[int, ...]  # of the box

    def __call__(self, tensors: AnyArray) -> Any:
        x = tensors.reshape(self.split)[_slices(self.cut)]
        x = x.transpose(self.order).reshape(self.merged)
        return x[_slices(self.trim)].reshape(self.shape)


def _slices(spans: Iterable[Span]) -> Box:
    return tuple(it.starmap(slice, spans))


@dataclass(frozen=True)
class Window:
    """The data to read for a box of an array: the same slices of several tensors."""

    names: tuple[str, ...]
    slices: Box
    place: SlicesToBox


# For `model.layers.{layer}.q_proj.weight` with the pattern
# `(heads head_dim) width -> width heads head_dim`, the box of layers 2 and 3 and of heads 8 to 16
# is the rows `8 * head_dim` to `16 * head_dim`, all columns, of two tensors. Stacked, they are
# (2, 8 * head_dim, width), split into (2, 8, head_dim, width), and transposed to
# (2, width, 8, head_dim).
def locate(tensor: Tensor, leaf_shape: tuple[int, ...], box: Box) -> Window:
    """Locates a box of an array (one slice for each dimension) in its tensors."""
    sizes = factor_sizes(tensor, leaf_shape)
    bounds = [part.indices(size)[:2] for part, size in zip(box, leaf_shape, strict=True)]
    lead = len(tensor.fields)
    # Each index of the leading dimensions is a tensor of its own.
    indices = it.product(*it.starmap(range, bounds[:lead]))
    names = tuple(map(ft.partial(tensor_name, tensor), indices))
    # The span of each factor in the tensors. The array has one index of a fixed factor.
    spans: dict[str, Span] = {"1": (0, 1)}
    for factor, fixed in tensor.fixed:
        if isinstance(fixed, tuple):
            spans[factor] = (fixed[0], fixed[0] + 1)
    merged, trim = [len(names)], [(0, len(names))]
    for (first, *others), (start, stop) in zip(tensor.right, bounds[lead:], strict=True):
        inner = product_of(others, sizes)
        # Whole indices of the slowest factor; the others are needed completely.
        low, high = start // inner, -(-stop // inner)
        spans[first] = (low, high)
        for factor in others:
            spans[factor] = (0, sizes[factor])
        merged.append((high - low) * inner)
        trim.append((start - low * inner, stop - low * inner))
    # An array with a range of a factor begins within the tensor.
    for factor, shift in ranges(tensor).items():
        low, high = spans[factor]
        spans[factor] = (shift + low, shift + high)
    sizes = tensor_sizes(tensor, sizes)
    slices, split, cut = [], [len(names)], [(0, len(names))]
    for group in tensor.left:
        # A slice cuts only one factor. Factors that vary faster are complete in it; those that vary
        # slower have a single index.
        at = 0
        while at < len(group) - 1 and spans[group[at]][1] - spans[group[at]][0] <= 1:
            at += 1
        faster, (low, high) = group[at + 1 :], spans[group[at]]
        inner = product_of(faster, sizes)
        start = 0
        for factor in group[: at + 1]:
            # The index in row-major order, of the factors until now.
            start = start * sizes[factor] + spans[factor][0]
        slices.append(slice(start * inner, (start + high - low) * inner))
        # The extents of the factors in that slice, and the span of each in it.
        extents = [*[1] * at, high - low]
        split += extents
        cut += [(0, extent) for extent in extents]
        for factor in faster:
            split.append(sizes[factor])
            cut.append(spans[factor])
    factors, moved = _factors(tensor)
    # The first dimension counts tensors. Then come the factors that the array has one index of,
    # which are merged away.
    order = [0]
    for i, factor in enumerate(factors, start=1):
        if factor not in moved:
            order.append(i)
    for factor in moved:
        order.append(1 + factors.index(factor))
    shape = tuple(high - low for low, high in bounds)
    place = SlicesToBox(tuple(split), tuple(cut), tuple(order), tuple(merged), tuple(trim), shape)
    return Window(names, tuple(slices), place)


def _factors(tensor: Tensor) -> tuple[list[str], list[str]]:
    """The factors of the tensors, and those of the array, without the placeholder 1."""
    moved = [factor for factor in it.chain(*tensor.right) if factor != "1"]
    return [*it.chain(*tensor.left)], moved


def reading_order(tensor: Tensor) -> tuple[int, ...]:
    """Returns the dimensions of the array in the memory order of its tensors, slowest first."""
    factors, lead = [*it.chain(*tensor.left)], len(tensor.fields)

    def slowest(dim: int) -> int:
        ranks = [factors.index(factor) for factor in tensor.right[dim - lead] if factor in factors]
        return min(ranks, default=0)

    dims = range(lead, lead + len(tensor.right))
    return (*range(lead), *sorted(dims, key=slowest))


def insert(tensor: Tensor, part: np.ndarray, out: np.ndarray) -> None:
    """Writes the part of an array at one index of its leading dimensions into its tensor."""
    lead = (1,) * len(tensor.fields)
    sizes = factor_sizes(tensor, lead + part.shape)
    factors, moved = _factors(tensor)
    at: dict[str, int | slice] = {"1": 0}
    for factor, fixed in tensor.fixed:
        if isinstance(fixed, tuple):
            at[factor] = fixed[0]
    for factor, first in ranges(tensor).items():
        at[factor] = slice(first, first + sizes[factor])
    extents = tensor_sizes(tensor, sizes)
    shape, index, order = [], [], []
    for factor in factors:
        shape.append(extents[factor])
        index.append(at.get(factor, slice(None)))
        if factor in moved:
            order.append(moved.index(factor))
    view = out.reshape(shape)  # not a copy, since `out` is contiguous
    moved_shape = [sizes[factor] for factor in moved]
    view[tuple(index)] = part.reshape(moved_shape).transpose(order)
