"""Compiles a training step without the devices it is for."""

import functools as ft
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any, Literal

import equinox as eqx
import jax
import optax
from jax.sharding import Mesh, Sharding
from jaxtyping import PyTree

from ..core._frames import hide_frames
from ..core._pytree import split
from ..core._target import compiling_for
from ..core._tracing import without_ambient_mesh
from ..core._trainable import trainable_arrays
from ..distributed._mesh import AXES, PIPE
from ..sharding import Plan
from ..sharding.tree._overrides import Override
from ..train._compiler_options import Option, show_options
from ..train._loss import LossFn
from ._changes import find_changes
from ._compile_job import Compiled, compile_job, show_sizes
from ._devices import Place, planner_hardware, target_place
from ._job import Job, as_init_fn, make_job, plan_job, split_batch
from ._links import axis_bandwidths, slow_axes
from ._mesh_search import likely, promising
from ._phases import enter_phase
from ._report import DryRun
from ._roofline import time_bounds
from ._step_time import estimate_step_time
from .hlo._events import count_open_loops


@hide_frames
def dry_run(
    init_fn: PyTree,
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
    average: int | float | None = None,
    suggest: bool = True,
    memory: int | float | Literal["auto"] | None = None,
    compiler_options: Mapping[str, Option] | None = None,
) -> DryRun:
    """Compiles the step that [`redcoast.fit`][] would run, for devices that need not be present.

    No arrays are created: model, optimizer state and batch are abstract. The figures are from the
    accelerator's own compiler, if it is installed (`redcoast[tpu]`, `redcoast[cuda12]`; neither
    needs an accelerator). Otherwise, they are estimates from the CPU compiler, with a note.

    **Arguments:**

    - `init_fn`: `init_fn(key) -> model`, which is only traced; or a model, or its shapes.
    - `loss_fn`: `loss_fn(model, batch, key)`, as for [`redcoast.train_step`][].
    - `batch`: the global batch of a step: a PyTree of arrays or `jax.ShapeDtypeStruct`s, batch
        dimension first.
    - `optimizer`: an optax optimizer.
    - `target`: the devices: a slice of TPUs such as `"v4:4x4x4"` or `"v5e:4x4"`, GPUs such as
        `"a100-80gb:8"` or (hosts x cards) `"h100:8x8"`, or emulated devices such as `"cpu:8"`.
    - `mesh`: sizes such as `{"fsdp": 4, "model": 2}`, as for [`redcoast.make_mesh`][], or a mesh
        with these sizes. By default, the mesh with the lowest estimated cost on which the step is
        estimated to fit, and if there is none, the one of three compiled meshes that needs the
        least memory; [`redcoast.suggest_mesh`][] always compiles several.
    - `accumulate`, `compute_dtype`, `trainable`: as for [`redcoast.train_step`][].
    - `average`: as for [`redcoast.fit`][].
    - `overrides`: as for [`redcoast.infer_shardings`][].
    - `suggest`: whether to search for changes that make the step fit, if it does not. Each change
        is compiled.
    - `memory`: as for [`redcoast.plan_shardings`][]; `"auto"` is 85 % of what the target has.
    - `compiler_options`: as for [`redcoast.compile_step`][].

    **Returns:**

    A [`redcoast.DryRun`][]; `print` it to see a table.

    **Raises:**

    `ValueError` or `TypeError` if an argument is invalid, the target does not exist, or the mesh
    does not match it; any error that `loss_fn` raises. `RuntimeError` if the target's compiler is
    installed but fails.

    !!! Example

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
    place, init_fn = target_place(target), as_init_fn(init_fn)
    with without_ambient_mesh(), compiling_for(place.device):
        make = ft.partial(
            make_job,
            loss_fn=loss_fn,
            batch=batch,
            optimizer=optimizer,
            overrides=overrides,
            trainable=trainable,
            average=average,
            compiler_options=place.known_options(compiler_options),
            memory=memory,
        )
        job = make(init_fn, accumulate=accumulate, compute_dtype=compute_dtype)
        sizes, meshes = mesh, list[Mapping[str, int]]()
        if isinstance(mesh, Mesh):
            sizes = mesh.shape
        if sizes is None:
            meshes += promising(job, place)
        elif isinstance(sizes, Mapping) and set(sizes) <= {*AXES, PIPE}:
            meshes.append(sizes)
        else:
            raise TypeError(
                f"`mesh` is {sizes!r}. It must be a mesh, or sizes of `data`, `fsdp`, `model` and "
                '`pipe`, such as {"fsdp": 4, "model": 2}.'
            )
        runs = [_result(job, place, *_compile(job, place, sizes)) for sizes in meshes]
        run = _smallest(runs)
        if run.fits or not suggest:
            return run
        compiled_meshes = [each.mesh for each in runs]
        others = [sizes for sizes in likely(job, place) if sizes not in compiled_meshes]

        def again(job: Job, sizes: Mapping[str, int]) -> Compiled:
            _, _, compiled = _compile(job, place, sizes)
            return compiled

        changes = find_changes(make, init_fn, job, run, others, again)
        return replace(run, changes=tuple(changes))


def _compile(job: Job, place: Place, sizes: Mapping[str, int]) -> tuple[Mesh, Plan, Compiled]:
    try:
        mesh = place.mesh(sizes)
    except ValueError as error:
        raise ValueError(f"The mesh does not match the target {place.name!r}. {error}") from error
    enter_phase("Planning", f"the mesh {show_sizes(mesh.shape)}")
    plan = plan_job(job, mesh, planner_hardware(place, mesh))
    compiled = compile_job(job, plan, mesh, stands_in=place.stands_in, with_lines=True)
    return mesh, plan, compiled


def _smallest(runs: Sequence[DryRun]) -> DryRun:
    """The run that needs the least memory, with a note on the others."""
    best = min(runs, key=lambda run: run.memory["peak"])
    if len(runs) == 1:
        return best
    sizes = [f"{show_sizes(run.mesh)} needs {run.memory['peak'] / 1e9:.4g} GB" for run in runs]
    note = (
        "By their plans, the step fits on no mesh. Those that need the least were compiled, and "
        f"the smallest is shown: {'; '.join(sizes)}."
    )
    return replace(best, notes=(*best.notes, note))


def _result(job: Job, place: Place, mesh: Mesh, plan: Plan, compiled: Compiled) -> DryRun:
    target = place.target
    assert target is not None
    bounds, step, notes = None, None, list(place.notes)
    if compiled.moved is not None:  # the compiler has accepted the program
        repeated = 0.0
        program = plan.report.program_or_none
        if program is not None and program.arithmetic.per_device:
            # Without repetition, the devices together do exactly the arithmetic of the program.
            of_devices = mesh.size * program.arithmetic.per_device
            repeated = max(0.0, 1 - program.arithmetic.flops / of_devices)
        bandwidths = axis_bandwidths(target, mesh)
        bounds = time_bounds(
            flops=compiled.flops,
            moved_bytes=compiled.moved,
            sent_bytes=compiled.sent,
            chip=target.chip,
            bandwidths=bandwidths,
            repeated=repeated,
        )
        step = estimate_step_time(
            compiled.events,
            chip=target.chip,
            bandwidths=bandwidths,
            slow_axes=slow_axes(target, mesh),
            groups=target.groups,
        )
    if layers := job.training.layers(job.state.model, job.batch, mesh):
        notes.append(f"Layers of the model: {layers}.")
    if options := job.training.options_for(mesh):
        notes.append(f"Options of the compiler: {show_options(options)}.")
    # Loops without products are counted in the compiled program alone.
    open_loops = max(compiled.open_loops, count_open_loops(compiled.events))
    if open_loops:
        loops = "A loop has"
        if open_loops > 1:
            loops = f"{open_loops} loops have"
        notes.append(
            f"{loops} a trip count that depends on the data, and is counted as one iteration: the "
            "real time and number of operations are higher than the figures here, and so may be "
            "the communication."
        )
    sent = None  # unknown
    if not compiled.refused:
        sent = compiled.sent.total()
    return DryRun(
        target=target.name,
        devices=target.count,
        compiler=place.compiler,
        notes=tuple(notes),
        mesh=dict(mesh.shape),
        fits=not compiled.refused and compiled.peak <= target.chip.usable,
        refused=compiled.refused,
        memory=_memory(job, plan, mesh, compiled) | {"usable": target.chip.usable},
        traffic=compiled.traffic or (),
        sent_bytes=sent,
        arithmetic=compiled.flops,
        bounds=bounds,
        step=step,
        rows=job.rows,
        compile_seconds=compiled.seconds,
        plan=plan,
        lines=compiled.lines,
    )


def _memory(job: Job, plan: Plan, mesh: Mesh, compiled: Compiled) -> dict[str, int]:
    """Bytes of memory on each device, by use."""
    arrays, _ = split(job.state.model)
    is_trained = trainable_arrays(job.state.model, job.training.trainable)
    shardings = jax.tree.leaves(plan.shardings.model)
    gradients = 0
    # Gradients have the shardings of their parameters.
    for x, sharding, trained in zip(arrays, shardings, is_trained, strict=True):
        if trained:
            gradients += _shard_bytes(x, sharding)
    batch = jax.tree.leaves(split_batch(job, mesh))
    totals = plan.report.totals
    memory = {
        "parameters": totals.parameters.bytes_per_device,
        "optimizer_state": totals.optimizer_state.bytes_per_device,
        "other": totals.other.bytes_per_device,
        "batch": sum(_shard_bytes(x, x.sharding) for x in batch),
        "gradients": gradients,
    }
    if compiled.temporaries is not None:
        memory["temporaries"] = compiled.temporaries
    memory["peak"] = compiled.peak
    return memory


def _shard_bytes(x: jax.Array | jax.ShapeDtypeStruct, sharding: Sharding) -> int:
    """The bytes of an array on each device."""
    return prod(sharding.shard_shape(x.shape)) * x.dtype.itemsize
