"""Searches for the smallest number of devices, the longest sequence, and a mesh that fits."""

import contextlib
from collections.abc import Callable
from itertools import combinations_with_replacement
from math import prod

import redcoast as rc
from redcoast.dryrun._chips import Chip
from redcoast.dryrun._target_name import TargetDevices, parse_target

from ._workload import MOST_TOKENS, Workload, state_bytes

STEP = 128  # tokens; lengths are multiples of it
SIDES = (1, 2, 4, 8, 16)  # the sides of slices
CARDS = tuple(2**n for n in range(11))  # numbers of GPUs, over several hosts if need be
COMPILED = 2  # meshes to compile if the first does not fit, and as many again if none of these does


def longest_sequence(fits: Callable[[int], bool], start: int) -> int:
    """The longest sequence that fits, in tokens, found by doubling and then bisection.

    It is 0 if 128 tokens do not fit, and at most 2**20. `fits` is called once for each length.
    """
    low, high, most = 0, min(-(-start // STEP), MOST_TOKENS // STEP), MOST_TOKENS // STEP
    while fits(high * STEP):
        if high == most:
            return MOST_TOKENS
        low, high = high, min(2 * high, most)
    while high - low > 1:
        middle = (low + high) // 2
        if fits(middle * STEP):
            low = middle
        else:
            high = middle
    return low * STEP


def sizes_of(chip: Chip) -> list[TargetDevices]:
    """The targets of a chip, from the smallest to the largest.

    For TPUs, the most compact slice of each size whose sides are powers of two. For GPUs, powers of
    two, in full hosts.
    """
    if chip.kind == "tpu":
        shapes = [(2, 2, 1), *combinations_with_replacement(SIDES, 2)]
        shapes += combinations_with_replacement(SIDES, 3)
        shapes.sort(key=lambda shape: (prod(shape), sum(shape)))
    else:
        shapes = [(count,) for count in CARDS if count <= chip.per_host]
        shapes += [(n // chip.per_host, chip.per_host) for n in CARDS if n > chip.per_host]
    targets: dict[int, TargetDevices] = {}
    for shape in shapes:
        with contextlib.suppress(ValueError):  # not all of these slices exist
            target = parse_target(f"{chip.name}:{'x'.join(map(str, shape))}")
            targets.setdefault(target.count, target)
    return [targets[count] for count in sorted(targets)]


def dry_run_to_fit(
    workload: Workload, rows: int, target: str, *, usable: int | None = None, **options: object
) -> rc.DryRun:
    """A dry run on the mesh with the lowest estimated cost; if it does not fit, on another mesh.

    `usable` overrides the target's bytes of memory on a device. `options` are further arguments of
    `redcoast.dry_run`.
    """
    devices = parse_target(target)
    if usable is None:
        usable = devices.chip.usable
    arguments, settings = workload.arguments(rows), {"target": target, **options}
    run = rc.dry_run(*arguments, **settings, suggest=False)
    # No mesh helps if parameters, gradients and AdamW's two moments alone do not fit.
    hopeless = 4 / 3 * state_bytes(workload) >= devices.count * usable
    if hopeless or (run.fits and run.memory["peak"] <= usable):
        return run
    compiled = COMPILED
    if usable < devices.chip.usable:
        compiled *= 2  # a program that fits the target may not fit `usable`
    suggestion = rc.suggest_mesh(*arguments, **settings, compiled=compiled)
    mesh = dict(suggestion)
    for candidate in suggestion.candidates:  # the best come first
        if candidate.fits and (candidate.peak_memory or 0) <= usable:
            mesh = candidate.mesh
            break
    if mesh == run.mesh:
        return run
    return rc.dry_run(*arguments, **settings, suggest=False, mesh=mesh)
