"""Plans what the backward pass of a function computes again, so that it fits into memory."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from jax.sharding import AbstractMesh, Mesh
from jaxtyping import PyTree

from ..core._trainable import trainable_arrays
from ..distributed._mesh import PIPE
from ._from_program import PlannedProgram
from .constrain._recompute import Recomputed
from .memory._recompute_solver import RecomputeCandidate, RecomputeSolver
from .program._shared_programs import of_another_function
from .program._trace import Traced
from .report._data import Recomputation
from .report._text import scaled
from .tree._leaf_plans import Compute

# Plans that are tried, and the part of the memory that is enough.
_TRIES, _USED = 4, 0.97


@dataclass(frozen=True)
class MemoryTask:
    """What is planned: `plan` plans the shardings for a function like `fn`.

    The second argument of `plan` is whether activations between tensor-parallel parts are sharded
    along the sequence, as `sequence` says. With `offloads`, there is an optimizer's state, and
    devices with memory other than the host's.
    """

    fn: Callable[..., PyTree]
    model: PyTree
    args: Sequence[PyTree]
    mesh: Mesh | AbstractMesh
    trainable: PyTree
    plan: Callable[[Callable[..., PyTree], bool], PlannedProgram]
    sequence: bool = False
    offloads: bool = False


def plan_within(task: MemoryTask, memory: int | float, *, must_fit: bool) -> PlannedProgram:
    """The plan with which a step takes at most `memory` bytes of each device.

    It shards activations along the sequence where that takes less memory, and recomputes the least
    in the backward pass. If that does not suffice, the optimizer's state is kept in the memory of
    the host. If nothing suffices, it raises `ValueError` if it `must_fit`, and otherwise recomputes
    what saves the most memory.
    """
    planned = task.plan(task.fn, task.sequence)
    compute, report = planned.compute, planned.report
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
    if task.mesh.shape.get("model", 1) > 1 and not task.sequence:
        # Sequence parallelism needs less memory for no arithmetic.
        along_sequence = task.plan(task.fn, True)
        if along_sequence.report.memory.total < report.memory.total:
            planned, task = along_sequence, replace(task, sequence=True)
            compute, report = planned.compute, planned.report
            if report.memory.total <= memory:
                return planned
    # The cheapest plan of the program that recomputes may have other shardings, with which it keeps
    # more. Then what is recomputed is chosen again, for these.
    result = planned
    for _ in range(_TRIES):
        # All but the activations, with the optimizer's state on the device.
        estimate = result.report.memory
        fixed = estimate.total - estimate.activations
        if result.report.offloaded:
            fixed += result.report.offloaded - estimate.optimizer_state
        result = _recompute_within(task, planned, compute, memory, fixed, must_fit=must_fit)
        if _divides_alike(result.compute, compute):
            break
        compute = replace(result.compute, recompute=None, offloaded=False)
    return result


def _divides_alike(a: Compute, b: Compute) -> bool:
    """Whether two programs are sharded alike."""
    return (a.dims, a.batch_axes, a.split) == (b.dims, b.batch_axes, b.split)


def _recompute_within(
    task: MemoryTask,
    planned: PlannedProgram,
    compute: Compute,
    memory: int | float,
    fixed: int,
    *,
    must_fit: bool,
) -> PlannedProgram:
    """The plan of a function that recomputes what is chosen for the shardings of `compute`.

    `planned` is the plan of a function that recomputes nothing. Of the `memory`, `fixed` bytes are
    not activations.
    """
    report, room = planned.report, memory - fixed
    # Frozen arrays have no gradient, so that their products keep less.
    trained = tuple(trainable_arrays(task.model, task.trainable))

    def read(compute: Compute) -> tuple[Traced, RecomputeSolver]:
        function = Recomputed(task.fn, task.mesh, compute)
        traced, _, solver = function.read(task.model, task.args, trained)
        return traced, solver

    traced, solver = read(compute)
    first = solver
    if compute is not planned.compute:
        _, first = read(planned.compute)
    if not traced.trains:
        if must_fit:
            raise ValueError(
                f"`memory={memory:,.0f}` limits what a backward pass keeps, but `fn` has none: its "
                "first result is not a floating point scalar. Pass a loss, or leave out `memory`."
            )
        return planned
    activations = report.memory.activations
    now = first.bytes_kept
    # The planner's peak of the program as it is, by the sum of what is kept.
    scale = max(1.0, activations / max(1.0, now))
    search = _Search(solver, scale, task, planned._replace(compute=compute), trained)
    best = search.within(room)
    # The optimizer's state is only needed when the activations are not.
    is_offloaded = task.offloads and best.activations > room >= 0
    if is_offloaded:
        room += report.memory.optimizer_state
        best = search.within(room)
    if best.activations > room and must_fit:
        needed = round(memory - room) + best.activations
        raise ValueError(
            f"`memory={memory:,.0f}` is too small: with all that can be recomputed in the backward "
            f"pass, the step takes about {scaled(needed)} of each device, of which {scaled(fixed)} "
            "are arrays, gradients, optimizer state and the batch. Use more devices on `fsdp` or "
            "`model`, or a smaller batch."
        )
    if best.activations >= activations and not is_offloaded:
        return planned
    if best.activations < activations:
        planned = best.planned
    if is_offloaded:
        return _offloaded(planned)
    return planned


@dataclass(frozen=True)
class _Attempt:
    """A plan, and what is computed again in it."""

    candidate: RecomputeCandidate
    planned: PlannedProgram

    @property
    def activations(self) -> int:
        """The planner's estimate for the program as it is rebuilt."""
        return self.planned.report.memory.activations


