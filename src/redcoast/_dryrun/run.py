"""Compiles a step for devices that need not be there, and puts together what that says."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from jax.sharding import Mesh

from .._mesh import AXES
from .._parts import trainable_arrays
from .._sharding import Plan
from .bounds import time_bounds
from .changes import find_changes
from .compiled import Compiled, compile_job
from .links import axis_bandwidths
from .meshes import cheapest, likely
from .place import Place, elsewhere, hardware_there
from .result import DryRun
from .step import Job, batch_bytes, plan_job


def run(
    init_fn: Callable[..., Any],
    target: str,
    mesh: Mesh | Mapping[str, int] | None,
    make: Callable[..., Job],
    suggest: bool,
    **options: Any,
) -> DryRun:
    """`make(init_fn, **options)` is the step."""
    place = elsewhere(target)
    job = make(init_fn, **options)
    sizes = cheapest(job, place) if mesh is None else _sizes(mesh)
    made = _mesh(sizes, place)
    plan, compiled = _compile(job, place, made)
    found = _result(job, place, made, plan, compiled)
    if found.fits or not suggest:
        return found
    others = [sizes for sizes in likely(job, place) if sizes != found.mesh]
    again = lambda job, sizes: _compile(job, place, _mesh(sizes, place))[1]
    changes = find_changes(make, init_fn, job, found, others, again)
    return replace(found, changes=tuple(changes))


def _sizes(mesh: Mesh | Mapping[str, int]) -> dict[str, int]:
    sizes = mesh.shape if isinstance(mesh, Mesh) else mesh
    if not isinstance(sizes, Mapping) or not set(sizes) <= set(AXES):
        raise TypeError(
            f"`mesh` is {sizes!r}. It must be a mesh, or sizes of `data`, `fsdp` and `model`, such "
            'as {"fsdp": 4, "model": 2}.'
        )
    return dict(sizes)


def _mesh(sizes: Mapping[str, int], place: Place) -> Mesh:
    try:
        return place.mesh(sizes)
    except ValueError as error:
        raise ValueError(f"The mesh does not match the target {place.name!r}. {error}") from error


def _compile(job: Job, place: Place, mesh: Mesh) -> tuple[Plan, Compiled]:
    plan = plan_job(job, mesh, hardware_there(place, mesh))
    return plan, compile_job(job, plan, mesh, stands_in=place.stands_in)


def _result(job: Job, place: Place, mesh: Mesh, plan: Plan, compiled: Compiled) -> DryRun:
    target = place.target
    assert target is not None
    bounds = None
    if compiled.moved is not None:
        bounds = time_bounds(
            flops=compiled.flops,
            moved_bytes=compiled.moved,
            sent_bytes=compiled.sent,
            chip=target.chip,
            bandwidths=axis_bandwidths(target, mesh),
        )
    return DryRun(
        target=target.name,
        devices=target.count,
        compiler=place.compiler,
        notes=(*place.notes, *_notes(compiled)),
        mesh=dict(mesh.shape),
        fits=not compiled.refused and compiled.peak <= target.chip.usable,
        refused=compiled.refused,
        memory=_memory(job, plan, mesh, compiled) | {"usable": target.chip.usable},
        traffic=compiled.traffic or (),
        sent_bytes=None if compiled.refused else compiled.sent.total(),
        arithmetic=compiled.flops,
        bounds=bounds,
        compile_seconds=compiled.seconds,
        plan=plan,
    )


def _notes(compiled: Compiled) -> list[str]:
    if not compiled.open_loops:
        return []
    loops = "A loop runs" if compiled.open_loops == 1 else f"{compiled.open_loops} loops run"
    return [
        f"{loops} as often as the data says, and what is in there is counted as if it ran once: "
        "there is more arithmetic than is said, and more may be sent."
    ]


def _memory(job: Job, plan: Plan, mesh: Mesh, compiled: Compiled) -> dict[str, int]:
    """Bytes on each device, by what they hold."""
    totals = plan.report["totals"]
    found = {
        "parameters": totals["parameter"]["bytes_per_device"],
        "optimizer_state": totals["optimizer state"]["bytes_per_device"],
        "other": totals["other"]["bytes_per_device"],
        "batch": batch_bytes(job, mesh),
        "gradients": _gradients(job, plan),
    }
    if compiled.temporaries is not None:
        found["temporaries"] = compiled.temporaries
    return found | {"peak": compiled.peak}


def _gradients(job: Job, plan: Plan) -> int:
    # The model's arrays come first in a plan of a state.
    trained = trainable_arrays(job.state.model, job.trainable)
    rows = plan.report["rows"][: len(trained)]
    return sum(row["bytes_per_device"] for row, yes in zip(rows, trained, strict=True) if yes)
