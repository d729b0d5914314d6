"""The mesh that `fit(..., mesh="auto")` uses."""

import logging
from typing import Any

import equinox as eqx
import jax
import optax
from jax.sharding import Mesh
from jaxtyping import PyTree

from ..distributed._mesh import make_mesh
from ..tracking._loggers import say
from ..train._step import TrainState
from ._job import Job
from ._mesh_search import suggest
from ._place import attached_place

logger = logging.getLogger("redcoast")
COMPILED = 3  # the number of meshes to compile


def auto_mesh(
    state: TrainState,
    optimizer: optax.GradientTransformation,
    batch: PyTree[jax.ShapeDtypeStruct],
    *,
    quiet: bool,
    **options: Any,
) -> Mesh:
    """The best mesh of all devices for a run's training step; the same in all processes.

    **Arguments:**

    - `state`: the initial state of the run, concrete or abstract.
    - `optimizer`, `options`: as for [`redcoast.fit`][].
    - `batch`: the shapes of a global batch.
    - `quiet`: whether to skip printing the table of meshes.
    """
    if jax.device_count() == 1:
        return make_mesh()
    abstract = eqx.filter_eval_shape(lambda: state)
    job = Job(abstract, batch, optimizer=optimizer, **options)
    found = suggest(job, attached_place(), COMPILED)
    if not quiet:
        say(str(found))
    if not found.fits:
        logger.warning(
            "The step fits on none of the compiled meshes; %s needs the least memory.", dict(found)
        )
    return make_mesh(**found)
