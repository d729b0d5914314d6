"""Calls a function on Auto axes inside a program whose arrays are on Explicit axes."""

from collections.abc import Callable

import jax
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec, auto_axes
from jaxtyping import ArrayLike, PyTree

from ._axis_types import auto_ambient_mesh, explicit_mesh_of, is_explicit, on_auto_axes, on_mesh
from ._pytree import Static, join, split

OutSpec = Callable[[jax.ShapeDtypeStruct], PartitionSpec]


def has_explicit_axes(tree: PyTree) -> bool:
    """Whether a program is traced over Explicit axes, or an array of a tree is on them."""
    arrays, _ = split(tree)
    return is_explicit(jax.sharding.get_abstract_mesh()) or any(map(_is_on_explicit_axes, arrays))


def call_on_auto_axes(fn: Callable[..., PyTree], out_spec: OutSpec, *args: PyTree) -> PyTree:
    """Calls `fn(*args)` with Auto axes in place of Explicit ones.

    - `out_spec`: gives the spec of a result, which is part of its type if the caller traces.
    - `args`: trees, whose arrays may be tracers.
    """
    arrays, static = split(args)
    if not any(isinstance(x, Tracer) for x in arrays):
        return _eager(fn, args)
    outputs: list[Static] = []

    def flat(arrays: list[PyTree]) -> list[PyTree]:
        results, rest = split(fn(*join(arrays, static)))
        outputs[:] = [rest]
        return results

    # Traced once more before, because `auto_axes` needs the shardings of the results.
    with auto_ambient_mesh():
        shapes = jax.eval_shape(flat, [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays])
    mesh = jax.sharding.get_abstract_mesh()
    for x in arrays:
        if _is_on_explicit_axes(x):
            mesh = jax.typeof(x).sharding.mesh
            break
    out_shardings = [NamedSharding(mesh, out_spec(shape)) for shape in shapes]
    results: PyTree = auto_axes(flat, out_sharding=out_shardings)(arrays)
    return join(results, outputs[0])


def _eager(fn: Callable[..., PyTree], args: tuple[PyTree, ...]) -> PyTree:
    mesh = explicit_mesh_of(args)
    with auto_ambient_mesh():
        results = fn(*on_auto_axes(args))
    return on_mesh(results, mesh)


def _is_on_explicit_axes(x: ArrayLike) -> bool:
    return is_explicit(jax.typeof(x).sharding.mesh)