@dataclass(eq=False)
class _Search:
    """The plans of a function that recomputes. `before` is that of the function as it is."""

    solver: RecomputeSolver
    scale: float  # what the planner estimates, relative to the bytes that are kept
    task: MemoryTask
    before: PlannedProgram
    trained: tuple[bool, ...]
    # By the estimates of what is recomputed.
    attempts: dict[tuple[float, float], _Attempt] = field(default_factory=dict)

    def within(self, room: int | float) -> _Attempt:
        """The plan of least time whose activations fit, or the one that needs the least."""
        best: _Attempt | None = None
        # Steps by what was missing or left over, by the planner's own estimate, which follows the
        # changed program, and otherwise bisection between what was enough and what was too much.
        enough, too_much = 0.0, float("inf")
        limit = room / self.scale
        for _ in range(_TRIES):
            attempt = self._attempt(limit)
            used = attempt.activations
            if used <= room:
                if best is None or attempt.candidate.seconds <= best.candidate.seconds:
                    best = attempt
                if used > _USED * room or not attempt.candidate.seconds:
                    break
                enough = limit
            else:
                too_much = min(limit, attempt.candidate.bytes)
            # What is not kept, such as a layer's weights, needs about as much in the next plan.
            limit = attempt.candidate.bytes + room - used
            if not enough < limit < too_much:
                limit = (enough + min(too_much, max(room, enough))) / 2
        if best is not None:
            return best
        self._attempt(0)
        return min(self.attempts.values(), key=lambda attempt: attempt.activations)

    def _attempt(self, limit: int | float) -> _Attempt:
        """The plan of a function that recomputes values, with its estimates."""
        candidate = self.solver.least_within(limit)
        key = candidate.bytes, candidate.seconds
        if key in self.attempts:
            return self.attempts[key]
        recompute = replace(candidate.recompute, trained=self.trained)
        task, before = self.task, self.before.report
        again = Recomputed(task.fn, task.mesh, replace(self.before.compute, recompute=recompute))
        with of_another_function():
            arrays, compute, after = task.plan(again, task.sequence)
        figures = Recomputation(
            saved=before.memory.activations - after.memory.activations,
            flops=candidate.flops,
            share=candidate.flops / max(1.0, before.arithmetic.per_device),
            what=again.describe(task.model, task.args),
        )
        report = replace(
            after,
            recomputed=figures,
            coupled=before.coupled,
            summed=before.summed,
            shared_masks=before.shared_masks,
            promotions=before.promotions,
        )
        planned = PlannedProgram(arrays, replace(compute, recompute=recompute), report)
        self.attempts[key] = _Attempt(candidate, planned)
        return self.attempts[key]


def _offloaded(planned: PlannedProgram) -> PlannedProgram:
    """The plan with the optimizer's state in the memory of the host.

    It is on the device while it is updated, when the activations are no longer needed.
    """
    report = planned.report
    state = report.memory.optimizer_state
    beside = max(0, state - report.memory.activations)
    memory = replace(report.memory, optimizer_state=beside)
    report = replace(report, memory=memory, offloaded=state)
    compute = replace(planned.compute, offloaded=True)
    return PlannedProgram(planned.arrays, compute, report)
