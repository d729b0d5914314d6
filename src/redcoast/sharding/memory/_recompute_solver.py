"""What each block of a program keeps, so that all of them together fit into memory."""

import functools as ft
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations

import numpy as np

from ..tree._leaf_plans import Recompute
from ._blocks import StepBlock, bytes_for_derivatives, divide
from ._choices import BlockChoice, BlockChoices, choices_of_block, without_worse
from ._flat import Flat, FlatLoop

_LEVELS = 1024  # of memory that a decision tells apart
_LIMITS = 6  # that are tried: a decision counts some values twice that two blocks read
_PERIODS = (2, 3, 4)  # iterations of a loop that may keep different values
_MOST_OF_BODY, _MOST_OF_LOOP = 16, 96  # choices

# The blocks of a program, and what each can keep.
_Options = Sequence[tuple[StepBlock, list[BlockChoice]]]


@dataclass(eq=False)
class RecomputeSolver:
    """Chooses what each block of a program keeps. What was computed once is reused."""

    flat: Flat
    # By the number of parts.
    divided: dict[int, list[StepBlock]] = field(default_factory=dict)
    options: dict[int, _Options] = field(default_factory=dict)
    # By what layers that repeat have in common, the values of the first one and its choices.
    known: dict[object, tuple[list[int], list[BlockChoice]]] = field(default_factory=dict)

    @ft.cached_property
    def total(self) -> float:
        """The bytes of all values that derivatives need, loops included."""
        return bytes_for_derivatives(self.flat)

    def blocks(self, parts: int) -> list[StepBlock]:
        """The blocks, each of which needs at most a part of all memory."""
        if parts not in self.divided:
            self.divided[parts] = divide(self.flat, self.total / parts)
        return self.divided[parts]

    def keep_all(self) -> BlockChoices:
        """What the compiler keeps by itself."""
        return [(block, choices[0]) for block, choices in self._options(1)]

    def solve(self, recompute: Recompute) -> BlockChoices:
        """The blocks of the program, and what each keeps: with the least time within the limit.

        If nothing is within the limit, it is what takes the least memory.
        """
        options = self._options(recompute.parts)
        limit = recompute.share * self.total
        best: BlockChoices = []
        # Bisection: what is within the limit may need more or less than its blocks by themselves.
        low, high, room = 0.5 * limit, 2 * limit, limit
        for _ in range(_LIMITS):
            chosen = _least_time(self.flat, options, room)
            if chosen and footprint(self.flat, chosen)[0] > limit:
                high = room
            else:
                low = room
                if chosen and (not best or seconds_of(chosen) <= seconds_of(best)):
                    best = chosen
                if chosen and not seconds_of(chosen):
                    break
            room = (low + high) / 2
        if best:
            return best
        smallest = lambda choice: (choice.kept_bytes, choice.most_bytes)
        return [(block, min(choices, key=smallest)) for block, choices in options]

    def _options(self, parts: int) -> _Options:
        """What each block can keep."""
        if parts in self.options:
            return self.options[parts]
        options: list[tuple[StepBlock, list[BlockChoice]]] = []
        for block in self.blocks(parts):
            options.append((block, self._of_block(self.flat, block, parts)))
        # The derivatives of the last block that has any run right after it. What it keeps is needed
        # at once, so that it saves no memory to compute it again, but in a loop.
        for place, (block, choices) in reversed(list(enumerate(options))):
            if block.needs:
                if block.loop is None:
                    options[place] = block, choices[:1]
                break
        self.options[parts] = options
        return options

    def _of_block(self, flat: Flat, block: StepBlock, parts: int) -> list[BlockChoice]:
        if block.loop is not None:
            return self._of_loop(block.loop, parts)
        numbers = list(dict.fromkeys((*block.written, *sorted(block.residuals))))
        # Layers that repeat have the same choices.
        outline = _outline(flat, block)
        if outline not in self.known:
            self.known[outline] = numbers, choices_of_block(flat, block)
        known, choices = self.known[outline]
        own = dict(zip(known, numbers, strict=True))
        renumbered: list[BlockChoice] = []
        for choice in choices:
            kept = frozenset(map(own.__getitem__, choice.kept))
            renumbered.append(replace(choice, kept=kept))
        return renumbered

    def _of_loop(self, loop: FlatLoop, parts: int) -> list[BlockChoice]:
        """What a loop can keep: all of its iterations the same, or some in turn."""
        length = loop.scan.length
        keep_all: list[tuple[StepBlock, BlockChoice]] = []
        # What the blocks of an iteration up to one can keep.
        merged = [BlockChoice(recomputes=False, inner=((),))]
        for block in divide(loop.body, self.total / parts):
            choices = self._of_block(loop.body, block, parts)
            keep_all.append((block, choices[0]))
            merged = _merged(merged, block, choices)
        together = [_of_iteration(loop, choice.inner[0]) for choice in merged]
        iterations = [
            _of_iteration(loop, tuple(keep_all)),
            *without_worse(together, _MOST_OF_BODY),
        ]
        of_loop = [_in_turn([choice], length) for choice in iterations]
        for period in _PERIODS:
            if length % period:
                continue
            for fewer, more in combinations(iterations, 2):
                for count in range(1, period):
                    if math.gcd(count, period) == 1:
                        turns = [more] * count + [fewer] * (period - count)
                        of_loop.append(_in_turn(turns, length))
        return [of_loop[0], *without_worse(of_loop[1:], _MOST_OF_LOOP)]


