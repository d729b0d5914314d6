"""What a step costs on a mesh: by its plan, and by what its compiler makes of it."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from .._exchange import exchange
from .bounds import bandwidth
from .compiled import compile_job
from .place import Place, hardware_of_target, hardware_there, rate_of, speeds_of
from .step import Job, plan_job
from .suggestion import Candidate


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
