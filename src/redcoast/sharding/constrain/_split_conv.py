"""Runs convolutions and pooling of split examples in `jax.shard_map`.

XLA gathers the operands of grouped and of transposed convolutions whose space is split. Here every
device gets the rows that its windows need from its neighbours, and computes its part of the result.

XLA splits the space of other convolutions well. But if the devices along an axis of the mesh have
the same part of the space, it adds terms of the kernel's gradient, or of the result, once for each
of them (JAX 0.10.2 to 0.12). These axes are therefore those of `jax.shard_map`, inside of which XLA
splits over the axes of the space alone. Of pooling with windows that overlap it loses parts of the
gradient.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from ...core._control_flow import primitive_name
from .._mesh_axes import parts, used_axes
from ..operations import makes_kernel
from ..program._trace import Arrays
from ..tree._overrides import spec_axes
from ._bound_equation import BoundEquation
from ._grouped_conv import is_grouped, spec_of_two

_PARAMS = (
    "rhs_dilation",
    "window_strides",
    "lhs_dilation",
    "dimension_numbers",
    "feature_group_count",
    "precision",
    "preferred_element_type",
)


@dataclass(frozen=True)
class _Window:
    """A convolution along one dimension of the image, divided over the devices of `axes`.

    A device has elements before and after its own, `left` and `right` (fewer than its own, if they
    are negative), and pads these with `padding`.
    """

    dim: int
    axes: tuple[str, ...]
    left: int
    right: int
    padding: tuple[int, int]


def run_split_conv(bound: BoundEquation) -> Arrays | None:
    """The results of a convolution whose space is split; None if it is not, or XLA does as well."""
    equation, shardings = bound.equation, bound.shardings
    if not shardings.splits_examples:
        return None
    if makes_kernel(equation):
        return _kernel_gradient(bound)
    values = [*bound.values, *bound.results]  # of the image, of the kernel and of the result
    params, numbers = equation.params, equation.params["dimension_numbers"]
    groups = params["feature_group_count"]
    if groups == 1 and max(params["lhs_dilation"], default=1) == 1:
        return None
    if params["batch_group_count"] > 1 or any(shardings.spec(values[1])):
        return None
    image, result = shardings.spec(values[0]), shardings.spec(values[2])
    batch, channel = numbers.lhs_spec[:2]
    windows, padding = [], list(params["padding"])
    into, out = [None] * len(image), [None] * len(result)
    if image[batch] == result[numbers.out_spec[0]]:
        into[batch] = out[numbers.out_spec[0]] = image[batch]
    # Tensor-parallel channels are left to XLA.
    if image[channel] is not None:
        return None
    # Each spatial dimension, as a dimension of the image, of the kernel and of the result.
    spatial = zip(numbers.lhs_spec[2:], numbers.rhs_spec[2:], numbers.out_spec[2:], strict=True)
    for at, dims in enumerate(spatial):
        image_dim, _, result_dim = dims
        entry = image[image_dim]
        if entry != result[result_dim]:
            return None
        if entry is None:
            continue
        axes = spec_axes(entry)
        count = parts(axes, shardings.mesh.shape)
        image_size, kernel_size, result_size = (
            value.shape[d] for value, d in zip(values, dims, strict=True)
        )
        sizes = (image_size, kernel_size, result_size)
        window = _window(params, at, image_dim, sizes, axes, count)
        if window is None:
            return None
        windows.append(window)
        padding[at] = window.padding
        into[image_dim], out[result_dim] = entry, entry
    if not windows:
        return None
    static = {name: params[name] for name in _PARAMS}

    def local(x: jax.Array, kernel: jax.Array) -> jax.Array:
        for window in windows:
            x = _with_halo(x, window, shardings.mesh.shape)
        return jax.lax.conv_general_dilated(x, kernel, padding=padding, **static)

    run = jax.shard_map(local, mesh=shardings.mesh, in_specs=(P(*into), P()), out_specs=P(*out))
    return [run(*bound.operands)]


def _kernel_gradient(bound: BoundEquation) -> Arrays | None:
    """The gradient of a kernel in a program that has one, as a sum over the parts of the space.

    It is a convolution of the image with a field as large as that. XLA's own partitioning of it can
    end the process. A dimension whose parts need more than their neighbours is gathered.
    None if no space is split.
    """
    shardings, params = bound.shardings, bound.equation.params
    numbers, sizes = params["dimension_numbers"], shardings.mesh.shape
    values = [*bound.values, *bound.results]  # of the image, of the field and of the result
    image, field = map(shardings.spec, bound.values)
    if not any(field[d] for d in numbers.rhs_spec[2:]):
        return None
    of_image: list[object] = [None] * len(image)
    of_field: list[object] = [None] * len(field)
    summed: list[str] = []
    # Rows of the batch are summed over too.
    rows, field_rows = numbers.lhs_spec[1], numbers.rhs_spec[1]
    if image[rows] == field[field_rows]:
        of_image[rows] = of_field[field_rows] = image[rows]
        summed += spec_axes(image[rows])
    windows: list[_Window] = []
    padding = list(params["padding"])
    # The field moves over the image like a kernel, element by element.
    turned = {
        **params,
        "window_strides": params["rhs_dilation"],
        "rhs_dilation": params["window_strides"],
    }
    spatial = zip(numbers.lhs_spec[2:], numbers.rhs_spec[2:], numbers.out_spec[2:], strict=True)
    for at, (image_dim, field_dim, result_dim) in enumerate(spatial):
        entry = image[image_dim]
        if entry is None or entry != field[field_dim]:
            continue
        axes = spec_axes(entry)
        dims = (image_dim, result_dim, field_dim)
        in_order = (values[0], values[2], values[1])
        of_each = [value.shape[d] for value, d in zip(in_order, dims, strict=True)]
        window = _window(turned, at, image_dim, of_each, axes, parts(axes, sizes))
        if window is not None:
            windows.append(window)
            padding[at] = window.padding
            of_image[image_dim] = of_field[field_dim] = entry
            summed += axes
    static = {name: params[name] for name in _PARAMS}

    def local(x: jax.Array, field: jax.Array) -> jax.Array:
        for window in windows:
            x = _with_halo(x, window, sizes)
        y = jax.lax.conv_general_dilated(x, field, padding=padding, **static)
        if summed:
            y = jax.lax.psum(y, tuple(summed))
        return y

    in_specs = P(*of_image), P(*of_field)
    run = jax.shard_map(local, mesh=shardings.mesh, in_specs=in_specs, out_specs=P())
    return [run(*bound.operands)]


def run_beside_space(bound: BoundEquation) -> Arrays | None:
    """The results of a convolution whose space is split, with all axes that do not split it those
    of `jax.shard_map`; None if there are none."""
    equation, shardings = bound.equation, bound.shardings
    if not shardings.splits_examples or is_grouped(equation):
        return None
    values = [*bound.values, *bound.results]  # of the image, of the kernel and of the result
    image, kernel, result = map(shardings.spec, values)
    numbers = equation.params["dimension_numbers"]
    all_dims = numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec
    space: list[str] = []
    is_uneven = False
    for value, spec, dims in zip(values, (image, kernel, result), all_dims, strict=True):
        for d in dims[2:]:
            space += spec_axes(spec[d])
            is_uneven |= value.dims[d] in shardings.uneven
    sizes = shardings.mesh.shape
    others = [axis for axis in used_axes(tuple(sizes), sizes) if axis not in space]
    if not others or not (space or is_uneven):
        return None
    if not space and len(others) == 1:
        return None  # XLA splits an uneven space over this axis, or does not split it

    def kept(entry: object) -> tuple[str, ...]:
        axes = spec_axes(entry)
        if set(axes).issubset(others):
            return axes
        return ()

    batch, channel = kept(image[numbers.lhs_spec[0]]), kept(image[numbers.lhs_spec[1]])
    out_channel = kept(kernel[numbers.rhs_spec[0]])
    if space and set(batch).issuperset(others):
        return None  # the devices of each axis have parts of their own
    if channel != kept(kernel[numbers.rhs_spec[1]]):
        channel = ()
    if not {*batch, *channel}.isdisjoint(out_channel):
        out_channel = ()

    static = {name: equation.params[name] for name in (*_PARAMS, "padding")}

    def local(x: jax.Array, kernel: jax.Array) -> jax.Array:
        y = jax.lax.conv_general_dilated(x, kernel, **static)
        if channel:
            y = jax.lax.psum(y, channel)
        return y

    run = jax.shard_map(
        local,
        mesh=shardings.mesh,
        in_specs=(
            spec_of_two(numbers.lhs_spec, batch, channel),
            spec_of_two(numbers.rhs_spec, out_channel, channel),
        ),
        out_specs=spec_of_two(numbers.out_spec, batch, out_channel),
        axis_names=set(others),
    )
    return [run(*bound.operands)]


def run_split_pool(bound: BoundEquation) -> Arrays | None:
    """The result of max or min pooling whose windows overlap where the space is split, or None."""
    equation, shardings = bound.equation, bound.shardings
    (value,), (result,) = bound.values, bound.results
    if not shardings.splits_examples:
        return None
    sizes = shardings.mesh.shape
    params = {
        "window_strides": equation.params["window_strides"],
        "lhs_dilation": equation.params["base_dilation"],
        "rhs_dilation": equation.params["window_dilation"],
        "padding": equation.params["padding"],
    }
    lengths = equation.params["window_dimensions"]
    # Dimensions without windows stay split, if the result is split alike.
    spec, of_result = shardings.spec(value), shardings.spec(result)
    entries: list[object] = [None] * len(spec)
    windows: list[_Window] = []
    padding = list(params["padding"])
    overlaps = False
    for d, length in enumerate(lengths):
        entry = spec[d]
        is_split = entry is not None or value.dims[d] in shardings.uneven
        overlaps |= is_split and length > params["window_strides"][d]
        if entry is None or entry != of_result[d]:
            continue
        axes = spec_axes(entry)
        of_each = value.shape[d], length, result.shape[d]
        window = _window(params, d, d, of_each, axes, parts(axes, sizes))
        if window is not None:
            windows.append(window)
            padding[d] = window.padding
            entries[d] = entry
    if not overlaps:
        return None

    outside = _pool_padding(primitive_name(equation), bound.operands[0].dtype)

    def local(x: jax.Array) -> jax.Array:
        for window in windows:
            x = _with_halo(x, window, sizes, outside)
        return equation.primitive.bind(x, **{**equation.params, "padding": tuple(padding)})

    each = P(*entries)
    run = jax.shard_map(local, mesh=shardings.mesh, in_specs=each, out_specs=each)
    return [run(*bound.operands)]


def _window(
    params: Mapping[str, Any],
    at: int,
    dim: int,
    sizes: Sequence[int],
    axes: tuple[str, ...],
    count: int,
) -> _Window | None:
    """The window of the spatial dimension `at`; None if a part needs more than its neighbours.

    `sizes` are those of the image, the kernel and the result. Positions are those of the image with
    zeros between its elements (`lhs_dilation`).
    """
    stride, spread = params["window_strides"][at], params["lhs_dilation"][at]
    image, kernel, result = sizes
    own, own_results = image // count, result // count
    # Parts of image and result have to begin at the same positions.
    if image % count or result % count or own * spread != own_results * stride:
        return None
    # The windows of a device's results, from the position of its first element on.
    low = params["padding"][at][0]
    extent = (kernel - 1) * params["rhs_dilation"][at]
    left = low // spread
    last = (own_results - 1) * stride + extent - low
    right = last // spread - (own - 1)
    if max(left, right, -left, -right) > own or own + left + right < 1:
        return None
    # Where they begin or end between two elements, the part is padded.
    first_pad = low - spread * left
    length = (own + left + right - 1) * spread + 1
    last_pad = (own_results - 1) * stride + extent + 1 - length - first_pad
    return _Window(dim, axes, left, right, (first_pad, last_pad))


def _with_halo(
    x: jax.Array, window: _Window, sizes: Mapping[str, int], outside: float = 0
) -> jax.Array:
    """A part of an array, with elements of the neighbouring parts, or without some of its own.

    Devices at the edges get the number `outside`, which is the padding of the operation.
    """
    d, own = window.dim, x.shape[window.dim]
    start, stop = max(0, -window.left), own - max(0, -window.right)
    pieces = [jax.lax.slice_in_dim(x, start, stop, axis=d)]
    count = parts(window.axes, sizes)
    at = jax.lax.axis_index(window.axes)

    def received(edge: jax.Array, pairs: list[tuple[int, int]], last: int) -> jax.Array:
        edge = jax.lax.ppermute(edge, window.axes, pairs)
        if outside:
            edge = jnp.where(at == last, jnp.asarray(outside, edge.dtype), edge)
        return edge

    if window.left > 0:
        edge = jax.lax.slice_in_dim(x, own - window.left, own, axis=d)
        pieces.insert(0, received(edge, list(pairwise(range(count))), 0))
    if window.right > 0:
        edge = jax.lax.slice_in_dim(x, 0, window.right, axis=d)
        pieces.append(received(edge, [(i + 1, i) for i in range(count - 1)], count - 1))
    return jnp.concatenate(pieces, axis=d)


def _pool_padding(pooling: str, dtype: jnp.dtype) -> float:
    """The number that pads max or min pooling."""
    least, largest = -jnp.inf, jnp.inf
    if not jnp.issubdtype(dtype, jnp.floating):
        least, largest = jnp.iinfo(dtype).min, jnp.iinfo(dtype).max
    if pooling == "reduce_window_max":
        return least
    return largest
