"""Finds the mesh on which a step is fastest, by estimates for all and compilation of the best."""

import functools as ft
import logging
import math
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import inf
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jaxtyping import PyTree

from ..core._errors import check_integer
from ..core._frames import hide_frames
from ..core._output import say
from ..core._target import compiling_for
from ..core._tracing import without_ambient_mesh
from ..distributed._kv_store import exchange
from ..distributed._mesh import PIPE, make_mesh
from ..sharding import Hardware
from ..sharding.constrain._function import Unconstrained
from ..sharding.program._shared_programs import sharing_programs
from ..sharding.solver._hardware import FILLED
from ..sharding.tree._overrides import Override
from ..train._compiler_options import Option
from ..train._loss import LossFn
from ._compile_job import compile_job, show_sizes
from ._devices import Place, attached_place, planner_hardware, target_hardware, target_place
from ._job import Job, as_init_fn, factorisations, make_job, plan_job, scanned_layers
from ._links import axis_bandwidths
from ._mesh_table import Candidate, MeshSuggestion
from ._phases import enter_phase
from ._roofline import bandwidth, peak

logger = logging.getLogger("redcoast")


@hide_frames
def suggest_mesh(
    init_fn: PyTree,
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
    average: int | float | None = None,
    memory: int | float | Literal["auto"] | None = None,
    compiler_options: Mapping[str, Option] | None = None,
) -> MeshSuggestion:
    """Finds the mesh on which a training step is fastest, among those on which it fits.

    Every factorisation of the devices into data x fsdp x model is planned, and, if the loss scans
    over layers that can be divided into stages, into pipe x data x fsdp x model. The time of a step
    is estimated from the plan: arithmetic at the devices' peak rate, including the bubble of a
    pipeline, plus communication at the bandwidth of their links. The best few are compiled, with
    abstract values. The result is the mesh whose compiled program fits and has the least estimated
    time, or, if none fits, needs the least memory.

    **Arguments:**

    - `init_fn`: `init_fn(key) -> model`, which is only traced; or a model, or its shapes.
    - `loss_fn`: `loss_fn(model, batch, key)`, as for [`redcoast.train_step`][].
    - `batch`: the global batch of a step: a PyTree of arrays or `jax.ShapeDtypeStruct`s, batch
        dimension first.
    - `optimizer`: an optax optimizer.
    - `target`: the name of devices that need not be present, such as `"v4:2x2x2"`, `"a100-80gb:8"`,
        or `"cpu:8"`. By default, the attached devices, of which only the memory is known.
    - `compiled`: the number of meshes to compile. If none of them fits, at most as many more are
        compiled until one does, in order of estimated memory.
    - `accumulate`, `compute_dtype`, `trainable`: as for [`redcoast.train_step`][].
    - `average`: as for [`redcoast.fit`][].
    - `memory`: as for [`redcoast.dry_run`][]: on meshes on which the step does not fit, the
        backward pass recomputes the least that suffices, which counts as arithmetic.
    - `overrides`: as for [`redcoast.infer_shardings`][].
    - `compiler_options`: as for [`redcoast.compile_step`][], for the meshes that are compiled.

    **Returns:**

    A mapping with the sizes of `data`, `fsdp` and `model`, and of `pipe` for a pipeline, for
    `redcoast.make_mesh(**suggestion)`; `print` it to see a table of all meshes.

    **Raises:**

    `ValueError` or `TypeError` if an argument is invalid, the target does not exist, or the step
    cannot be run on any mesh; any error that `loss_fn` raises. `RuntimeError` if the target's
    compiler is installed but does not work.

    !!! Example

        ```python
        import jax
        import jax.numpy as jnp
        import optax
        import redcoast as rc

        init_fn = lambda key: {"up": jnp.zeros((64, 256)), "down": jnp.zeros((256, 64))}
        loss_fn = lambda p, x, key: jnp.mean((jax.nn.relu(x @ p["up"]) @ p["down"]) ** 2)
        batch = jax.ShapeDtypeStruct((32, 64), jnp.float32)
        suggestion = rc.suggest_mesh(init_fn, loss_fn, batch, optax.adamw(1e-3), target="cpu:4")
        print(suggestion)
        ```
    """
    check_integer("compiled", compiled)
    with without_ambient_mesh():
        if target is None:
            place = attached_place()
        else:
            place = target_place(target)
        job = make_job(
            *(as_init_fn(init_fn), loss_fn, batch, optimizer),
            accumulate=accumulate,
            compute_dtype=compute_dtype,
            overrides=overrides,
            trainable=trainable,
            average=average,
            memory=memory,
            compiler_options=place.known_options(compiler_options),
        )
        return suggest(job, place, compiled)


