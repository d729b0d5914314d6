"""Kernels of Pallas under `vmap`, which run for each element along dimensions of their grid."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jax.extend.core import JaxprEqn

from ._control_flow import open_jaxpr


def vmapped_dims(equation: JaxprEqn) -> list[list[int | None]] | None:
    """Which dimensions of a kernel's arrays are those of a `vmap` around it.

    Returns for each dimension of each operand, and then of each result, the dimension of the grid
    that it is; None if it is of the kernel itself. Returns None for a kernel without `vmap`.
    """
    grid = equation.params["grid_mapping"]
    arrays = len(equation.invars) + len(equation.outvars)
    # Operands that say which blocks are read, or how large the grid is, have no blocks.
    before = arrays - len(grid.block_mappings)
    if not grid.vmapped_dims or before:
        return None
    return [_grid_dims(mapping, grid.vmapped_dims) for mapping in grid.block_mappings]


def of_fewer(equation: JaxprEqn, parts: Mapping[int, int]) -> dict[str, object]:
    """The parameters of a kernel for a part of its elements along some dimensions of its grid.

    `parts` has the number of parts for each of them.
    """
    grid = equation.params["grid_mapping"]
    sizes = list(grid.grid)
    for dim, count in parts.items():
        sizes[dim] //= count
    mappings = tuple(
        _of_fewer(mapping, grid.vmapped_dims, parts) for mapping in grid.block_mappings
    )
    of_part = replace(grid, grid=tuple(sizes), block_mappings=mappings)
    results = mappings[len(equation.invars) :]
    return {
        "grid_mapping": of_part,
        "out_avals": tuple(
            aval.update(shape=mapping.array_aval.shape)
            for aval, mapping in zip(equation.params["out_avals"], results, strict=True)
        ),
    }


def _grid_dims(mapping: Any, vmapped: tuple[int, ...]) -> list[int | None]:
    """The vmapped dimension of the grid that each dimension of an array is."""
    jaxpr = open_jaxpr(mapping.index_map_jaxpr)
    dims: list[int | None] = []
    # The index of each block is computed from the place in the grid.
    for size, block, index in zip(
        mapping.array_aval.shape, mapping.block_shape, jaxpr.outvars, strict=True
    ):
        places = [dim for dim in vmapped if jaxpr.invars[dim] is index]
        has_one = type(block).__name__ == "Squeezed" and size > 1
        dims.append(places[0] if places and has_one else None)
    return dims


def _of_fewer(mapping: Any, vmapped: tuple[int, ...], parts: Mapping[int, int]) -> Any:
    shape = list(mapping.array_aval.shape)
    for d, dim in enumerate(_grid_dims(mapping, vmapped)):
        if dim is not None:
            shape[d] //= parts.get(dim, 1)
    return replace(mapping, array_aval=mapping.array_aval.update(shape=tuple(shape)))
