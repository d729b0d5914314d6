"""Runs lookups in split arrays in `jax.shard_map`: edges of a graph that read the nodes of others.

Every device gets its own copy of the array, by one all-gather for all lookups in it, and looks up
for its own indices. The cotangents of the copies are added on each device, and summed over devices
once. XLA would gather for each lookup, and sum the cotangent of each.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn, Literal, Var
from jax.sharding import PartitionSpec as P

from .._mesh_axes import parts
from ..operations import Rule, rule_of
from ..program._graph import Value
from ..program._trace import Arrays
from ..tree._overrides import spec_axes
from ._shardings import Shardings

# The copies of arrays that are looked up in, by the array and the axes that it is split over.
Tables = dict[tuple[Var, tuple[str, ...]], jax.Array]


def run_split_lookup(
    equation: JaxprEqn,
    operands: Arrays,
    values: list[Value],
    shardings: Shardings,
    tables: Tables,
) -> Arrays | None:
    """The result of a gather from a split array by split indices, or None if it is none.

    `values` are those of the array, of the indices and of the result.
    """
    rule, table = rule_of(equation), equation.invars[0]
    if rule is None or isinstance(table, Literal):
        return None
    lookup = _lookup(rule, values, shardings)
    if lookup is None:
        return None
    key = table, lookup.axes
    if key not in tables:
        tables[key] = _copies(operands[0], values[0], lookup, shardings)
    in_specs = P(lookup.axes), _over(lookup.axes, lookup.of_indices)

    def local(copies: jax.Array, indices: jax.Array) -> jax.Array:
        return equation.primitive.bind(copies[0], indices, **equation.params)

    run = jax.shard_map(
        local,
        mesh=shardings.mesh,
        in_specs=in_specs,
        out_specs=_over(lookup.axes, lookup.of_result),
        axis_names=frozenset(lookup.axes),
        check_vma=False,
    )
    return [jax.jit(run)(tables[key], operands[1])]


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
    for d, entry in enumerate(table):
        axes = spec_axes(entry)
        if not axes or rule.operands[0][d][0] not in rule.indexed:
            continue
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
    entries = list(shardings.spec(value))
    entries[lookup.of_table] = None
    count = parts(lookup.axes, shardings.mesh.shape)
    copies = jnp.broadcast_to(whole[None], (count, *whole.shape))
    return shardings.with_spec(copies, P(lookup.axes, *entries))
