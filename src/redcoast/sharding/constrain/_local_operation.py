"""Runs operations that XLA cannot partition on the part of their operands that a device has.

XLA gathers the operands of Fourier transforms, matrix decompositions and triangular solves, on some
devices, although they act on each transform or matrix alone. The table of operations says along
which dimensions; `jax.shard_map` divides those that are sharded.
"""

from collections.abc import Sequence
from math import prod
from typing import Any

import jax
from jax.extend.core import JaxprEqn
from jax.sharding import PartitionSpec as P

from ...core._control_flow import primitive_name
from ...core._jaxpr import bind_local
from ..operations import Dimension, Factor, Rule, rule_of
from ..operations._made_rules import DECOMPOSITIONS
from ..program._graph import Value
from ..tree._overrides import spec_axes
from ._shardings import Shardings

_WHOLE_ALONG_SOME = DECOMPOSITIONS | frozenset(["approx_top_k", "fft", "sort", "top_k"])


def acts_on_parts(equation: JaxprEqn) -> bool:
    """Whether an operation acts on vectors or matrices, each of which it needs as a whole."""
    return primitive_name(equation) in _WHOLE_ALONG_SOME


def run_operation(
    equation: JaxprEqn,
    operands: Sequence[Any],
    values: Sequence[Value | None],
    results: Sequence[Value],
    shardings: Shardings,
) -> list[Any] | None:
    """The results of an operation that runs on each device alone, or None if it does not.

    `values` are the values of the operands, None for literals.
    """
    if not acts_on_parts(equation):
        return None
    rule = rule_of(equation)
    if rule is None:
        return None
    axes = _axes_of_factors(rule, (*values, *results), shardings)
    if not axes:
        return None
    specs = [[_spec(dims, axes) for dims in side] for side in (rule.operands, rule.results)]
    run = jax.shard_map(
        lambda *inputs: tuple(bind_local(equation, inputs, {})),
        mesh=shardings.mesh,
        in_specs=tuple(specs[0]),
        out_specs=tuple(specs[1]),
        axis_names=frozenset(axis for names in axes.values() for axis in names),
        check_vma=False,
    )
    return list(jax.jit(run)(*operands))


def _axes_of_factors(
    rule: Rule, values: Sequence[Value | None], shardings: Shardings
) -> dict[Factor, tuple[str, ...]]:
    """The axes that each dimension is sharded over along which the operation acts on each element
    alone."""
    sizes = shardings.mesh.shape
    torn = rule.reduced | rule.whole | rule.moved | rule.indexed
    axes: dict[Factor, tuple[str, ...]] = {}
    for value, dimensions in zip(values, (*rule.operands, *rule.results), strict=True):
        if value is None:
            continue
        for dimension, entry in zip(dimensions, shardings.spec(value), strict=True):
            names = tuple(axis for axis in spec_axes(entry) if sizes[axis] > 1)
            taken = {axis for others in axes.values() for axis in others}
            free = len(dimension) == 1 and dimension[0] not in torn and dimension[0] not in axes
            count = prod(sizes[axis] for axis in names)
            if names and free and taken.isdisjoint(names) and not rule.sizes[dimension[0]] % count:
                axes[dimension[0]] = names
    return axes


def _spec(dimensions: Sequence[Dimension], axes: dict[Factor, tuple[str, ...]]) -> P:
    return P(*(axes.get(d[0]) if len(d) == 1 else None for d in dimensions))
