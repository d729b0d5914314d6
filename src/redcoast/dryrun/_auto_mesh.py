"""The mesh that `fit` takes if it is left to it."""

import logging
from collections.abc import Callable
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
    draw: Callable[[], PyTree],
    batch_size: int,
    *,
    quiet: bool,
    **options: Any,
) -> Mesh:
    """The best mesh of all devices for a run's steps, the same in all processes.

    **Arguments:**

    - `state`: what the run begins with; it may be abstract.
    - `optimizer`, `options`: as for [`redcoast.fit`][].
    - `draw`: makes what this process holds of a batch of `batch_size`.
    - `quiet`: whether to print no table.
    """
    if jax.device_count() == 1:
        return make_mesh()
    rows = lambda x: jax.ShapeDtypeStruct(
        (batch_size, *x.shape[1:]), jax.dtypes.canonicalize_dtype(x.dtype)
    )
    abstract = eqx.filter_eval_shape(lambda: state)
    job = Job(abstract, jax.tree.map(rows, draw()), optimizer=optimizer, **options)
    found = suggest(job, at_hand(), COMPILED)
    if not quiet:
        say(str(found))
    if not found.fits:
        logger.warning(
            "The step fits on none of the meshes compiled; %s is next to it.", dict(found)
        )
    return make_mesh(**found)
