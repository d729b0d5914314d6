"""Plans what the backward pass of a function computes again, so that it fits into memory."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from jax.sharding import AbstractMesh, Mesh
from jaxtyping import PyTree

from ..core._trainable import trainable_arrays
from ..distributed._mesh import PIPE
from .constrain._recompute import Recomputed
from .memory._search import RecomputeCandidate, least_within, weigh
from .report._data import ProgramReport, Recomputation
from .report._text import scaled
from .solver._figures import Memory
from .tree._leaf_plans import Compute, LeafPlan, Recompute

Planned = tuple[list[LeafPlan], Compute, ProgramReport]


@dataclass(frozen=True)
class MemoryTask:
    """What is planned: `plan` plans the shardings for a function like `fn`."""

    fn: Callable[..., PyTree]
    model: PyTree
    args: Sequence[PyTree]
    mesh: Mesh | AbstractMesh
    trainable: PyTree
    plan: Callable[[Callable[..., PyTree]], Planned]


def plan_within(task: MemoryTask, memory: int | float, *, must_fit: bool) -> Planned:
    """The plan with which a step takes at most `memory` bytes of each device.

    It recomputes the least in the backward pass. If nothing suffices, it raises `ValueError` if it
    `must_fit`, and otherwise recomputes what saves the most memory.
    """
    planned = task.plan(task.fn)
    _, compute, report = planned
    if report.memory.total <= memory:
        return planned
    if task.mesh.shape.get(PIPE, 1) > 1:
        if must_fit:
            raise ValueError(
                f"The plan takes about {scaled(report.memory.total)} of each device, more than "
                f"`memory={memory:,.0f}`. On a mesh with `pipe`, `memory` changes nothing: the "
                "stages already recompute their layers. Use more microbatches or a larger `pipe`."
            )
        return planned
    trained = tuple(trainable_arrays(task.model, task.trainable))
    reader = Recomputed(task.fn, task.mesh, compute)
    traced, _, decider = reader.read(task.model, task.args, trained)
    if not traced.trains:
        if must_fit:
            raise ValueError(
                f"`memory={memory:,.0f}` is about what the backward pass of a loss keeps, and the "
                "first result of `fn` is not a floating point scalar. Leave out `memory`."
            )
        return planned
    activations = report.memory.activations
    now = weigh(decider, Recompute(1, 0.0, 0.0, 0)).bytes
    # The planner's peak of the program as it is, by the sum of what is kept.
    scale = max(1.0, activations / max(1.0, now))
    room = memory - (report.memory.total - activations)
    best = least_within(decider, room / scale)
    least = round(scale * best.bytes)
    if least > room and must_fit:
        needed = report.memory.total - activations + least
        raise ValueError(
            f"`memory={memory:,.0f}` is too small: with all that can be recomputed in the backward "
            f"pass, the step takes about {scaled(needed)} of each device, of which "
            f"{scaled(report.memory.total - activations)} are arrays, gradients, optimizer state "
            "and the batch. Use more devices on `fsdp` or `model`, or a smaller batch."
        )
    if least >= activations:
        return planned
    return _recomputing(task, planned, replace(best.recompute, trained=trained), best, least)


def _recomputing(
    task: MemoryTask,
    before: Planned,
    recompute: Recompute,
    best: RecomputeCandidate,
    activations: int,
) -> Planned:
    """The plan of a function that recomputes values, with its estimates."""
    _, compute, report = before
    again = Recomputed(task.fn, task.mesh, replace(compute, recompute=recompute))
    plans, compute, after = task.plan(again)
    # The planner follows each recomputed block by itself, which overlap where it is pessimistic.
    activations = min(activations, after.memory.activations)
    memory = _with_activations(after.memory, activations)
    figures = Recomputation(
        saved=report.memory.activations - activations,
        flops=best.flops,
        share=best.flops / max(1.0, report.arithmetic.per_device),
        what=again.describe(task.model, task.args),
    )
    report = replace(
        after,
        memory=memory,
        recomputed=figures,
        coupled=report.coupled,
        summed=report.summed,
        shared_masks=report.shared_masks,
        promotions=report.promotions,
    )
    return plans, replace(compute, recompute=recompute), report


def _with_activations(memory: Memory, activations: int) -> Memory:
    total = memory.total - memory.activations + activations
    return replace(memory, activations=activations, total=total)
