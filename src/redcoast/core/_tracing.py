"""Traces functions for the devices of a mesh, with abstract keys.

JAX evaluates some operations while it traces, such as those in `jax.ensure_compile_time_eval`, and
their results remember the ambient mesh. A library may keep them: Equinox's rotary embeddings do.
Under an ambient mesh of another size, they raise an error. So a function is traced without an
ambient mesh, and only if that fails with one.
"""

import contextlib
import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

import jax
import numpy as np
from jax._src import mesh as _jax_mesh
from jax.core import Tracer
from jax.sharding import AbstractMesh, Mesh, use_abstract_mesh
from jaxtyping import PyTree

from ._axis_types import is_explicit, with_auto_axes
from ._target import compiling_for, target_of

T = TypeVar("T")
# JAX's caches depend on it, so that functions are traced again for another mesh.
_mesh = jax.make_user_context()


def abstract_key() -> Any:
    return jax.eval_shape(lambda: jax.random.key(0))


# The axes whose sizes any trace of this process has asked for. JAX keeps traces of inner functions
# for an equal mesh, so that a later trace may depend on a size without asking for it.
_axes_read: set[str] = set()


def size_of_axis(axis: str) -> int:
    """The size of an axis of the mesh that the current trace is for; 1 if it has no such axis."""
    _axes_read.add(axis)
    return sizes_of_axes().get(axis, 1)


def sizes_of_axes() -> Mapping[str, int]:
    """The sizes of all axes of the mesh that the current trace is for.

    It is for programs around a loss, such as optimizers, which are traced for each mesh.
    """
    mesh = traced_mesh()
    if mesh is None:
        return {}
    return mesh.shape


def traced_mesh() -> Mesh | AbstractMesh | None:
    """The mesh that the current trace is for, if there is one."""
    mesh = _mesh.value
    if mesh is None:
        mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return None
    return mesh


@contextmanager
def on_one_device() -> Iterator[None]:
    """Functions are traced inside as for a mesh without axes, as for one device."""
    with _mesh(AbstractMesh((), ())):
        yield


def axes_asked_for() -> frozenset[str]:
    """The axes whose sizes the traces of this process may depend on."""
    return frozenset(_axes_read)


def trace_for(mesh: Mesh | AbstractMesh, trace: Callable[[], T]) -> T:
    """Calls a function that traces a user's function, for the devices of a mesh.

    Bare `PartitionSpec`s in the user's function refer to this mesh, and models choose operations
    of its devices. It is called again if it needs an ambient mesh.
    """
    with missing_mesh(), traced_over(mesh):
        return trace()
    with traced_over(mesh, ambient=True):
        return trace()


@contextmanager
def missing_mesh() -> Iterator[None]:
    """Suppresses the error of a function that needs an ambient mesh, and no other."""
    try:
        yield
    except Exception as error:
        # JAX has no type for these errors; all of their messages say "mesh". An error that has
        # another reason is raised again by the second attempt.
        if "mesh" not in str(error):
            raise


def needs_ambient_mesh(mesh: Mesh | AbstractMesh, trace: Callable[[], object]) -> bool:
    """Whether `trace` fails without an ambient mesh for this reason."""
    try:
        with missing_mesh(), traced_over(mesh):
            trace()
            return False
    except Exception:
        return False
    return True


@contextmanager
def traced_over(mesh: Mesh | AbstractMesh, *, ambient: bool = False) -> Iterator[None]:
    """Functions are traced inside for the devices of a mesh, as in `trace_for`.

    Without `ambient`, functions that need an ambient mesh, such as `jax.shard_map` without a mesh,
    raise an error.
    """
    mesh = with_auto_axes(mesh)
    here = jax.sharding.get_abstract_mesh()
    with contextlib.ExitStack() as stack:
        if isinstance(mesh, Mesh):
            stack.enter_context(compiling_for(target_of(mesh.devices.flat[0])))
        stack.enter_context(_mesh(mesh))
        stack.enter_context(_resolving_specs(mesh))
        # Inside `jax.shard_map`, it is the same mesh with some manual axes.
        same = dict(here.shape) == dict(mesh.shape) and not is_explicit(here)
        if here.empty or not same:
            # JAX changes to a mesh of another size only if there is none in between.
            stack.enter_context(use_abstract_mesh(AbstractMesh((), ())))
            if ambient:
                stack.enter_context(use_abstract_mesh(mesh.abstract_mesh))
        yield


@contextmanager
def _resolving_specs(mesh: Mesh | AbstractMesh) -> Iterator[None]:
    """Lets `with_sharding_constraint` resolve a bare `PartitionSpec` without an ambient mesh."""
    # `with mesh:` sets it too, but JAX deprecates that in favour of an ambient mesh.
    resources = getattr(_jax_mesh, "thread_resources", None)
    if resources is None:
        yield
        return
    before = resources.env
    resources.env = before.with_mesh(mesh)
    try:
        yield
    finally:
        resources.env = before


def without_ambient_mesh() -> AbstractContextManager[object]:
    """An ambient mesh may be one of other devices than those that are compiled for."""
    return jax.set_mesh(Mesh(np.empty((), object), ()))


@contextmanager
def collection_paused() -> Iterator[None]:
    """Pauses Python's collection of reference cycles.

    Traces and plans are many objects without cycles, which the collector goes through again and
    again: the more layers there are, the longer it takes.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def refuse_traced(tree: PyTree, caller: str, remedy: str) -> None:
    """Raises `TypeError` if arrays of the arguments of a function are tracers."""
    if any(isinstance(x, Tracer) for x in jax.tree.leaves(tree)):
        raise TypeError(
            f"`{caller}` was called inside `jax.vmap`, `jax.jit` or `jax.grad`, where arrays have "
            f"no values yet. {remedy}"
        )
