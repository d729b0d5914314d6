"""Grouped convolutions, run by each device on its own part.

The gradient of a grouped convolution's kernel is a convolution with `batch_group_count > 1`. If its
batch is split over one axis of the mesh while another axis has nothing to do, XLA's partitioner
adds the same terms once for each device of the other axis (jax 0.4.35 to 0.10.2): the gradient is
too large by that axis' size, and the loss is right. Inside `jax.shard_map` there is nothing left to
partition, and JAX itself sums the gradient over the axes that the batch is split over.
"""

import functools as ft
from collections.abc import Sequence
from math import prod
from typing import Any

import jax
from jax.extend.core import Jaxpr, JaxprEqn, jaxprs_in_params
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

from ..tree._overrides import spec_axes

_PARAMS = (
    "window_strides",
    "padding",
    "lhs_dilation",
    "rhs_dilation",
    "dimension_numbers",
    "batch_group_count",
    "precision",
    "preferred_element_type",
)


def is_grouped(equation: JaxprEqn) -> bool:
    params = equation.params
    return (
        equation.primitive.name == "conv_general_dilated"
        and max(params["feature_group_count"], params["batch_group_count"]) > 1
    )


def has_grouped(jaxpr: Jaxpr) -> bool:
    """Whether there is one anywhere inside."""
    return any(
        is_grouped(equation) or any(map(has_grouped, jaxprs_in_params(equation.params)))
        for equation in jaxpr.eqns
    )


def run_grouped(
    equation: JaxprEqn,
    given: Sequence[Any],
    mesh: Mesh | AbstractMesh,
    image_spec: P,
    kernel_spec: P,
) -> list[Any]:
    """The convolution, split over the batch and, where whole groups divide, over channels.

    `image_spec` and `kernel_spec` say how the operands are split otherwise.
    """
    numbers, groups = (equation.params[key] for key in ("dimension_numbers", "feature_group_count"))
    batch, channel = (image_spec[d] for d in numbers.lhs_spec[:2])
    n = prod(mesh.shape[axis] for axis in spec_axes(channel))
    if equation.params["batch_group_count"] > 1:
        batch = channel = None
    if groups % n or kernel_spec[numbers.rhs_spec[0]] != channel:
        channel = None
    local = {key: equation.params[key] for key in _PARAMS}
    local["feature_group_count"] = groups // (n if channel else 1)
    run = jax.shard_map(
        ft.partial(jax.lax.conv_general_dilated, **local),
        mesh=mesh,
        in_specs=(_spec(numbers.lhs_spec, batch, channel), _spec(numbers.rhs_spec, channel, None)),
        out_specs=_spec(numbers.out_spec, batch, channel),
    )
    return [run(*given)]


def _spec(dims: Sequence[int], first: Any, second: Any) -> P:
    entries: list[Any] = [None] * len(dims)
    entries[dims[0]], entries[dims[1]] = first, second
    return P(*entries)
