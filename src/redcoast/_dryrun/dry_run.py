"""A training step without the devices it is for."""

import functools as ft
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import equinox as eqx
import optax
from jax.sharding import Mesh
from jaxtyping import PyTree

from .._abstract import without_ambient_mesh
from .._loss import LossFn
from .._sharding.overrides import Override
from .result import DryRun


def dry_run(
    init_fn: Callable[..., Any],
    loss_fn: LossFn,
    batch: PyTree,
    optimizer: optax.GradientTransformation,
    *,
    target: str,
    mesh: Mesh | Mapping[str, int] | None = None,
    accumulate: int = 1,
    compute_dtype: Any = None,
    overrides: Sequence[Override] = (),
    trainable: PyTree = eqx.is_inexact_array,
    suggest: bool = True,
) -> DryRun:
    """Compiles the step that [`redcoast.fit`][] would run, for devices that need not be there.

    No array is made: model, optimizer state and batch are shapes throughout. The figures are what
    the accelerator's own compiler says of the program that it makes, if that compiler is installed
    (`redcoast[tpu]`, `redcoast[cuda12]`; neither needs an accelerator), and else what the CPU's
    says, with a note.

    **Arguments:**

    - `init_fn`: `init_fn(key)` makes the model; it is only traced.
    - `loss_fn`: `loss_fn(model, batch, key)`, as for [`redcoast.train_step`][].
    - `batch`: PyTree of arrays or `jax.ShapeDtypeStruct`s, batch dimension first: the batch of a
        step, over all devices.
    - `optimizer`: an optax optimizer.
    - `target`: the devices: a slice of TPUs such as `"v4:4x4x4"` or `"v5e:4x4"`, GPUs such as
        `"a100-80gb:8"` or, hosts x cards, `"h100:8x8"`, or `"cpu:8"`.
    - `mesh`: sizes such as `{"fsdp": 4, "model": 2}`, as [`redcoast.make_mesh`][] takes them, or a
        mesh, whose sizes are taken. By default what the planner prices cheapest, of the meshes on
        which the step fits by its estimate; [`redcoast.suggest_mesh`][] compiles several.
    - `accumulate`, `compute_dtype`, `trainable`: as for [`redcoast.train_step`][].
    - `overrides`: as for [`redcoast.infer_shardings`][].
    - `suggest`: whether, if it does not fit, to look for changes with which it does. Each is
        compiled.

    **Returns:**

    A [`redcoast.DryRun`][]; `print` it to see a table.

    **Raises:**

    `ValueError` or `TypeError` if an argument cannot work, the target does not exist, or the mesh
    does not match it; what `loss_fn` raises. `RuntimeError` if the target's compiler is installed,
    and fails.

    !!! example

        ```python
        import jax
        import jax.numpy as jnp
        import optax
        import redcoast as rc

        init_fn = lambda key: {"up": jnp.zeros((64, 256)), "down": jnp.zeros((256, 64))}
        loss_fn = lambda p, x, key: jnp.mean((jax.nn.relu(x @ p["up"]) @ p["down"]) ** 2)
        batch = jax.ShapeDtypeStruct((32, 64), jnp.float32)
        print(rc.dry_run(init_fn, loss_fn, batch, optax.adamw(1e-3), target="cpu:4"))
        ```
    """
    # Imported when it is first asked for, so that importing redcoast stays cheap.
    from .run import run
    from .step import make_job

    make = ft.partial(
        make_job,
        loss_fn=loss_fn,
        batch=batch,
        optimizer=optimizer,
        overrides=overrides,
        trainable=trainable,
    )
    options = {"accumulate": accumulate, "compute_dtype": compute_dtype}
    with without_ambient_mesh():
        return run(init_fn, target, mesh, make, suggest, **options)
