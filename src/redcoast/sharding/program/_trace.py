"""Traces a function to a jaxpr, and records which inputs are which arrays."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import PyTree

from ...core._control_flow import AnyJaxpr
from ...core._dtypes import keep_large_counts
from ...core._mapped_callbacks import mark_mapped_callbacks
from ...core._pytree import Static, join, split
from ...core._tracing import trace_for
from ._own_rows import batch_own_rows
from ._shared_programs import is_over_a_mesh, shared_trace

Arrays = list[Any]  # of JAX, of NumPy, or abstract


@dataclass(frozen=True)
class Traced:
    """The jaxpr of `fn(tree, *args)`.

    Its inputs are the `arrays` arrays of the tree, then the `batch` arrays of the first argument
    (the batch), then the arrays of the other arguments. The last `model_outputs`
    are the arrays of the model that a loss returns as its third result. `over_a_mesh` is whether it
    depends on the mesh that it was traced for.
    """

    jaxpr: AnyJaxpr
    arrays: int
    batch: int
    output: Static
    model_outputs: int = 0
    over_a_mesh: bool = False

    @property
    def trains(self) -> bool:
        """Whether the function is a loss: its first result is a floating point scalar."""
        results: list[Any] = self.jaxpr.out_avals
        if not results or results[0].shape != ():
            return False
        return jnp.issubdtype(results[0].dtype, jnp.floating)


def trace(fn: Callable[..., PyTree], tree: PyTree, args: Sequence[PyTree]) -> tuple[Traced, Arrays]:
    """Traces `fn(tree, *args)`; returns its jaxpr and the arrays that it was called with."""
    arrays, static = split(tree)
    batch, batch_static = split(tuple(args[:1]))
    others, others_static = split(tuple(args[1:]))
    outputs: list[tuple[Static, int]] = []  # the last is of the trace that JAX returns

    def flat(arrays: Arrays, batch: Arrays, others: Arrays) -> Arrays:
        result = fn(join(arrays, static), *join(batch, batch_static), *join(others, others_static))
        flat_result, output = split(result)
        model_outputs: Arrays = []
        if type(result) is tuple and len(result) == 3:  # `(loss, aux, model)`
            model_outputs, _ = split(result[2])
        outputs.append((output, len(model_outputs)))
        return keep_large_counts(flat_result)

    flat.__wrapped__ = fn  # JAX's messages name this function  # type: ignore[attr-defined]

    def unplaced(x: Any) -> Any:
        """The shape of an array, which may be placed on another mesh than the trace's."""
        if isinstance(x, Tracer) or not isinstance(x, jax.Array):
            return x
        weak = getattr(x, "weak_type", False)  # keys have none
        return jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=weak)

    mark_mapped_callbacks()
    jaxpr = jax.make_jaxpr(flat)(*jax.tree.map(unplaced, (arrays, batch, others)))
    jaxpr = batch_own_rows(jaxpr)
    traced = Traced(jaxpr, len(arrays), len(batch), *outputs[-1], is_over_a_mesh(jaxpr))
    return traced, [*arrays, *batch, *others]


def trace_over(
    mesh: Mesh | AbstractMesh, fn: Callable[..., PyTree], tree: PyTree, args: Sequence[PyTree]
) -> tuple[Traced, Arrays]:
    """Calls `trace` with bare `PartitionSpec`s in the function referring to a mesh."""
    own: list[Any] = []

    def trace_own() -> Traced:
        traced, own[:] = trace_for(mesh, lambda: trace(fn, tree, args))
        return traced

    traced = shared_trace(mesh, tree, args, trace_own)
    if not own:  # the trace was shared
        for part in (tree, tuple(args[:1]), tuple(args[1:])):
            arrays, _ = split(part)
            own += arrays
    return traced, own
