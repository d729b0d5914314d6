"""What each block of a program keeps, so that all of them together fit into memory."""

import functools as ft
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations

import numpy as np

from ..tree._leaf_plans import Recompute
from ._block_policies import (
    BlockPolicies,
    BlockPolicy,
    combined,
    pareto_front,
    policies_of_block,
)
from ._flat import Flat, FlatLoop
from ._partition import StepBlock, bytes_for_derivatives, partition

_LEVELS = 1024  # of memory that a decision tells apart
_LIMITS = 6  # that are tried: a decision counts some values twice that two blocks read
_PERIODS = (2, 3, 4)  # iterations of a loop that may keep different values
_MOST_OF_BODY, _MOST_OF_LOOP = 16, 96  # policies
# A block needs at most a part of the memory; more parts are more and smaller blocks.
_PARTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48)

# The blocks of a program, and what each can keep.
_PoliciesOfBlocks = Sequence[tuple[StepBlock, list[BlockPolicy]]]


@dataclass(frozen=True)
class RecomputeCandidate:
    """What is computed again, the bytes that are kept by its estimate and the seconds it costs."""

    recompute: Recompute
    bytes: float
    seconds: float
    flops: float


@dataclass(eq=False)
class RecomputeSolver:
    """Chooses what each block of a program keeps. What was computed once is reused."""

    flat: Flat
    # By the number of parts.
    divided: dict[int, list[StepBlock]] = field(default_factory=dict)
    policies: dict[int, _PoliciesOfBlocks] = field(default_factory=dict)
    # By what layers that repeat have in common, the values of the first one and its policies.
    known: dict[object, tuple[list[int], list[BlockPolicy]]] = field(default_factory=dict)

    @ft.cached_property
    def total(self) -> float:
        """The bytes of all values that derivatives need, loops included."""
        return bytes_for_derivatives(self.flat)

    @property
    def bytes_kept(self) -> float:
        """The estimated bytes of a program that computes nothing again."""
        most, _ = footprint(self.flat, self.keep_all())
        return most

    def least_within(self, limit: int | float) -> RecomputeCandidate:
        """The choice of least time whose estimated memory is within a limit.

        If none is, the one that takes the least memory.
        """
        share = limit / max(1.0, self.total)
        candidates: list[RecomputeCandidate] = []
        counts: set[int] = set()
        for parts in _PARTS:
            # Further parts that make as many blocks make the same ones.
            count = len(self.blocks(parts))
            if count in counts:
                continue
            counts.add(count)
            recompute = Recompute(parts, share)
            chosen = self.solve(recompute)
            most, _ = footprint(self.flat, chosen)
            total = total_of(chosen)
            candidates.append(RecomputeCandidate(recompute, most, total.seconds, total.flops))
        within = [candidate for candidate in candidates if candidate.bytes <= limit]
        if within:
            return min(within, key=lambda candidate: (candidate.seconds, candidate.bytes))
        return min(candidates, key=lambda candidate: candidate.bytes)

    def blocks(self, parts: int) -> list[StepBlock]:
        """The blocks, each of which needs at most a part of all memory."""
        if parts not in self.divided:
            self.divided[parts] = partition(self.flat, self.total / parts)
        return self.divided[parts]

    def keep_all(self) -> BlockPolicies:
        """What the compiler keeps by itself."""
        return [(block, policies[0]) for block, policies in self._policies(1)]

    def solve(self, recompute: Recompute) -> BlockPolicies:
        """The blocks of the program, and what each keeps: with the least time within the limit.

        If nothing is within the limit, it is what takes the least memory.
        """
        options = self._policies(recompute.parts)
        limit = recompute.share * self.total
        best: BlockPolicies = []
        # Bisection: what is within the limit may need more or less than its blocks by themselves.
        low, high, room = 0.5 * limit, 2 * limit, limit
        for _ in range(_LIMITS):
            chosen = _least_time(self.flat, options, room)
            if chosen and footprint(self.flat, chosen)[0] > limit:
                high = room
            else:
                low = room
                if chosen and (not best or total_of(chosen).seconds <= total_of(best).seconds):
                    best = chosen
                if chosen and not total_of(chosen).seconds:
                    break
            room = (low + high) / 2
        if best:
            return best

        def size(policy: BlockPolicy) -> tuple[int | float, int | float]:
            return policy.kept_bytes, policy.most_bytes

        return [(block, min(policies, key=size)) for block, policies in options]

    def _policies(self, parts: int) -> _PoliciesOfBlocks:
        """What each block can keep."""
        if parts in self.policies:
            return self.policies[parts]
        options: list[tuple[StepBlock, list[BlockPolicy]]] = []
        for block in self.blocks(parts):
            options.append((block, self._of_block(self.flat, block, parts)))
        # The derivatives of the last block that has any run right after it. What it keeps is needed
        # at once, so that it saves no memory to compute it again, but in a loop.
        for place, (block, policies) in reversed(list(enumerate(options))):
            if block.needs:
                if block.loop is None:
                    options[place] = block, policies[:1]
                break
        self.policies[parts] = options
        return options

    def _of_block(self, flat: Flat, block: StepBlock, parts: int) -> list[BlockPolicy]:
        if block.loop is not None:
            return self._of_loop(block.loop, parts)
        numbers = list(dict.fromkeys((*block.written, *sorted(block.residuals))))
        # Layers that repeat have the same policies.
        outline = _outline(flat, block)
        if outline not in self.known:
            self.known[outline] = numbers, policies_of_block(flat, block)
        known, policies = self.known[outline]
        own = dict(zip(known, numbers, strict=True))
        renumbered: list[BlockPolicy] = []
        for policy in policies:
            kept = frozenset(map(own.__getitem__, policy.kept))
            renumbered.append(replace(policy, kept=kept))
        return renumbered

    def _of_loop(self, loop: FlatLoop, parts: int) -> list[BlockPolicy]:
        """What a loop can keep: all of its iterations the same, or some in turn."""
        length = loop.scan.length
        keep_all: list[tuple[StepBlock, BlockPolicy]] = []
        # What the blocks of an iteration up to one can keep.
        merged = [BlockPolicy(recomputes=False, inner=((),))]
        for block in partition(loop.body, self.total / parts):
            policies = self._of_block(loop.body, block, parts)
            keep_all.append((block, policies[0]))
            merged = _merged(merged, block, policies)
        together = [_of_iteration(loop, policy.inner[0]) for policy in merged]
        everything = _of_iteration(loop, tuple(keep_all))
        iterations = [everything, *pareto_front(together, _MOST_OF_BODY)]
        of_loop = [_in_turn([policy], length) for policy in iterations]
        for period in _PERIODS:
            if length % period:
                continue
            for fewer, more in combinations(iterations, 2):
                for count in range(1, period):
                    if math.gcd(count, period) == 1:
                        turns = [more] * count + [fewer] * (period - count)
                        of_loop.append(_in_turn(turns, length))
        return [of_loop[0], *pareto_front(of_loop[1:], _MOST_OF_LOOP)]