def footprint(flat: Flat, chosen: BlockChoices) -> tuple[float, float]:
    """The most bytes that are kept and needed at once, and the bytes that are kept in all."""
    known = {*flat.inputs, *flat.constants}
    most = total = 0.0
    for block, choice in chosen:
        if block.loop is not None:
            total += choice.kept_bytes
        else:
            # What comes into a block that is computed again is kept too.
            inputs = set(block.inputs)
            if not choice.recomputes:
                inputs &= block.residuals or block.needs
            new = (choice.kept | inputs) - known
            total += flat.bytes_of(new)
            known |= new
        most = max(most, total + choice.backward_bytes)
    return most, total


def seconds_of(chosen: BlockChoices) -> float:
    """The time of all that is computed again."""
    return sum((choice.seconds for _, choice in chosen), 0.0)


def _least_time(flat: Flat, options: _Options, limit: float) -> BlockChoices:
    """A choice of each block, with the least time within a limit of memory; none if none is.

    For each level of memory, it is known in which time the blocks so far keep at most that.
    """
    unit = limit / _LEVELS
    if unit <= 0:
        return []
    known = {*flat.inputs, *flat.constants}
    seconds = np.full(_LEVELS + 1, np.inf)  # (levels,)
    seconds[0] = 0.0
    # For each block, the choice that leads to a level, and the levels that each choice takes.
    picks: list[np.ndarray] = []
    moves: list[list[int]] = []
    for block, choices in options:
        # What this block reads, and no block before it, is kept whatever it chooses.
        incoming = 0.0
        if block.needs:
            incoming = flat.bytes_of(set(block.inputs) - known)
            known.update(block.inputs)
        after = np.full(_LEVELS + 1, np.inf)
        pick = np.zeros(_LEVELS + 1, int)
        moves.append([])
        for place, choice in enumerate(choices):
            move = round((incoming + choice.kept_bytes) / unit)
            moves[-1].append(move)
            most = _LEVELS - math.ceil(choice.backward_bytes / unit)
            if move > most:
                continue
            candidate = np.full(_LEVELS + 1, np.inf)
            candidate[move : most + 1] = seconds[: most + 1 - move] + choice.seconds
            is_better = candidate < after
            after[is_better] = candidate[is_better]
            pick[is_better] = place
        seconds = after
        picks.append(pick)
    level = int(np.argmin(seconds))
    if not np.isfinite(seconds[level]):
        return []
    # From the last block back to the first.
    chosen: list[tuple[StepBlock, BlockChoice]] = []
    for (block, choices), pick, taken in reversed(list(zip(options, picks, moves, strict=True))):
        place = int(pick[level])
        chosen.append((block, choices[place]))
        level -= taken[place]
    return chosen[::-1]


def _merged(
    before: Sequence[BlockChoice], block: StepBlock, choices: Sequence[BlockChoice]
) -> list[BlockChoice]:
    """What the blocks of an iteration up to one can keep, from what those before it can."""
    merged: list[BlockChoice] = []
    for earlier in before:
        for choice in choices:
            both = BlockChoice(
                earlier.recomputes or choice.recomputes,
                inner=((*earlier.inner[0], (block, choice)),),
                kept_bytes=earlier.kept_bytes + choice.kept_bytes,
                backward_bytes=max(earlier.backward_bytes, choice.backward_bytes),
                seconds=earlier.seconds + choice.seconds,
                flops=earlier.flops + choice.flops,
            )
            merged.append(both)
    return without_worse(merged, 2 * _MOST_OF_BODY)


def _of_iteration(loop: FlatLoop, chosen: BlockChoices) -> BlockChoice:
    """The choice of an iteration, with what it keeps counted once."""
    body = loop.body
    most, kept = footprint(body, chosen)
    # What one iteration gets from the one before is always kept.
    _, carry, _ = loop.scan.split(body.inputs)
    read: set[int] = set()
    for step in body.steps:
        if step.needs:
            read.update(step.reads)
    kept_bytes = kept + body.bytes_of(read.intersection(carry))
    recomputes, flops = False, 0.0
    for _, choice in chosen:
        recomputes |= choice.recomputes
        flops += choice.flops
    return BlockChoice(
        recomputes,
        inner=(chosen,),
        kept_bytes=kept_bytes,
        backward_bytes=most - kept,
        seconds=seconds_of(chosen),
        flops=flops,
    )


def _in_turn(turns: Sequence[BlockChoice], length: int) -> BlockChoice:
    """What a loop keeps whose iterations choose in turn."""
    recomputes = False
    kept_bytes = backward_bytes = seconds = flops = 0.0
    inner: list[BlockChoices] = []
    for choice in turns:
        recomputes |= choice.recomputes
        inner.append(choice.inner[0])
        kept_bytes += choice.kept_bytes
        backward_bytes = max(backward_bytes, choice.backward_bytes)
        seconds += choice.seconds
        flops += choice.flops
    if not recomputes:
        inner = []
    times = length / len(turns)
    return BlockChoice(
        recomputes,
        inner=tuple(inner),
        kept_bytes=times * kept_bytes,
        # What an iteration keeps is copied to where all of them keep it, and back.
        backward_bytes=backward_bytes + kept_bytes,
        seconds=times * seconds,
        flops=times * flops,
    )


def _outline(flat: Flat, block: StepBlock) -> object:
    """What the choices of a block depend on, the same for layers that repeat."""
    places = {number: place for place, number in enumerate(block.written)}
    # Values from before are all alike.
    place_of = lambda number: places.get(number, -1)
    steps: list[object] = []
    for step in block.steps:
        reads = tuple(map(place_of, step.reads))
        needs = sorted(map(place_of, (*step.needs, *step.residuals)))
        sizes = tuple(map(flat.sizes.__getitem__, step.outputs))
        costs = step.seconds, step.is_free, step.hides
        steps.append((reads, tuple(needs), sizes, costs))
    kept = tuple(map(place_of, block.outputs))
    return block.alone, tuple(steps), kept
