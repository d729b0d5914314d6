"""What functions are traced with: keys that are nothing but shapes, and a mesh."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, use_abstract_mesh


def abstract_key() -> Any:
    return jax.eval_shape(lambda: jax.random.key(0))


@contextmanager
def traced_over(mesh: Mesh | AbstractMesh) -> Iterator[None]:
    """Bare `PartitionSpec`s in a user's function that is traced inside refer to this mesh."""
    here = jax.sharding.get_abstract_mesh()
    if not here.empty and dict(here.shape) == dict(mesh.shape):
        # Inside of `jax.shard_map` it is the same mesh, some of whose axes are manual.
        yield
        return
    # JAX changes to a mesh of another size only if there is none in between.
    with use_abstract_mesh(AbstractMesh((), ())), use_abstract_mesh(mesh.abstract_mesh):
        yield


def without_ambient_mesh() -> AbstractContextManager[Any]:
    """An ambient mesh may be one of other devices than those that are compiled for."""
    return jax.set_mesh(Mesh(np.empty((), object), ()))