def footprint(flat: Flat, chosen: BlockPolicies) -> tuple[int | float, int | float]:
    """The most bytes that are kept and needed at once, and the bytes that are kept in all."""
    known = {*flat.inputs, *flat.constants}
    most = total = 0.0
    for block, policy in chosen:
        if block.loop is not None:
            total += policy.kept_bytes
        else:
            # What comes into a block that is computed again is kept too.
            inputs = set(block.inputs)
            if not policy.recomputes:
                inputs &= block.residuals or block.needs
            new = (policy.kept | inputs) - known
            total += flat.bytes_of(new)
            known |= new
        most = max(most, total + policy.backward_bytes)
    return most, total


def total_of(chosen: BlockPolicies) -> BlockPolicy:
    """What all blocks keep and compute again."""
    return combined(policy for _, policy in chosen)


def _least_time(flat: Flat, options: _PoliciesOfBlocks, limit: float) -> BlockPolicies:
    """A policy of each block, with the least time within a limit of memory; none if none is.

    For each level of memory, it is known in which time the blocks so far keep at most that.
    """
    unit = limit / _LEVELS
    if unit <= 0:
        return []
    known = {*flat.inputs, *flat.constants}
    seconds = np.full(_LEVELS + 1, np.inf)  # (levels,)
    seconds[0] = 0.0
    # For each block, the policy that leads to a level, and the levels that each policy takes.
    picks: list[np.ndarray] = []
    moves: list[list[int]] = []
    for block, policies in options:
        # What this block reads, and no block before it, is kept whatever it chooses.
        incoming = 0.0
        if block.needs:
            incoming = flat.bytes_of(set(block.inputs) - known)
            known.update(block.inputs)
        after = np.full(_LEVELS + 1, np.inf)
        pick = np.zeros(_LEVELS + 1, int)
        moves.append([])
        for place, policy in enumerate(policies):
            move = round((incoming + policy.kept_bytes) / unit)
            moves[-1].append(move)
            most = _LEVELS - math.ceil(policy.backward_bytes / unit)
            if move > most:
                continue
            candidate = np.full(_LEVELS + 1, np.inf)
            candidate[move : most + 1] = seconds[: most + 1 - move] + policy.seconds
            is_better = candidate < after
            after[is_better] = candidate[is_better]
            pick[is_better] = place
        seconds = after
        picks.append(pick)
    level = int(np.argmin(seconds))
    if not np.isfinite(seconds[level]):
        return []
    # From the last block back to the first.
    chosen: list[tuple[StepBlock, BlockPolicy]] = []
    for (block, policies), pick, taken in reversed(list(zip(options, picks, moves, strict=True))):
        place = int(pick[level])
        chosen.append((block, policies[place]))
        level -= taken[place]
    return chosen[::-1]


