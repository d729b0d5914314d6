"""Runs a dry run on a mesh on which the step fits, if there is one."""

from typing import Any

import redcoast as rc
from redcoast.dryrun._target_name import TargetDevices

from ._workload import Workload, state_bytes

COMPILED = 2  # meshes to compile if the first does not fit; twice as many if these do not either


def dry_run_to_fit(
    workload: Workload,
    rows: int,
    target: TargetDevices,
    *,
    usable: int | None = None,
    **options: Any,
) -> rc.DryRun:
    """A dry run on the mesh with the lowest estimated cost; if it does not fit, on another mesh.

    `usable` overrides the target's bytes of memory on a device. `options` are further arguments of
    `redcoast.dry_run`.
    """
    usable = target.chip.usable if usable is None else usable
    arguments, settings = workload.arguments(rows), {"target": target.name, **options}
    run = rc.dry_run(*arguments, **settings, suggest=False)
    # No mesh helps if parameters, gradients and AdamW's two moments alone do not fit.
    hopeless = 4 / 3 * state_bytes(workload) >= target.count * usable
    if hopeless or (run.fits and run.memory["peak"] <= usable):
        return run
    # A program that fits the target may not fit `usable`, so more meshes are compiled.
    compiled = COMPILED if usable >= target.chip.usable else 2 * COMPILED
    mesh = _other_mesh(rc.suggest_mesh(*arguments, **settings, compiled=compiled), usable)
    return run if mesh == run.mesh else rc.dry_run(*arguments, **settings, suggest=False, mesh=mesh)


def _other_mesh(found: rc.MeshSuggestion, usable: int) -> dict[str, int]:
    """The best mesh that needs at most `usable` bytes; without one, the suggested mesh."""
    fit = (one for one in found.candidates if one.fits and (one.peak_memory or 0) <= usable)
    best = next(fit, None)
    return dict(found) if best is None else best.mesh