def auto_mesh(job: Job, *, quiet: bool) -> Mesh:
    """The best mesh of all devices for a run's training step; the same in all processes.

    If not `quiet`, the table of meshes is printed.
    """
    if jax.device_count() == 1:
        return make_mesh()
    job = replace(job, state=eqx.filter_eval_shape(lambda: job.state))
    suggestion = suggest(job, attached_place(), compiled=3)
    if not quiet:
        say(str(suggestion))
    if not suggestion.fits:
        logger.warning(
            "The step fits on none of the compiled meshes; %s needs the least memory.",
            dict(suggestion),
        )
    return make_mesh(**suggestion)


def estimate_mesh(job: Job, place: Place, sizes: dict[str, int]) -> Candidate:
    """The planner's estimate of time and memory on a mesh of these sizes."""
    mesh = place.mesh(sizes)
    dtype = dtype_of(job)
    try:
        plan = plan_job(job, mesh, target_hardware(place, mesh, dtype))
    except ValueError as error:  # for example, an override that does not divide
        return Candidate(sizes, error=str(error))
    sent: Counter[str] = Counter()
    program = plan.report.program_or_none
    if program is None:  # on one device, nothing is planned
        return Candidate(sizes, _seconds(place, mesh, {dtype: 0}, sent), None)
    for cost in program.traffic:
        sent["+".join(cost.axes)] += cost.bytes
    flops, recomputed = program.arithmetic.per_device, 0.0
    if program.recomputed is not None:
        flops += program.recomputed.flops
        recomputed = program.recomputed.share
    # A plan's arithmetic is that of one of the `accumulate` parts of the batch.
    flops *= job.training.accumulate
    seconds = _seconds(place, mesh, {dtype: flops}, sent)
    # The batch may be sharded over `model`, and parameters of tensor parallelism over `fsdp`.
    usual = "model" not in program.batch_axes and "fsdp" not in program.model_axes
    undivided = program.arithmetic.per_device >= program.arithmetic.flops > 0
    repeated = undivided and mesh.size > 1
    return Candidate(sizes, seconds, program.memory.total, usual, repeated, recomputed=recomputed)


def compile_candidate(job: Job, place: Place, candidate: Candidate) -> Candidate:
    """Adds the compiler's figures of the step that `fit` runs on this mesh."""
    mesh = place.mesh(candidate.mesh)
    flops: Mapping[str, int | float] = {}
    try:
        enter_phase("Planning", f"the mesh {show_sizes(mesh.shape)}")
        plan = plan_job(job, mesh, planner_hardware(place, mesh))
        compiled = compile_job(job, plan, mesh, stands_in=place.stands_in)
    except (ValueError, RuntimeError) as error:  # other meshes may still compile
        own = [str(error), 0, False, {}]
    else:
        flops = compiled.flops
        own = [None, compiled.peak, compiled.refused, dict(compiled.sent)]
    everyone = [own]
    if place.target is None:
        # Compilers that autotune may produce different programs in different processes, all of
        # which must choose the same mesh.
        everyone = exchange("the compiled step", own)
    errors, peaks, refused, sent_bytes = zip(*everyone, strict=True)
    # A mesh on which one process fails is of no use to the others.
    for error in errors:
        if error is not None:
            return replace(candidate, error=error)
    needed = max(peaks)  # the process with the largest program decides whether the step fits
    if any(refused):
        return replace(candidate, peak_memory=needed, fits=False)
    sent = Counter(sent_bytes[0])
    return replace(
        candidate,
        sent_bytes=sent.total(),
        seconds=_seconds(place, mesh, flops, sent),
        peak_memory=needed,
        fits=place.usable is None or needed <= place.usable,
    )