def _merged(
    before: Sequence[BlockPolicy], block: StepBlock, policies: Sequence[BlockPolicy]
) -> list[BlockPolicy]:
    """What the blocks of an iteration up to one can keep, from what those before it can."""
    merged: list[BlockPolicy] = []
    for earlier in before:
        for policy in policies:
            inner = (*earlier.inner[0], (block, policy))
            both = replace(combined((earlier, policy)), inner=(inner,))
            merged.append(both)
    return pareto_front(merged, 2 * _MOST_OF_BODY)


def _of_iteration(loop: FlatLoop, chosen: BlockPolicies) -> BlockPolicy:
    """The policy of an iteration, with what it keeps counted once."""
    body = loop.body
    most, kept = footprint(body, chosen)
    # What one iteration gets from the one before is always kept.
    _, carry, _ = loop.scan.split(body.inputs)
    read: set[int] = set()
    for step in body.steps:
        if step.needs:
            read.update(step.reads)
    kept_bytes = kept + body.bytes_of(read.intersection(carry))
    return replace(
        total_of(chosen), inner=(chosen,), kept_bytes=kept_bytes, backward_bytes=most - kept
    )


def _in_turn(turns: Sequence[BlockPolicy], length: int) -> BlockPolicy:
    """What a loop keeps whose iterations choose in turn."""
    total, times = combined(turns), length / len(turns)
    inner: list[BlockPolicies] = []
    if total.recomputes:
        inner = [policy.inner[0] for policy in turns]
    return BlockPolicy(
        total.recomputes,
        inner=tuple(inner),
        kept_bytes=times * total.kept_bytes,
        # What an iteration keeps is copied to where all of them keep it, and back.
        backward_bytes=total.backward_bytes + total.kept_bytes,
        seconds=times * total.seconds,
        flops=times * total.flops,
    )


def _outline(flat: Flat, block: StepBlock) -> object:
    """What the policies of a block depend on, the same for layers that repeat."""
    places = {number: place for place, number in enumerate(block.written)}

    def place_of(number: int) -> int:
        return places.get(number, -1)  # values from before are all alike

    steps: list[object] = []
    for step in block.steps:
        reads = tuple(map(place_of, step.reads))
        needs = sorted(map(place_of, (*step.needs, *step.residuals)))
        sizes = tuple(map(flat.sizes.__getitem__, step.outputs))
        costs = step.seconds, step.is_free, step.hides
        steps.append((reads, tuple(needs), sizes, costs))
    kept = tuple(map(place_of, block.outputs))
    return block.is_indivisible, tuple(steps), kept
