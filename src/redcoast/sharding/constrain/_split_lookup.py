"""Runs lookups in split arrays in `jax.shard_map`: edges of a graph that read the nodes of others.

Every device gets its own copy of the array, by one all-gather for all lookups in it, and looks up
for its own indices. The cotangents of the copies are added on each device, and summed over devices
once. XLA would gather for each lookup, and sum the cotangent of each.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.extend.core import Literal
from jax.sharding import PartitionSpec as P

from ...core._jaxpr import bind_again
from .._mesh_axes import parts
from ..operations import Rule, rule_of
from ..program._graph import Value
from ..program._trace import Arrays
from ..tree._overrides import axes_of_spec, spec_axes
from ._bound_equation import BoundEquation
from ._shardings import Shardings


def run_split_lookup(bound: BoundEquation) -> Arrays | None:
    """The result of a gather of split examples, or None for others."""
    equation, shardings = bound.equation, bound.shardings
    rule, table = rule_of(equation), equation.invars[0]
    if not shardings.splits_examples or rule is None or isinstance(table, Literal):
        return None
    lookup = None
    if not isinstance(equation.invars[1], Literal):
        lookup = _lookup(rule, [*bound.values, *bound.results], shardings)
    if lookup is None:
        return bind_again(equation, [_gathered(rule, bound), *bound.operands[1:]])
    key = table, lookup.axes
    if key not in bound.tables:
        bound.tables[key] = _copies(bound.operands[0], bound.scope.values[table], lookup, shardings)

    def local(copies: jax.Array, indices: jax.Array) -> jax.Array:
        # (1, *table): each device has its own copy.
        return equation.primitive.bind(copies[0], indices, **equation.params)

    run = jax.shard_map(
        local,
        mesh=shardings.mesh,
        in_specs=(P(lookup.axes), _over(lookup.axes, lookup.of_indices)),
        out_specs=_over(lookup.axes, lookup.of_result),
        axis_names=frozenset(lookup.axes),
        check_vma=False,
    )
    return [jax.jit(run)(bound.tables[key], bound.operands[1])]


def _gathered(rule: Rule, bound: BoundEquation) -> jax.Array:
    """The array that is looked up in, gathered along dimensions of which the indices are split."""
    shardings, x = bound.shardings, bound.operands[0]
    value = bound.scope.values[bound.equation.invars[0]]
    split = set(axes_of_spec(shardings.spec(bound.results[0])))
    for d, entry in enumerate(shardings.spec(value)):
        axes = spec_axes(entry)
        if axes and split.issuperset(axes) and rule.operands[0][d][0] in rule.indexed:
            x = shardings.gather(x, value, d)
    return x


@dataclass(frozen=True)
class _Lookup:
    """The dimensions that are split over `axes`: of the array, of the indices, and of the result.

    Elements along that of the array are looked up.
    """

    axes: tuple[str, ...]
    of_table: int
    of_indices: int
    of_result: int


def _lookup(rule: Rule, values: list[Value], shardings: Shardings) -> _Lookup | None:
    table, indices, result = map(shardings.spec, values)
    looked_up: dict[int, tuple[str, ...]] = {}
    for d, entry in enumerate(table):
        axes = spec_axes(entry)
        if axes and rule.operands[0][d][0] in rule.indexed:
            looked_up[d] = axes
    # XLA ends the process where one of several is manual and another is not.
    if len(looked_up) > 1:
        return None
    for d, axes in looked_up.items():
        # A dimension of the indices that is split alike, and stays so in the result.
        for of_indices, over in enumerate(indices):
            dimension = rule.operands[1][of_indices]
            if spec_axes(over) == axes and dimension in rule.results[0]:
                of_result = rule.results[0].index(dimension)
                if spec_axes(result[of_result]) == axes:
                    return _Lookup(axes, d, of_indices, of_result)
    return None


def _over(axes: tuple[str, ...], d: int) -> P:
    return P(*[None] * d, axes)


def _copies(x: jax.Array, value: Value, lookup: _Lookup, shardings: Shardings) -> jax.Array:
    """One copy of a split array for each device along the axes, along a new leading dimension."""
    whole = shardings.gather(x, value, lookup.of_table)
    # What other axes split stays split.
    entries = list(shardings.spec(value))
    entries[lookup.of_table] = None
    count = parts(lookup.axes, shardings.mesh.shape)
    copies = jnp.broadcast_to(whole[None], (count, *whole.shape))  # (devices, *table)
    return shardings.with_spec(copies, P(lookup.axes, *entries))
