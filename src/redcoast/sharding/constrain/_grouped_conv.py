"""Runs grouped convolutions in `jax.shard_map`, because XLA partitions their gradient wrongly.

The gradient of a grouped kernel is a convolution with `batch_group_count > 1`. If its batch is
sharded over one mesh axis and another axis is unused, XLA's partitioner adds the same terms once
for each device of the unused axis (JAX 0.4.35 to 0.10.2). The gradient is then too large by the
size of that axis; the loss is correct. Inside `jax.shard_map` XLA partitions nothing, and JAX sums
the gradient over the axes that the batch is sharded over.
"""

import functools as ft
from collections.abc import Sequence

import jax
from jax.extend.core import JaxprEqn
from jax.sharding import PartitionSpec as P

from ..program._trace import Arrays
from ..tree._overrides import spec_parts
from ._bound_equation import BoundEquation

_PARAMS = """
    window_strides padding lhs_dilation rhs_dilation dimension_numbers batch_group_count precision
    preferred_element_type
""".split()  # noqa: SIM905


def is_grouped(equation: JaxprEqn) -> bool:
    """Whether this is a grouped convolution, or the gradient of one."""
    params = equation.params
    return (
        equation.primitive.name == "conv_general_dilated"
        and max(params["feature_group_count"], params["batch_group_count"]) > 1
    )


def run_grouped(bound: BoundEquation) -> Arrays | None:
    """The result of a grouped convolution, sharded over the batch and, if the groups divide, over
    channels; None for others."""
    equation, mesh = bound.equation, bound.shardings.mesh
    if not is_grouped(equation):
        return None
    image_spec, kernel_spec = map(bound.shardings.spec, bound.values)
    numbers, groups = equation.params["dimension_numbers"], equation.params["feature_group_count"]
    batch_dim, channel_dim = numbers.lhs_spec[:2]
    batch, channel = image_spec[batch_dim], image_spec[channel_dim]
    shards = spec_parts([channel], mesh.shape)
    if equation.params["batch_group_count"] > 1:
        # The batch is what is divided into groups.
        batch = channel = None
    # A group stays on one device. Groups that do not divide all stay on every device.
    if groups % shards or kernel_spec[numbers.rhs_spec[0]] != channel:
        channel = None
    local = {key: equation.params[key] for key in _PARAMS}
    local["feature_group_count"] = groups
    if channel:
        local["feature_group_count"] = groups // shards
    run = jax.shard_map(
        ft.partial(jax.lax.conv_general_dilated, **local),
        mesh=mesh,
        in_specs=(
            spec_of_two(numbers.lhs_spec, batch, channel),
            spec_of_two(numbers.rhs_spec, channel, None),
        ),
        out_specs=spec_of_two(numbers.out_spec, batch, channel),
    )
    return [run(*bound.operands)]


def spec_of_two(dims: Sequence[int], first: object, second: object) -> P:
    """A spec whose first two of these dimensions are sharded, as the batch and the channels are."""
    entries: list[object] = [None] * len(dims)
    entries[dims[0]], entries[dims[1]] = first, second
    return P(*entries)
