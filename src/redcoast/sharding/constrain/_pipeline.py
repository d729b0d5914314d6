"""Finds the pipeline of a function that is called with a tree and a batch."""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import PyTree

from ...core._pytree import abstract_arrays, join, split
from ...distributed._mesh import PIPE
from ..pipeline._stages import NoPipeline, Pipeline, find_pipeline
from ..program._trace import trace_over
from ..solver._strategy import Program, follow_program, parts


def pipeline_of(
    program: Program,
    mesh: Mesh | AbstractMesh,
    fn: Callable[..., Any],
    tree: PyTree,
    args: Any,
    batch_axes: tuple[str, ...],
    microbatches: int | None,
) -> Pipeline:
    """The pipeline of `fn(tree, *args)`, whose program is given. Raises `NoPipeline`."""

    def trace_rows(rows: int) -> Program:
        try:
            traced, _ = trace_over(mesh, fn, tree, (_fewer(program, args[0], rows), *args[1:]))
        except Exception as error:
            raise NoPipeline(
                f"The function cannot be traced with a batch of {rows} rows "
                f"({type(error).__name__})."
            ) from error
        return follow_program(traced, [value.grad for value in program.parameters])

    return find_pipeline(
        program,
        trace_rows,
        stages=mesh.shape[PIPE],
        parts=parts(batch_axes, mesh.shape),
        microbatches=microbatches,
    )


def _fewer(program: Program, batch: PyTree, rows: int) -> PyTree:
    """The shapes of a batch with fewer rows."""
    arrays, static = split(batch)
    size = program.graph.sizes[program.batch.given[0]]
    shapes = abstract_arrays(arrays)
    for place, x in enumerate(shapes):
        if x.shape and x.shape[0] == size and place not in program.batch.left_out:
            shape = (rows, *x.shape[1:])
            shapes[place] = jax.ShapeDtypeStruct(shape, x.dtype, weak_type=x.weak_type)
    return join(shapes, static)