def _seconds(
    place: Place, mesh: Mesh, flops: Mapping[str, int | float], sent: Mapping[str, int | float]
) -> int | float:
    """Arithmetic at the peak rate plus communication at the full bandwidth, without overlap."""

    def rate(dtype: str) -> int | float:
        if place.target is None:
            return Hardware.flops
        return peak(place.target.chip, dtype)

    # Without a target, the links and the chip are unknown: the planner's defaults.
    speeds = dict.fromkeys(mesh.axis_names, float(Hardware.model_bandwidth))
    if place.target is not None:
        speeds = axis_bandwidths(place.target, mesh)
    network = sum(size / bandwidth(axes, speeds) for axes, size in sent.items())
    return sum(count / rate(dtype) for dtype, count in flops.items()) + network


def dtype_of(job: Job) -> str:
    """The dtype that a step computes in: `compute_dtype`, or the dtype of most parameters."""
    if job.training.compute_dtype is not None:
        return str(jnp.dtype(job.training.compute_dtype))
    sizes: Counter[str] = Counter()
    for x in jax.tree.leaves(job.state.model):
        if jnp.issubdtype(getattr(x, "dtype", bool), jnp.inexact):
            sizes[str(x.dtype)] += x.size
    return sizes.most_common(1)[0][0]


def suggest(job: Job, place: Place, compiled: int) -> MeshSuggestion:
    """Estimates all meshes, compiles the best few, and returns the best."""
    compiling = ft.partial(compile_candidate, job, place)
    with compiling_for(place.device), warnings.catch_warnings():
        # The warning may be about a mesh that is not chosen, and is repeated when the step runs.
        warnings.simplefilter("ignore", Unconstrained)
        return choose_mesh(_estimate_all(job, place), compiling, place, compiled)


# How many meshes are compiled where the step fits on none by the planner's estimate.
_COMPILED_IF_NONE_FITS = 3


def promising(job: Job, place: Place) -> list[dict[str, int]]:
    """The sizes of the mesh with the lowest estimated cost, among those that fit by the estimate.

    If none fits, those of the few meshes that need the least memory by the estimate. It is off by
    more than they differ, so that compiled programs have to decide.
    """
    estimated = _estimate_all(job, place)
    ordered = _ordered(estimated, place)
    if not ordered:
        raise _impossible(estimated)
    count = 1
    if _memory_of(ordered[0]) > _limit(place):
        count = _COMPILED_IF_NONE_FITS
    return [candidate.mesh for candidate in ordered[:count]]


def likely(job: Job, place: Place) -> list[dict[str, int]]:
    """The sizes of all possible meshes, the most promising first."""
    return [candidate.mesh for candidate in _ordered(_estimate_all(job, place), place)]


def _ordered(estimated: Sequence[Candidate], place: Place) -> list[Candidate]:
    """The meshes on which the step can be run.

    Those on which the step fits by the planner's estimate come first, by their estimated cost; the
    others follow, by their estimated memory.
    """
    limit = _limit(place)

    def rank(candidate: Candidate) -> tuple[int, int | float, bool]:
        if _memory_of(candidate) <= limit:
            return 0, *_cost_of(candidate)
        return 1, *_need_of(candidate)

    return sorted(_without_error(estimated), key=rank)


def _limit(place: Place) -> int | float:
    """The bytes that a step may need by the planner's estimate."""
    if place.usable is None:
        return inf
    return FILLED * place.usable


