"""Meshes whose axes have the type Explicit, which `jax.make_mesh` gives them by default.

With Explicit axes, a sharding is a part of an array's type, and operations on sharded arrays need
annotations. With Auto axes, the compiler and the constraints of a plan decide. So functions are
traced and compiled for the same devices with Auto axes, and results are put back, without a copy,
on the mesh that was given.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import jax
from jax.core import Tracer
from jax.sharding import (
    AbstractMesh,
    AxisType,
    Mesh,
    NamedSharding,
    PartitionSpec,
    auto_axes,
    use_abstract_mesh,
)
from jaxtyping import ArrayLike, PyTree

from ._pytree import Static, join, split

T = TypeVar("T")
AnyMesh = TypeVar("AnyMesh", Mesh, AbstractMesh, Mesh | AbstractMesh)


def is_explicit(mesh: Mesh | AbstractMesh) -> bool:
    """Whether a mesh has an axis of type Explicit."""
    return AxisType.Explicit in mesh.axis_types


def with_auto_axes(mesh: AnyMesh) -> AnyMesh:
    """The same mesh, with Auto axes in place of Explicit ones."""
    if not is_explicit(mesh):
        return mesh
    types: list[AxisType] = []
    for axis_type in mesh.axis_types:
        if axis_type is AxisType.Explicit:
            axis_type = AxisType.Auto
        types.append(axis_type)
    return mesh.update(axis_types=tuple(types))


def on_auto_axes(tree: PyTree) -> PyTree:
    """A tree whose arrays and shardings are on meshes with Auto axes; arrays are not copied."""
    return jax.tree.map(auto_array, tree)


def auto_array(x: PyTree) -> PyTree:
    """Converts one leaf, as `on_auto_axes` does."""
    sharding = x
    if not isinstance(x, NamedSharding):
        sharding = _explicit_sharding(x)
    if sharding is None or not is_explicit(sharding.mesh):
        return x
    inside = _over(sharding, with_auto_axes(sharding.mesh))
    if sharding is x:
        return inside
    return _moved(x, inside)


def on_mesh(tree: PyTree, mesh: Mesh | AbstractMesh | None) -> PyTree:
    """A tree whose arrays are on a mesh with Explicit axes if they are on it with Auto axes."""
    if not isinstance(mesh, Mesh) or not is_explicit(mesh):
        return tree
    inside = with_auto_axes(mesh)

    def convert(x: T) -> T:
        sharding = None
        if _is_placed(x):
            sharding = getattr(x, "sharding", None)
        if not isinstance(sharding, NamedSharding) or sharding.mesh != inside:
            return x
        return _moved(x, _over(sharding, mesh))

    return jax.tree.map(convert, tree)


def explicit_mesh_of(tree: PyTree) -> Mesh | None:
    """The mesh of the first array of a tree that is on a mesh with Explicit axes."""
    for x in jax.tree.leaves(tree):
        sharding = _explicit_sharding(x)
        if sharding is not None and isinstance(sharding.mesh, Mesh):
            return sharding.mesh
    return None


@contextmanager
def auto_ambient_mesh() -> Iterator[None]:
    """Inside, the ambient mesh has Auto axes."""
    here = jax.sharding.get_abstract_mesh()
    if not is_explicit(here):  # also if there is none
        yield
        return
    try:
        mesh = jax.sharding.get_mesh()
    except ValueError:  # while a program is traced
        mesh = None
    if mesh is None or mesh.empty:
        with use_abstract_mesh(with_auto_axes(here)):
            yield
    else:
        with jax.set_mesh(with_auto_axes(mesh)):
            yield


def _is_placed(x: object) -> bool:
    """Whether this is an array with memory, or the shape of one."""
    if isinstance(x, jax.ShapeDtypeStruct):
        return True
    return isinstance(x, jax.Array) and not isinstance(x, Tracer) and not x.is_deleted()


def _explicit_sharding(x: object) -> NamedSharding | None:
    sharding = getattr(x, "sharding", None)
    if not isinstance(sharding, NamedSharding) or not is_explicit(sharding.mesh):
        return None
    if not _is_placed(x):
        return None
    return sharding


def _over(sharding: NamedSharding, mesh: Mesh | AbstractMesh) -> NamedSharding:
    return NamedSharding(mesh, sharding.spec, memory_kind=sharding.memory_kind)


def _moved(x: PyTree, sharding: NamedSharding) -> PyTree:
    if isinstance(x, jax.ShapeDtypeStruct):
        return x.update(sharding=sharding)
    # The spec of a key may have an entry for the dimension of the numbers that it consists of.
    spec = PartitionSpec(*sharding.spec[: x.ndim])
    place = NamedSharding(sharding.mesh, spec, memory_kind=sharding.memory_kind)
    return jax.device_put(x, place)  # it has the same memory


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
        mesh = explicit_mesh_of(args)
        with auto_ambient_mesh():
            results = fn(*on_auto_axes(args))
        return on_mesh(results, mesh)
    outputs: list[Static] = []  # what is no array of the results, which `auto_axes` cannot return

    def flat(arrays: list[PyTree]) -> list[PyTree]:
        results, rest = split(fn(*join(arrays, static)))
        outputs[:] = [rest]  # of the last trace, which is the one that runs
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


def _is_on_explicit_axes(x: ArrayLike) -> bool:
    return is_explicit(jax.typeof(x).sharding.mesh)
