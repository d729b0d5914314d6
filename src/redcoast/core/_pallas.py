"""Kernels of Pallas, which run once for each point of a grid.

Along some dimensions of the grid, such as those of a `vmap`, the points are independent: each reads
and writes its own part of the arrays.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jax.extend.core import JaxprEqn

from ._control_flow import consts_of, open_jaxpr
from ._jaxpr import iter_equations, variables

# What a kernel knows of its place in the grid.
_PLACES = frozenset(["num_programs", "program_id"])


def independent_dims(equation: JaxprEqn) -> list[list[int | None]] | None:
    """Which dimensions of its arrays a kernel acts on one element after the other along.

    Returns for each dimension of each operand, and then of each result, the dimension of the grid
    that counts its elements; None for other dimensions. Returns None for a kernel without any.
    """
    grid = equation.params["grid_mapping"]
    arrays = len(equation.invars) + len(equation.outvars)
    # Operands that say which blocks are read, or how large the grid is, have no blocks.
    if arrays != len(grid.block_mappings):
        return None
    results = grid.block_mappings[len(equation.invars) :]
    independent: list[int] = []
    for dim in _candidates(equation):
        is_independent = True
        for mapping in grid.block_mappings:
            # The place of its block must not be computed from the place in the grid.
            jaxpr = open_jaxpr(mapping.index_map_jaxpr)
            if any(jaxpr.invars[dim] in variables(inner.invars) for inner in jaxpr.eqns):
                is_independent = False
        for mapping in results:
            # A result that has other blocks is written several times.
            if _dims(mapping, [dim]).count(dim) != 1:
                is_independent = False
        if is_independent:
            independent.append(dim)
    if not independent:
        return None
    return [_dims(mapping, independent) for mapping in grid.block_mappings]


def _candidates(equation: JaxprEqn) -> list[int]:
    """The dimensions of the grid that the body of a kernel does not know of."""
    grid, body = equation.params["grid_mapping"], equation.params["jaxpr"]
    opened = open_jaxpr(body)
    has_memory = len(opened.invars) > len(grid.block_mappings)
    if has_memory or opened.constvars or consts_of(body):
        return list(grid.vmapped_dims)  # what the body keeps, it may add up over the others
    # A `vmap` adds a dimension that the body does not count.
    counted = [dim for dim in range(len(grid.grid)) if dim not in grid.vmapped_dims]
    known: set[int] = set()
    for inner in iter_equations(body):
        if inner.primitive.name in _PLACES:
            known.add(counted[inner.params["axis"]])
    return [dim for dim, size in enumerate(grid.grid) if dim not in known and isinstance(size, int)]


def of_fewer(equation: JaxprEqn, parts: Mapping[int, int]) -> dict[str, object]:
    """The parameters of a kernel for a part of its elements along some dimensions of its grid.

    `parts` has the number of parts for each of them.
    """
    grid = equation.params["grid_mapping"]
    sizes = list(grid.grid)
    for dim, count in parts.items():
        sizes[dim] //= count
    # A mapping for each operand, and then for each result.
    mappings = tuple(_of_fewer(mapping, parts) for mapping in grid.block_mappings)
    results = mappings[len(equation.invars) :]
    out_avals = []
    for aval, mapping in zip(equation.params["out_avals"], results, strict=True):
        out_avals.append(aval.update(shape=mapping.array_aval.shape))
    return {
        "grid_mapping": replace(grid, grid=tuple(sizes), block_mappings=mappings),
        "out_avals": tuple(out_avals),
    }


def _dims(mapping: Any, of_grid: list[int]) -> list[int | None]:
    """The dimension of the grid that counts the elements along each dimension of an array."""
    jaxpr = open_jaxpr(mapping.index_map_jaxpr)
    dims: list[int | None] = []
    for size, block, index in zip(
        mapping.array_aval.shape, mapping.block_shape, jaxpr.outvars, strict=True
    ):
        places = [dim for dim in of_grid if jaxpr.invars[dim] is index]
        # A block of one element, with its dimension or without.
        is_one = type(block).__name__ == "Squeezed" or getattr(block, "block_size", block) == 1
        if places and is_one and size > 1:
            dims.append(places[0])
        else:
            dims.append(None)
    return dims


def _of_fewer(mapping: Any, parts: Mapping[int, int]) -> Any:
    shape = list(mapping.array_aval.shape)
    for d, dim in enumerate(_dims(mapping, list(parts))):
        if dim is not None:
            shape[d] //= parts[dim]
    return replace(mapping, array_aval=mapping.array_aval.update(shape=tuple(shape)))