def _estimate_all(job: Job, place: Place) -> list[Candidate]:
    """Estimates of all meshes; on those that are too small, the backward pass recomputes values."""
    count = len(place.devices)
    keeping = replace(job, memory=None)
    with sharing_programs():
        candidates = _estimates(keeping, place, factorisations(count))
        layers = 0
        if count > 1:
            # The stages of a pipeline have equally many layers of every scan.
            # Without scans this is 0, so there are no stages.
            layers = math.gcd(*scanned_layers(job))
        for stages in range(2, layers + 1):
            if layers % stages or count % stages:
                continue
            meshes = [{PIPE: stages, **sizes} for sizes in factorisations(count // stages)]
            # If a step cannot run as a pipeline, a mesh without one does as much.
            candidates += _without_error(_estimates(keeping, place, meshes))
        limit = job.memory
        if limit == "auto":
            limit = _limit(place)
        if limit is None:
            return candidates
        # To plan within the limit takes longer. Meshes on which the step is slower without it than
        # on a mesh where it fits are left as they are.
        fitting = [x for x in _without_error(candidates) if _memory_of(x) <= limit]
        fastest = min(map(_cost_of, fitting), default=(inf, True))
        for index, candidate in enumerate(candidates):
            is_open = candidate.error is None and PIPE not in candidate.mesh
            if is_open and _memory_of(candidate) > limit and _cost_of(candidate) < fastest:
                limited = estimate_mesh(job, place, candidate.mesh)
                if limited.error is not None:
                    limited = replace(candidate, error=limited.error)
                candidates[index] = limited
        return candidates


def _estimates(job: Job, place: Place, meshes: Sequence[dict[str, int]]) -> list[Candidate]:
    candidates = []
    for number, sizes in enumerate(meshes, 1):
        enter_phase("Planning", f"mesh {number} of {len(meshes)}")
        candidates.append(estimate_mesh(job, place, sizes))
    return candidates


def _impossible(failed: Sequence[Candidate]) -> ValueError:
    # The mesh that needs the least, if the reason is the memory.
    closest = min(failed, key=lambda candidate: candidate.estimated_memory or inf)
    return ValueError(f"The step cannot be run on any mesh. On {closest.mesh}: {closest.error}")


def choose_mesh(
    estimated: Sequence[Candidate],
    compiling: Callable[[Candidate], Candidate],
    place: Place,
    compiled: int,
) -> MeshSuggestion:
    """Chooses the best of the estimated meshes; compiles up to twice `compiled` of them."""
    left = _without_error(estimated)
    failed = [candidate for candidate in estimated if candidate.error is not None]
    tried: list[Candidate] = []  # the meshes that were compiled without an error
    most = 2 * compiled
    while left and len(tried) < most:
        following = _following(left, tried, place.usable, compiled)
        left.remove(following)
        candidate = compiling(following)
        if candidate.error is not None:
            failed.append(candidate)
            continue
        tried.append(candidate)
        if candidate.fits:
            most = compiled
    if not tried:
        raise _impossible(failed)

    def rank(candidate: Candidate) -> tuple[int, int | float]:
        if candidate.fits:
            return 0, _compared(candidate, candidate.seconds)
        return 1, candidate.peak_memory or 0

    # Meshes that fit, by time, and then meshes that do not, by memory.
    tried.sort(key=rank)
    best = tried[0]
    return MeshSuggestion(
        sizes=best.mesh,
        fits=bool(best.fits),
        target=place.name,
        usable_memory=place.usable,
        candidates=(*tried, *sorted(left, key=_cost_of), *failed),
        notes=place.notes,
        speeds_assumed=place.target is None,
    )


# The smallest share of the planner's memory estimate that compiled programs have needed.
LEAST_SHARE = 0.8


def _following(
    left: Sequence[Candidate], tried: Sequence[Candidate], usable: int | None, compiled: int
) -> Candidate:
    """The mesh to compile next: the cheapest that may fit, or the one that needs least memory."""
    # The share of the estimated memory that this step's programs have needed so far.
    shares = []
    for candidate in tried:
        if candidate.peak_memory and candidate.estimated_memory:
            shares.append(candidate.peak_memory / candidate.estimated_memory)
    share = min(shares, default=LEAST_SHARE)
    promising = []
    for candidate in left:
        if usable is None or share * _memory_of(candidate) <= usable:
            promising.append(candidate)
    if promising and len(tried) < compiled:
        return min(promising, key=_cost_of)
    return min(left, key=_need_of)


# Estimates ignore that operations on microbatches are small, so stages must save time clearly.
_MARGIN = 1.1


def _cost_of(candidate: Candidate) -> tuple[int | float, bool]:
    return _compared(candidate, candidate.priced_seconds), not candidate.usual


def _compared(candidate: Candidate, seconds: int | float | None) -> int | float:
    if seconds is None:
        return 0
    if PIPE in candidate.mesh:
        return _MARGIN * seconds
    return seconds


def _need_of(candidate: Candidate) -> tuple[int | float, bool]:
    return _memory_of(candidate), not candidate.usual


def _memory_of(candidate: Candidate) -> int | float:
    return candidate.estimated_memory or 0


def _without_error(candidates: Sequence[Candidate]) -> list[Candidate]:
    return [candidate for candidate in candidates if candidate.error is None]
