"""Finds what a program computes again to fit into memory, with the least arithmetic."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

from ..tree._leaf_plans import Recompute
from ._decide import Decider, footprint

_PARTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48)
_HALVINGS = 5  # of an interval of prices, on a logarithmic scale
_CHEAP, _DEAR = 1e-3, 1e3  # the first and the last price, by the mean one


@dataclass(frozen=True)
class RecomputeCandidate:
    """What is computed again, the estimated bytes at the peak and the seconds that it costs."""

    recompute: Recompute
    bytes: float
    seconds: float
    flops: float


def weigh(decider: Decider, recompute: Recompute) -> RecomputeCandidate:
    """What a choice costs, and the memory that it is estimated to take."""
    decided = decider.decide(recompute)
    most, _ = footprint(decider.flat, decided)
    seconds = sum((choice.seconds for _, choice in decided), 0.0)
    flops = sum((choice.flops for _, choice in decided), 0.0)
    return RecomputeCandidate(recompute, most, seconds, flops)


def least_within(decider: Decider, limit: float) -> RecomputeCandidate:
    """The choice of least time whose estimated memory is within a limit.

    If none is, the one that takes the least memory.
    """
    best: RecomputeCandidate | None = None
    least: RecomputeCandidate | None = None
    for parts in _divisions(decider):
        at_prices = list(_at_prices(decider, parts))
        for candidate in at_prices:
            if least is None or candidate.bytes < least.bytes:
                least = candidate
        for lower, higher in pairwise(at_prices):
            if higher.bytes > limit:
                continue
            candidate = higher
            if lower.bytes > limit:
                candidate = _mixed(decider, lower, higher, limit)
            if best is None or (candidate.seconds, candidate.bytes) < (best.seconds, best.bytes):
                best = candidate
            break
    assert least is not None
    return best or least


def _divisions(decider: Decider) -> Iterator[int]:
    """The numbers of parts that make different numbers of blocks."""
    counts: set[int] = set()
    for parts in _PARTS:
        count = len(decider.blocks(parts))
        if count not in counts:
            counts.add(count)
            yield parts


def _at_prices(decider: Decider, parts: int) -> Iterator[RecomputeCandidate]:
    """What is computed again at the prices at which that changes, for one division into blocks."""
    nothing = weigh(decider, Recompute(parts, 0.0, 0.0, 0))
    everything = weigh(decider, Recompute(parts, 1.0, 1.0, 0))
    yield nothing
    # The price at which a byte costs what computing everything again does.
    mean = everything.seconds / max(1.0, nothing.bytes)
    if mean > 0:
        cheap = weigh(decider, Recompute(parts, _CHEAP * mean, _CHEAP * mean, 0))
        dear = weigh(decider, Recompute(parts, _DEAR * mean, _DEAR * mean, 0))
        yield cheap
        yield from _between(decider, cheap, dear, _HALVINGS)
        yield dear


def _between(
    decider: Decider, low: RecomputeCandidate, high: RecomputeCandidate, halvings: int
) -> Iterator[RecomputeCandidate]:
    """The candidates at prices between two, at which something else is computed again."""
    if not halvings or (low.bytes, low.seconds) == (high.bytes, high.seconds):
        return
    price = (low.recompute.price * high.recompute.price) ** 0.5
    middle = weigh(decider, replace(low.recompute, price=price, higher=price))
    yield from _between(decider, low, middle, halvings - 1)
    yield middle
    yield from _between(decider, middle, high, halvings - 1)


def _mixed(
    decider: Decider, lower: RecomputeCandidate, higher: RecomputeCandidate, limit: float
) -> RecomputeCandidate:
    """The fewest blocks at the higher price with which the memory is within the limit."""
    best, few, many = higher, 0, len(decider.blocks(lower.recompute.parts))
    while few <= many:
        blocks = (few + many) // 2
        recompute = replace(lower.recompute, higher=higher.recompute.price, blocks=blocks)
        candidate = weigh(decider, recompute)
        if candidate.bytes <= limit:
            best, many = candidate, blocks - 1
        else:
            few = blocks + 1
    return best
