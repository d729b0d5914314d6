"""Finds what a program computes again to fit into memory, with the least arithmetic."""

from dataclasses import dataclass

from ..tree._leaf_plans import Recompute
from ._decide import Decider, footprint, seconds_of

# A block needs at most a part of the memory; more parts are more and smaller blocks.
_PARTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48)


@dataclass(frozen=True)
class RecomputeCandidate:
    """What is computed again, the estimated bytes at the peak and the seconds that it costs.

    `in_turn` is whether iterations of a loop keep different values.
    """

    recompute: Recompute
    bytes: float
    seconds: float
    flops: float
    in_turn: bool


def bytes_kept(decider: Decider) -> float:
    """The estimated bytes of a program that computes nothing again."""
    most, _ = footprint(decider.flat, decider.keep_all())
    return most


def least_within(decider: Decider, limit: int | float) -> RecomputeCandidate:
    """The choice of least time whose estimated memory is within a limit.

    If none is, the one that takes the least memory.
    """
    share = limit / max(1.0, decider.total)
    candidates: list[RecomputeCandidate] = []
    counts: set[int] = set()
    for parts in _PARTS:
        # Further parts that make as many blocks make the same ones.
        count = len(decider.blocks(parts))
        if count in counts:
            continue
        counts.add(count)
        recompute = Recompute(parts, share)
        decided = decider.decide(recompute)
        most, _ = footprint(decider.flat, decided)
        flops, in_turn = 0.0, False
        for _, choice in decided:
            flops += choice.flops
            in_turn |= len(choice.inner) > 1
        seconds = seconds_of(decided)
        candidates.append(RecomputeCandidate(recompute, most, seconds, flops, in_turn))
    within = [candidate for candidate in candidates if candidate.bytes <= limit]
    if within:
        return min(within, key=lambda candidate: (candidate.seconds, candidate.bytes))
    return min(candidates, key=lambda candidate: candidate.bytes)
