"""The best mesh for a training step: every factorisation priced, the best few compiled."""

import functools as ft
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import inf

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from ..distributed._kv_store import exchange
from ..sharding.solver._memory import FILLED
from ._compile import compile_job
from ._job import Job, factorisations, plan_job
from ._mesh_table import Candidate, MeshSuggestion
from ._place import Place, hardware_of_target, hardware_there, rate_of, speeds_of
from ._roofline import bandwidth


def price(job: Job, place: Place, sizes: dict[str, int]) -> Candidate:
    """What the planner counts."""
    mesh = place.mesh(sizes)
    hardware = hardware_there(place, mesh)
    if place.target is not None:
        hardware = hardware_of_target(place.target, mesh, dtype_of(job))
    try:
        plan = plan_job(job, mesh, hardware)
    except ValueError as error:  # an override that does not divide, say
        return Candidate(sizes, error=str(error))
    sent: Counter[str] = Counter()
    for one in plan.report.get("traffic", ()):
        sent[one["axis"].replace(" x ", "+")] += one["bytes"] * job.accumulate
    flops = plan.report.get("arithmetic", {"per_device": 0})["per_device"] * job.accumulate
    seconds = _seconds(place, mesh, {dtype_of(job): flops}, sent)
    batch, model = (plan.report.get(name, ()) for name in ("batch_axes", "model_axes"))
    usual = "model" not in batch and "fsdp" not in model
    return Candidate(sizes, seconds, plan.report.get("memory", {}).get("total"), usual)


def compile_candidate(job: Job, place: Place, one: Candidate) -> Candidate:
    """With what the compiler says of the step that `fit` runs on this mesh."""
    mesh = place.mesh(one.mesh)
    found, wrong = None, None
    try:
        plan = plan_job(job, mesh, hardware_there(place, mesh))
        found = compile_job(job, plan, mesh, stands_in=place.stands_in)
    except ValueError as error:
        wrong = str(error)
    except RuntimeError as error:  # of one mesh: others may well be compiled
        wrong = str(error)
    own = [wrong, found.peak, found.refused, dict(found.sent)] if found else [wrong, 0, False, {}]
    # Compilers that try out what is fast may come to different results in different processes,
    # which all have to choose the same mesh of the devices at hand.
    everyone = exchange("a compiled step", own) if place.target is None else [own]
    if found is None or any(wrong for wrong, *_ in everyone):
        return replace(one, error=next(wrong for wrong, *_ in everyone if wrong))
    needed = max(peak for _, peak, *_ in everyone)
    if any(refused for _, _, refused, _ in everyone):
        return replace(one, peak_memory=needed, fits=False)
    sent = Counter(everyone[0][3])
    return replace(
        one,
        sent_bytes=sent.total(),
        seconds=_seconds(place, mesh, found.flops, sent),
        peak_memory=needed,
        fits=place.usable is None or needed <= place.usable,
    )


def _seconds(
    place: Place, mesh: Mesh, flops: Mapping[str, int | float], sent: Mapping[str, int | float]
) -> int | float:
    """Arithmetic at the peak rate, and what is sent at that of the links, one after the other."""
    speeds = speeds_of(place, mesh)
    network = sum(size / bandwidth(axes, speeds) for axes, size in sent.items())
    return sum(count / rate_of(place, dtype) for dtype, count in flops.items()) + network


def dtype_of(job: Job) -> str:
    """The dtype that a step computes in: that of most of the parameters, unless it casts."""
    if job.compute_dtype is not None:
        return str(jnp.dtype(job.compute_dtype))
    held: Counter[str] = Counter()
    for x in jax.tree.leaves(job.state.model):
        if jnp.issubdtype(getattr(x, "dtype", bool), jnp.inexact):
            held[str(x.dtype)] += x.size
    return held.most_common(1)[0][0]


# Of what the planner estimated, compiled programs took this share of memory at the least.
LEAST_SHARE = 0.8


