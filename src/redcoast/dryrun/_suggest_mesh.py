"""Finds the mesh on which a training step is fastest."""

from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import optax
from jaxtyping import PyTree

from ..core._errors import check_integer
from ..core._frames import hide_frames
from ..core._tracing import without_ambient_mesh
from ..sharding.tree._overrides import Override
from ..train._loss import LossFn
from ._mesh_table import MeshSuggestion


@hide_frames
def suggest_mesh(
    init_fn: Callable[..., Any],
    loss_fn: LossFn,
    batch: PyTree,
    optimizer: optax.GradientTransformation,
    *,
    target: str | None = None,
    compiled: int = 3,
    accumulate: int = 1,
    compute_dtype: Any = None,
    overrides: Sequence[Override] = (),
    trainable: PyTree = eqx.is_inexact_array,
) -> MeshSuggestion:
    """Finds the mesh on which a training step is fastest, among those on which it fits.

    Every factorisation of the devices into data x fsdp x model is planned, and into pipe x data x
    fsdp x model if the loss scans over layers that divide into stages. Its time is estimated from
    the plan: arithmetic at the devices' peak rate, the bubble of a pipeline included, plus
    communication at the bandwidth of their links. The best few are compiled, with abstract values.
    Among those that fit, the mesh is chosen whose compiled program has the least estimated time. If
    none fits, it is the mesh that needs the least memory.

    **Arguments:**

    - `init_fn`: `init_fn(key)` makes the model; it is only traced.
    - `loss_fn`: `loss_fn(model, batch, key)`, as for [`redcoast.train_step`][].
    - `batch`: PyTree of arrays or `jax.ShapeDtypeStruct`s, batch dimension first: the global batch
        of a step, over all devices.
    - `optimizer`: an optax optimizer.
    - `target`: the name of devices that need not be present, such as `"v4:2x2x2"`,
        `"a100-80gb:8"`, or `"cpu:8"`. By default the attached devices, of which only the memory is
        known.
    - `compiled`: the number of meshes to compile. If none of them fits, up to as many more are
        compiled until one does, those with the least estimated memory first.
    - `accumulate`, `compute_dtype`, `trainable`: as for [`redcoast.train_step`][].
    - `overrides`: as for [`redcoast.infer_shardings`][].

    **Returns:**

    A mapping with the sizes of `data`, `fsdp` and `model`, and of `pipe` for a pipeline, ready for
    `redcoast.make_mesh(**suggestion)`; `print` it to see a table of all meshes.

    **Raises:**

    `ValueError` or `TypeError` if an argument is invalid, the target does not exist, or the step
    cannot be run on any mesh; any error that `loss_fn` raises. `RuntimeError` if the target's
    compiler is installed but does not work.

    !!! example

        ```python
        import jax
        import jax.numpy as jnp
        import optax
        import redcoast as rc

        init_fn = lambda key: {"up": jnp.zeros((64, 256)), "down": jnp.zeros((256, 64))}
        loss_fn = lambda p, x, key: jnp.mean((jax.nn.relu(x @ p["up"]) @ p["down"]) ** 2)
        batch = jax.ShapeDtypeStruct((32, 64), jnp.float32)
        found = rc.suggest_mesh(init_fn, loss_fn, batch, optax.adamw(1e-3), target="cpu:4")
        print(found)
        ```
    """
    # Imported here so that importing redcoast stays fast.
    from ._job import make_job
    from ._mesh_search import suggest
    from ._place import attached_place, target_place

    check_integer("compiled", compiled)
    with without_ambient_mesh():
        job = make_job(
            init_fn,
            loss_fn,
            batch,
            optimizer,
            accumulate=accumulate,
            compute_dtype=compute_dtype,
            overrides=overrides,
            trainable=trainable,
        )
        return suggest(job, attached_place() if target is None else target_place(target), compiled)
