"""What functions are traced with: keys that are nothing but shapes, a mesh, and its devices."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, use_abstract_mesh

from ._target import compiling_for, target_of


def abstract_key() -> Any:
    return jax.eval_shape(lambda: jax.random.key(0))


@contextmanager
def traced_over(mesh: Mesh | AbstractMesh) -> Iterator[None]:
    """Bare `PartitionSpec`s in a user's function that is traced inside refer to this mesh, and
    models choose operations of its devices."""
    on = compiling_for(target_of(mesh.devices.flat[0])) if isinstance(mesh, Mesh) else nullcontext()
    here = jax.sharding.get_abstract_mesh()
    if not here.empty and dict(here.shape) == dict(mesh.shape):
        # Inside of `jax.shard_map` it is the same mesh, some of whose axes are manual.
        with on:
            yield
        return
    # JAX changes to a mesh of another size only if there is none in between.
    with on, use_abstract_mesh(AbstractMesh((), ())), use_abstract_mesh(mesh.abstract_mesh):
        yield


def without_ambient_mesh() -> AbstractContextManager[Any]:
    """An ambient mesh may be one of other devices than those that are compiled for."""
    return jax.set_mesh(Mesh(np.empty((), object), ()))