def suggest(job: Job, place: Place, compiled: int) -> MeshSuggestion:
    """Prices all meshes, compiles the best, and says which it is."""
    priced = [price(job, place, sizes) for sizes in factorisations(len(place.devices))]
    return choose(priced, ft.partial(compile_candidate, job, place), place, compiled)


def cheapest(job: Job, place: Place) -> dict[str, int]:
    """The sizes of the mesh that the planner prices cheapest, of those that fit by its estimate;
    if none does, of that which needs the least memory."""
    priced = [price(job, place, sizes) for sizes in factorisations(len(place.devices))]
    possible = _tried(priced)
    if not possible:
        raise _impossible(priced[0])
    usable = inf if place.usable is None else FILLED * place.usable
    may = [one for one in possible if _memory_of(one) <= usable]
    return (min(may, key=_price_of) if may else min(possible, key=_need_of)).mesh


def likely(job: Job, place: Place) -> list[dict[str, int]]:
    """The sizes of the meshes on which the step may fit, those first that are priced cheapest of
    those which do by the planner's estimate, then those that need the least memory."""
    priced = [price(job, place, sizes) for sizes in factorisations(len(place.devices))]
    usable = inf if place.usable is None else FILLED * place.usable
    fits = lambda one: _memory_of(one) <= usable
    order = lambda one: (0, _price_of(one)) if fits(one) else (1, _need_of(one))
    return [one.mesh for one in sorted(_tried(priced), key=order)]


def _impossible(one: Candidate) -> ValueError:
    return ValueError(f"The step cannot be run on any mesh. On {one.mesh}: {one.error}")


def choose(
    priced: Sequence[Candidate],
    compiling: Callable[[Candidate], Candidate],
    place: Place,
    compiled: int,
) -> MeshSuggestion:
    """The best of some meshes, of which up to twice `compiled` are compiled by `compiling`."""
    left, done = [one for one in priced if one.error is None], []
    while left and not _enough(done, compiled):
        following = _following(left, done, place.usable, compiled)
        left.remove(following)
        done.append(compiling(following))
    wrong = [one for one in (*priced, *done) if one.error is not None]
    tried = sorted(_tried(done), key=_rank)
    if not tried:
        raise _impossible(wrong[0])
    best, ordered = tried[0], (*tried, *sorted(left, key=_price_of), *wrong)
    return MeshSuggestion(
        best.mesh, bool(best.fits), place.name, place.usable, ordered, place.notes
    )


def _tried(done: Sequence[Candidate]) -> list[Candidate]:
    return [one for one in done if one.error is None]


def _enough(done: Sequence[Candidate], compiled: int) -> bool:
    tried = _tried(done)
    found = any(one.fits for one in tried)
    return len(tried) >= (compiled if found else 2 * compiled)


def _following(
    left: Sequence[Candidate], done: Sequence[Candidate], usable: int | None, compiled: int
) -> Candidate:
    """Which mesh to compile next: the cheapest that may fit, or else that needs least memory."""
    tried = _tried(done)
    shares = [
        one.peak_memory / one.estimated_memory
        for one in tried
        if one.peak_memory and one.estimated_memory
    ]
    share = min(shares, default=LEAST_SHARE)
    may = [one for one in left if usable is None or share * _memory_of(one) <= usable]
    if may and len(tried) < compiled:
        return min(may, key=_price_of)
    return min(left, key=_need_of)


def _price_of(one: Candidate) -> tuple[int | float, bool]:
    return one.priced_seconds or 0, not one.usual


def _need_of(one: Candidate) -> tuple[int | float, bool]:
    return _memory_of(one), not one.usual


def _memory_of(one: Candidate) -> int | float:
    return one.estimated_memory or 0


def _rank(one: Candidate) -> tuple[int, int | float]:
    """Those that fit by their time, then those that do not by their memory."""
    return (0, one.seconds or 0) if one.fits else (1, one.peak_memory or 0)
