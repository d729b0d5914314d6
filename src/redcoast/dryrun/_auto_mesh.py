"""The mesh that `fit` takes if it is left to it."""

import logging
from typing import Any

import equinox as eqx
import jax
import optax
from jax.sharding import Mesh
from jaxtyping import PyTree

from ..distributed._mesh import make_mesh
from ..tracking._run import say
from ..train._step import TrainState
from ._job import Job
from ._mesh_search import suggest
from ._place import at_hand

logger = logging.getLogger("redcoast")
COMPILED = 3


def auto_mesh(
    state: TrainState,
    optimizer: optax.GradientTransformation,
    batch: PyTree[jax.ShapeDtypeStruct],
    *,
    quiet: bool,
    **options: Any,
) -> Mesh:
    """The best mesh of all devices for a run's steps, the same in all processes.

    **Arguments:**

    - `state`: what the run begins with; it may be abstract.
    - `optimizer`, `options`: as for [`redcoast.fit`][].
    - `batch`: the shapes of a batch.
    - `quiet`: whether to print no table.
    """
    if jax.device_count() == 1:
        return make_mesh()
    abstract = eqx.filter_eval_shape(lambda: state)
    job = Job(abstract, batch, optimizer=optimizer, **options)
    found = suggest(job, at_hand(), COMPILED)
    if not quiet:
        say(str(found))
    if not found.fits:
        logger.warning(
            "The step fits on none of the meshes compiled; %s is next to it.", dict(found)
        )
    return make_mesh(**found)
