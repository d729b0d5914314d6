"""Runs convolutions in groups, and convolutions and pooling of split examples, in `jax.shard_map`.

XLA partitions the gradient of a grouped kernel wrongly, a convolution with `batch_group_count > 1`.
If its batch is sharded over one mesh axis and another axis is unused, it adds the same terms once
for each device of the unused axis (JAX 0.4.35 to 0.10.2). The gradient is then too large by the
size of that axis; the loss is correct. Inside `jax.shard_map` XLA partitions nothing, and JAX sums
the gradient over the axes that the batch is sharded over.

Of a split example, every device gets the rows that its windows need from its neighbours, and
computes its part of the result. A dimension whose parts need as much as the whole dimension is
gathered. XLA's own partitioner gathers the operands of grouped and of transposed convolutions. It
ends the process at some strides, paddings and sizes that do not divide, and gives wrong gradients
at others: it adds terms once for each device of an axis that does not split the space, and loses
parts of the gradient of pooling whose windows overlap (JAX 0.10.2 to 0.12).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn

from ...core._control_flow import primitive_name
from .._mesh_axes import parts
from ..operations import makes_kernel
from ..program._graph import Value
from ..program._trace import Arrays
from ._bound_equation import BoundEquation
from ._halos import SplitWindow, in_equal_parts, of_results, split_spec, with_halo, without_rest

_PARAMS = (
    "rhs_dilation",
    "window_strides",
    "lhs_dilation",
    "dimension_numbers",
    "feature_group_count",
    "batch_group_count",
    "precision",
    "preferred_element_type",
)

# Max and min pooling, and their derivatives.
POOLING = "reduce_window_max reduce_window_min select_and_gather_add select_and_scatter_add".split()  # noqa: SIM905


def is_grouped(equation: JaxprEqn) -> bool:
    """Whether this is a grouped convolution, or the gradient of one."""
    if primitive_name(equation) != "conv_general_dilated":
        return False
    params = equation.params
    return max(params["feature_group_count"], params["batch_group_count"]) > 1


def run_local_conv(bound: BoundEquation) -> Arrays | None:
    """The results of a convolution in groups, or of one whose space is split; None of others."""
    equation, shardings = bound.equation, bound.shardings
    params, numbers = equation.params, equation.params["dimension_numbers"]
    values = [*bound.values, *bound.results]  # of the image, of the kernel and of the result
    image, kernel, result = map(shardings.split_axes, values)
    # Each spatial dimension, as a dimension of the image, of the kernel and of the result.
    spatial = list(
        zip(numbers.lhs_spec[2:], numbers.rhs_spec[2:], numbers.out_spec[2:], strict=True)
    )
    is_split = False  # whether the space is
    if shardings.splits_examples and makes_kernel(equation):
        results = _kernel_gradient(bound)
        if results is not None:
            return results
    elif shardings.splits_examples and params["batch_group_count"] == 1:
        is_split = any(image[dims[0]] or result[dims[2]] for dims in spatial)
    if not is_split and not is_grouped(equation):
        return None
    into, of_kernel, out = [()] * len(image), [()] * len(kernel), [()] * len(result)
    batch, channel = numbers.lhs_spec[:2]
    result_batch, result_channel = numbers.out_spec[:2]
    outputs, inputs = numbers.rhs_spec[:2]
    is_even = values[0].nodes[batch] not in shardings.uneven
    # If the batch itself is in groups, every device computes the whole result.
    if is_even and params["batch_group_count"] == 1 and image[batch] == result[result_batch]:
        into[batch] = out[result_batch] = image[batch]
    windows: list[SplitWindow] = []
    padding = list(params["padding"])
    for at, dims in enumerate(spatial):
        image_dim, _, result_dim = dims
        axes = image[image_dim]
        if not is_split or not axes or axes != result[result_dim]:
            continue
        of_each = [value.shape[d] for value, d in zip(values, dims, strict=True)]
        window = _window(params, at, image_dim, of_each, axes, shardings.mesh.shape)
        if window is not None:
            windows.append(window)
            padding[at] = window.padding
            into[image_dim] = out[result_dim] = axes
    # Channels may be tensor-parallel, and groups may be rows of a batch, under `jax.vmap`.
    static = {name: params[name] for name in _PARAMS}
    summed: tuple[str, ...] = ()
    groups = _local_groups(bound, channel, outputs, params["feature_group_count"])
    if groups is not None:
        static["feature_group_count"] = groups
        into[channel] = of_kernel[outputs] = out[result_channel] = image[channel]
    elif not is_grouped(equation):
        if image[channel] == kernel[inputs]:
            summed = into[channel] = of_kernel[inputs] = image[channel]
        if kernel[outputs] == result[result_channel] and kernel[outputs] != summed:
            of_kernel[outputs] = out[result_channel] = kernel[outputs]

    def local(x: jax.Array, kernel: jax.Array) -> jax.Array:
        for window in windows:
            x = with_halo(x, window)
        y = jax.lax.conv_general_dilated(x, kernel, padding=padding, **static)
        if summed:
            y = jax.lax.psum(y, summed)
        return y

    in_specs = split_spec(into), split_spec(of_kernel)
    run = jax.shard_map(local, mesh=shardings.mesh, in_specs=in_specs, out_specs=split_spec(out))
    x, weights = bound.operands
    y = run(in_equal_parts(x, windows), weights)
    return [without_rest(y, of_results(windows, numbers.lhs_spec[2:], numbers.out_spec[2:]))]


def _local_groups(bound: BoundEquation, channel: int, outputs: int, groups: int) -> int | None:
    """The groups of each device, if all channels are split alike; None if they are not split."""
    image, kernel = map(bound.shardings.split_axes, bound.values)
    axes = image[channel]
    shards = parts(axes, bound.shardings.mesh.shape)
    if shards == 1 or groups % shards or kernel[outputs] != axes:
        return None
    return groups // shards


def _kernel_gradient(bound: BoundEquation) -> Arrays | None:
    """The gradient of a kernel in a program that has one, as a sum over the parts of the space.

    It is a convolution of the image with a field as large as that. XLA's own partitioning of it can
    end the process. None if no space is split.
    """
    shardings, params = bound.shardings, bound.equation.params
    numbers, sizes = params["dimension_numbers"], shardings.mesh.shape
    values = [*bound.values, *bound.results]  # of the image, of the field and of the result
    image, field = map(shardings.split_axes, bound.values)
    if not any(image[d] for d in numbers.lhs_spec[2:]):
        return None
    of_image, of_field = [()] * len(image), [()] * len(field)
    summed: list[str] = []
    # Rows of the batch are summed over too.
    rows, field_rows = numbers.lhs_spec[1], numbers.rhs_spec[1]
    static = {name: params[name] for name in _PARAMS}
    divides = params["feature_group_count"] == 1 and values[0].nodes[rows] not in shardings.uneven
    if divides and image[rows] == field[field_rows]:
        of_image[rows] = of_field[field_rows] = image[rows]
        summed += image[rows]
    windows: list[SplitWindow] = []
    padding = list(params["padding"])
    # Channels of the image are its batch. Under `jax.vmap`, rows may be groups of either.
    outputs = numbers.rhs_spec[0]
    of_result = [()] * len(image)
    for dim, grouped in ((numbers.lhs_spec[0], "batch_group_count"), (rows, "feature_group_count")):
        groups = _local_groups(bound, dim, outputs, params[grouped])
        if groups is not None:
            static[grouped] = groups
            of_image[dim] = of_field[outputs] = of_result[numbers.out_spec[1]] = image[dim]
    # The field moves over the image like a kernel, element by element.
    turned = {
        **params,
        "window_strides": params["rhs_dilation"],
        "rhs_dilation": params["window_strides"],
    }
    spatial = zip(numbers.lhs_spec[2:], numbers.rhs_spec[2:], numbers.out_spec[2:], strict=True)
    for at, (image_dim, field_dim, result_dim) in enumerate(spatial):
        axes = image[image_dim]
        if not axes or axes != field[field_dim]:
            continue
        dims = (image_dim, result_dim, field_dim)
        in_order = (values[0], values[2], values[1])
        of_each = [value.shape[d] for value, d in zip(in_order, dims, strict=True)]
        window = _window(turned, at, image_dim, of_each, axes, sizes)
        if window is not None:
            windows.append(window)
            padding[at] = window.padding
            of_image[image_dim] = of_field[field_dim] = axes
            summed += axes

    def local(x: jax.Array, field: jax.Array) -> jax.Array:
        for window in windows:
            x = with_halo(x, window)
        y = jax.lax.conv_general_dilated(x, field, padding=padding, **static)
        if summed:
            y = jax.lax.psum(y, tuple(summed))
        return y

    in_specs = split_spec(of_image), split_spec(of_field)
    run = jax.shard_map(
        local, mesh=shardings.mesh, in_specs=in_specs, out_specs=split_spec(of_result)
    )
    x, y = bound.operands
    x = in_equal_parts(x, windows)
    y = in_equal_parts(y, of_results(windows, numbers.lhs_spec[2:], numbers.rhs_spec[2:]))
    return [run(x, y)]


def run_split_pool(bound: BoundEquation) -> Arrays | None:
    """The result of max or min pooling of split examples, or of its derivative, if windows overlap
    or do not divide; None of others."""
    equation = bound.equation
    params, name = equation.params, primitive_name(equation)
    if name in ("reduce_window_max", "reduce_window_min"):
        (x,), (value,), (result,) = bound.operands, bound.values, bound.results
        pool = _split_pool(bound, name == "reduce_window_max", value, result)
        return pool and [pool(x)]
    _, value = bound.values
    other, x = bound.operands
    takes_largest = params["select_prim"] is jax.lax.ge_p
    if name == "select_and_gather_add":
        pool = _split_pool(bound, takes_largest, value, bound.results[0])
        return pool and [jax.jvp(pool, (x,), (other,))[1]]
    pool = _split_pool(bound, takes_largest, value, bound.values[0])
    return pool and list(jax.vjp(pool, x)[1](other))


def _split_pool(
    bound: BoundEquation, takes_largest: bool, value: Value, result: Value
) -> Callable[[jax.Array], jax.Array] | None:
    """Max or min pooling of an array, by the windows of an equation."""
    equation, shardings = bound.equation, bound.shardings
    if not shardings.splits_examples:
        return None
    sizes = shardings.mesh.shape
    each_one = (1,) * len(value.shape)
    params = {
        "window_dimensions": equation.params["window_dimensions"],
        "window_strides": equation.params["window_strides"],
        "base_dilation": equation.params.get("base_dilation", each_one),
        "window_dilation": equation.params.get("window_dilation", each_one),
    }
    moved = {
        "window_strides": params["window_strides"],
        "lhs_dilation": params["base_dilation"],
        "rhs_dilation": params["window_dilation"],
        "padding": equation.params["padding"],
    }
    # Dimensions without windows stay split, if the result is split alike.
    split, of_result = shardings.split_axes(value), shardings.split_axes(result)
    entries: list[tuple[str, ...]] = [()] * len(split)
    windows: list[SplitWindow] = []
    padding = list(moved["padding"])
    must_run = False
    for d, length in enumerate(params["window_dimensions"]):
        axes = split[d]
        must_run |= bool(axes) and length > params["window_strides"][d]
        if length > 1:
            must_run |= value.nodes[d] in shardings.uneven or result.nodes[d] in shardings.uneven
        if not axes or axes != of_result[d]:
            continue
        of_each = value.shape[d], length, result.shape[d]
        window = _window(moved, d, d, of_each, axes, sizes)
        if window is not None:
            windows.append(window)
            padding[d] = window.padding
            entries[d] = axes
    if not must_run:
        return None
    primitive, outside = jax.lax.reduce_window_min_p, jnp.inf
    if takes_largest:
        primitive, outside = jax.lax.reduce_window_max_p, -jnp.inf
    if not jnp.issubdtype(bound.operands[-1].dtype, jnp.floating):
        limits = jnp.iinfo(bound.operands[-1].dtype)
        outside = limits.min if takes_largest else limits.max

    def local(x: jax.Array) -> jax.Array:
        for window in windows:
            x = with_halo(x, window, outside)
        return primitive.bind(x, **params, padding=tuple(padding))

    each = split_spec(entries)
    run = jax.shard_map(local, mesh=shardings.mesh, in_specs=each, out_specs=each)
    dims = range(len(split))
    of_result = of_results(windows, dims, dims)
    return lambda x: without_rest(run(in_equal_parts(x, windows, outside)), of_result)


def _window(
    params: Mapping[str, Any],
    at: int,
    dim: int,
    lengths: Sequence[int],
    axes: tuple[str, ...],
    sizes: Mapping[str, int],
) -> SplitWindow | None:
    """The window of the spatial dimension `at`; None if the dimension is gathered.

    `lengths` are those of the image, the kernel and the result, and `sizes` the mesh's. Positions
    are those of the image with zeros between its elements (`lhs_dilation`).
    """
    stride, spread = params["window_strides"][at], params["lhs_dilation"][at]
    image, kernel, result = lengths
    count = parts(axes, sizes)
    own, own_results = -(-image // count), -(-result // count)
    # Where a part of the result begins, after where that of the image does.
    step, between = divmod(own_results * stride - own * spread, spread)
    if between:
        return None  # parts begin at different places between two elements
    # The windows of the first device's results, from the position of its first element on.
    low = params["padding"][at][0]
    extent = (kernel - 1) * params["rhs_dilation"][at]
    first = low // spread
    last = (own_results - 1) * stride + extent - low
    after = last // spread - (own - 1)
    length = own + first + after
    # Those of the others begin further on, or further back.
    moved = step * (count - 1)
    left, right = first - min(0, moved), after + max(0, moved)
    if max(-left, -right) > own or length < 1:
        return None
    if max(0, left) + max(0, right) > (count - 1) * own:
        return None  # gathering sends less
    # Where they begin or end between two elements, the part is padded.
    first_pad = low - spread * first
    last_pad = last + low + 1 - ((length - 1) * spread + 1) - first_pad
    padding = first_pad, last_pad
    return SplitWindow(dim, axes, image, result, count, length, left, right, step, padding)
