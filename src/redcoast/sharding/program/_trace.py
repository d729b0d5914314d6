"""A user's function as a program: its equations, and which inputs are which arrays."""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import PyTree

from ...core._pytree import Static, join, split
from ...core._tracing import traced_over


@dataclass(frozen=True)
class Traced:
    """The program of `fn(tree, *args)`.

    Its inputs are the arrays of the tree, `arrays` of them; then those of the first argument, the
    batch, `batch` of them; then those of the other arguments. The last `moved` of its results are
    those of a model that a loss returns as its third result.
    """

    jaxpr: ClosedJaxpr
    arrays: int
    batch: int
    output: Static
    moved: int = 0

    @property
    def trains(self) -> bool:
        """Whether the function is a loss: its first result a floating point scalar."""
        first = self.jaxpr.out_avals[0] if self.jaxpr.out_avals else None
        return first is not None and first.shape == () and jnp.issubdtype(first.dtype, jnp.floating)


def trace(fn: Callable[..., Any], tree: PyTree, args: Sequence[Any]) -> tuple[Traced, list[Any]]:
    """The program of `fn(tree, *args)`, and the arrays that it is called with here."""
    arrays, static = split(tree)
    batch, batch_static = split(tuple(args[:1]))
    others, others_static = split(tuple(args[1:]))
    outputs: list[Static] = []
    moved: list[int] = []

    def flat(arrays: list[Any], batch: list[Any], others: list[Any]) -> list[Any]:
        result = fn(join(arrays, static), *join(batch, batch_static), *join(others, others_static))
        found, output = split(result)
        outputs.append(output)
        moved.append(len(split(result[2])[0]) if _has_model(result) else 0)
        return found

    shapes = jax.tree.map(_unplaced, (arrays, batch, others))
    jaxpr = jax.make_jaxpr(flat)(*shapes)
    traced = Traced(jaxpr, len(arrays), len(batch), outputs[-1], moved[-1])
    return traced, [*arrays, *batch, *others]


def trace_over(
    mesh: Mesh | AbstractMesh, fn: Callable[..., Any], tree: PyTree, args: Sequence[Any]
) -> tuple[Traced, list[Any]]:
    """`trace`, with bare `PartitionSpec`s in the function referring to a mesh."""
    try:
        with traced_over(mesh):
            return trace(fn, tree, args)
    except ValueError:
        # `jax.pmap`, and `jax.shard_map` over a mesh of its own, want no other mesh around them.
        with contextlib.suppress(Exception):
            return trace(fn, tree, args)
        raise


def _unplaced(x: Any) -> Any:
    """An array as its shape, for the mesh that it lies on may be another than that of the trace."""
    if isinstance(x, Tracer) or not isinstance(x, jax.Array):
        return x
    weak = getattr(x, "weak_type", False)  # which keys lack
    return jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=weak)


def _has_model(result: Any) -> bool:
    """Whether this is `(loss, aux, model)`."""
    return type(result) is tuple and len(result) == 3
