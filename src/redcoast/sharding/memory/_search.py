"""Finds what a program computes again to fit into memory, with the least arithmetic."""

from collections.abc import Iterator
from dataclasses import dataclass

from ..tree._leaf_plans import Recompute
from ._decide import Decided, Decider, footprint

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
    for parts in _divisions(decider):
        recompute = Recompute(parts, share)
        candidates.append(_weigh(decider, recompute, decider.decide(recompute)))
    within = [candidate for candidate in candidates if candidate.bytes <= limit]
    if within:
        return min(within, key=lambda option: (option.seconds, option.bytes))
    return min(candidates, key=lambda option: option.bytes)


def _weigh(decider: Decider, recompute: Recompute, decided: Decided) -> RecomputeCandidate:
    """What a decision costs, and the memory that it is estimated to take."""
    most, _ = footprint(decider.flat, decided)
    seconds = sum((choice.seconds for _, choice in decided), 0.0)
    flops = sum((choice.flops for _, choice in decided), 0.0)
    in_turn = any(len(choice.inner) > 1 for _, choice in decided)
    return RecomputeCandidate(recompute, most, seconds, flops, in_turn)


def _divisions(decider: Decider) -> Iterator[int]:
    """The numbers of parts that make different numbers of blocks."""
    counts: set[int] = set()
    for parts in _PARTS:
        count = len(decider.blocks(parts))
        if count not in counts:
            counts.add(count)
            yield parts
