"""Traces a function once for all meshes that it is planned on, if its program is the same on them.

A trace depends on its mesh if it constrains values to it, if it needs it as the ambient mesh, or if
it asks for the size of an axis (`size_of_axis`). In the last case, it is shared by meshes of equal
sizes along that axis.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

import jax
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import PyTree

from ...core._jaxpr import iter_equations
from ...core._target import sequence_parts
from ...core._tracing import axes_asked_for
from ..operations._rule_table import OVER_A_MESH

T = TypeVar("T")

# What was computed, and the objects by whose `id` it is known, which must not be freed.
_shared: ContextVar[dict[Hashable, Any] | None] = ContextVar("_shared", default=None)


@contextmanager
def sharing_programs() -> Iterator[None]:
    """The traces inside are of one function and its arguments, for different meshes and rows."""
    token = _shared.set({})
    try:
        yield
    finally:
        _shared.reset(token)


@contextmanager
def of_another_function() -> Iterator[None]:
    """The traces inside are of another function of the same arguments, and are not shared."""
    token = _shared.set(None)
    try:
        yield
    finally:
        _shared.reset(token)


def shared_trace(
    mesh: Mesh | AbstractMesh, tree: PyTree, args: Sequence[Any], trace: Callable[[], T]
) -> T:
    """The result of `trace`, which traces for a mesh, or that of an equal trace."""
    shared = _shared.get()
    if shared is None:
        return trace()
    leaves, structure = jax.tree.flatten((tree, tuple(args)))
    shapes = tuple((getattr(x, "shape", None), getattr(x, "dtype", None)) for x in leaves)
    sizes = dict(mesh.shape)

    def key() -> Hashable:
        axes = tuple((axis, sizes.get(axis)) for axis in sorted(axes_asked_for()))
        return "trace", structure, shapes, sequence_parts(), axes

    if key() in shared:
        return shared[key()]
    result: Any = trace()
    if not result.over_a_mesh:
        shared[key()] = result  # with the axes that it has asked for
    return result


def is_over_a_mesh(jaxpr: Any) -> bool:
    """Whether the trace that has just returned this jaxpr depends on its mesh."""
    if not jax.sharding.get_abstract_mesh().empty:
        return True
    return any(equation.primitive.name in OVER_A_MESH for equation in iter_equations(jaxpr))


def once(fn: Callable[..., T], of: Any, *args: Hashable) -> T:
    """`fn(of, *args)`; inside `sharing_programs`, computed once for each object `of`."""
    shared = _shared.get()
    if shared is None:
        return fn(of, *args)
    key = fn, id(of), args
    if key not in shared:
        shared[key] = of, fn(of, *args)
    return shared[key][1]
