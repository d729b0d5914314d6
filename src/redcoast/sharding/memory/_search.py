"""Finds what a program computes again to fit into memory, with the least arithmetic."""

from dataclasses import dataclass

from ..tree._leaf_plans import Recompute
from ._recompute_solver import RecomputeSolver, footprint, total_of

# A block needs at most a part of the memory; more parts are more and smaller blocks.
_PARTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48)


@dataclass(frozen=True)
class RecomputeCandidate:
    """What is computed again, the bytes that are kept by its estimate and the seconds it costs."""

    recompute: Recompute
    bytes: float
    seconds: float
    flops: float


def bytes_kept(solver: RecomputeSolver) -> float:
    """The estimated bytes of a program that computes nothing again."""
    most, _ = footprint(solver.flat, solver.keep_all())
    return most


def least_within(solver: RecomputeSolver, limit: int | float) -> RecomputeCandidate:
    """The choice of least time whose estimated memory is within a limit.

    If none is, the one that takes the least memory.
    """
    share = limit / max(1.0, solver.total)
    candidates: list[RecomputeCandidate] = []
    counts: set[int] = set()
    for parts in _PARTS:
        # Further parts that make as many blocks make the same ones.
        count = len(solver.blocks(parts))
        if count in counts:
            continue
        counts.add(count)
        recompute = Recompute(parts, share)
        chosen = solver.solve(recompute)
        most, _ = footprint(solver.flat, chosen)
        total = total_of(chosen)
        candidates.append(RecomputeCandidate(recompute, most, total.seconds, total.flops))
    within = [candidate for candidate in candidates if candidate.bytes <= limit]
    if within:
        return min(within, key=lambda candidate: (candidate.seconds, candidate.bytes))
    return min(candidates, key=lambda candidate: candidate.bytes)
