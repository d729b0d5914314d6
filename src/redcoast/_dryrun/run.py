"""Compiles a step for devices that need not be there, and puts together what that says."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from jax.sharding import Mesh

from .._mesh import make_mesh
from .._parts import trainable_arrays
from .._sharding import Plan
from .bounds import time_bounds
from .changes import find_changes
from .compiled import Compiled, compile_job
from .links import axis_bandwidths
from .meshes import cheapest
from .place import Place, elsewhere, hardware_there
from .result import DryRun
from .step import Job, batch_bytes, plan_job

_COMPILERS = {"tpu": "tpu", "cuda": "cuda", "gpu": "cuda", "cpu": "cpu"}  # by platform


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
    again = lambda job, sizes: _compile(job, place, _mesh(sizes, place))[1]
    return replace(found, changes=tuple(find_changes(make, init_fn, job, found, again)))


def _sizes(mesh: Mesh | Mapping[str, int]) -> dict[str, int]:
    if isinstance(mesh, Mesh):
        return dict(mesh.shape)
    if not isinstance(mesh, Mapping) or not set(mesh) <= {"data", "fsdp", "model"}:
        raise TypeError(
            f"`mesh` is {mesh!r}. It must be a mesh, or sizes of `data`, `fsdp` and `model`, such "
            'as {"fsdp": 4, "model": 2}.'
        )
    return dict(mesh)


def _mesh(sizes: Mapping[str, int], place: Place) -> Mesh:
    try:
        return make_mesh(**sizes, devices=place.devices)
    except ValueError as error:
        raise ValueError(f"The mesh does not match the target {place.name!r}. {error}") from error


def _compile(job: Job, place: Place, mesh: Mesh) -> tuple[Plan, Compiled]:
    plan = plan_job(job, mesh, hardware_there(place, mesh))
    return plan, compile_job(job, plan, mesh, stands_in=place.stands_in)


def _result(job: Job, place: Place, mesh: Mesh, plan: Plan, compiled: Compiled) -> DryRun:
    target = place.target
    assert target is not None
    sent: Counter[str] = Counter()
    for one in compiled.traffic or ():
        sent[one["axis"]] += one["bytes"]
    bounds = time_bounds(
        flops=compiled.flops,
        moved_bytes=compiled.moved,
        sent_bytes=sent,
        chip=target.chip,
        bandwidths=axis_bandwidths(target, mesh),
    )
    return DryRun(
        target=target.name,
        devices=target.count,
        compiler=_COMPILERS[mesh.devices.flat[0].platform],
        notes=(*place.notes, *_notes(compiled)),
        mesh=dict(mesh.shape),
        fits=not compiled.refused and compiled.peak <= target.chip.usable,
        memory=memory(job, plan, mesh, compiled) | {"usable": target.chip.usable},
        traffic=compiled.traffic or (),
        sent_bytes=sent.total(),
        arithmetic=compiled.flops,
        bounds=bounds,
        compile_seconds=compiled.seconds,
        plan=plan,
    )


def _notes(compiled: Compiled) -> list[str]:
    if not compiled.open_loops:
        return []
    return [
        f"{compiled.open_loops} loops run as often as the data says, and were counted as if they "
        "ran once: there is more arithmetic than is said."
    ]


def memory(job: Job, plan: Plan, mesh: Mesh, compiled: Compiled) -> dict[str, int]:
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
    rows = [row for row in plan.report["rows"] if row["role"] == "parameter"]
    trained = trainable_arrays(job.state.model, job.trainable)
    return sum(row["bytes_per_device"] for row, yes in zip(rows, trained, strict=True) if yes)
