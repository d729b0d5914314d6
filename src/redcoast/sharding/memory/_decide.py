"""What each block of a program keeps, so that all of them together fit into memory."""

import functools as ft
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import combinations

import numpy as np

from ..tree._leaf_plans import Recompute
from ._blocks import StepBlock, bytes_for_derivatives, divide
from ._choices import (
    BlockChoice,
    Weighed,
    bytes_of,
    choices_of_block,
    without_worse,
)
from ._flat import Flat, FlatStep

Decided = Sequence[tuple[StepBlock, BlockChoice]]

_LEVELS = 1024  # of memory that a decision tells apart
_LIMITS = 6  # that are tried: a decision counts some values twice that two blocks read
_PERIODS = (2, 3, 4)  # iterations of a loop that may keep different values
_MOST_OF_BODY, _MOST_OF_LOOP = 16, 96  # choices


@dataclass(eq=False)
class Decider:
    """Decides the blocks of a program within a limit of memory. What is decided once is kept."""

    flat: Flat
    divided: dict[int, list[StepBlock]] = field(default_factory=dict)

    @ft.cached_property
    def total(self) -> float:
        """The bytes of all values that derivatives need, loops included."""
        return _total(self.flat)

    def blocks(self, parts: int) -> list[StepBlock]:
        """The blocks, each of which needs at most a part of all memory."""
        if parts not in self.divided:
            self.divided[parts] = divide(self.flat, self.total / parts)
        return self.divided[parts]

    def decide(self, recompute: Recompute) -> Decided:
        """The blocks of the program, and what each keeps: with the least time within the limit.

        If nothing is within the limit, it is what takes the least memory.
        """
        key = recompute.parts, recompute.share
        if key not in self._decisions:
            limit = recompute.share * self.total
            self._decisions[key] = self._within(recompute.parts, limit)
        return self._decisions[key]

    @ft.cached_property
    def _decisions(self) -> dict[tuple[int, float], Decided]:
        return {}

    def keep_all(self) -> Decided:
        """What the compiler keeps by itself."""
        return [
            (block, choices[0].choice)
            for block, choices in zip(self.blocks(1), self._choices(1), strict=True)
        ]

    def least(self, parts: int) -> Decided:
        """What takes the least memory."""
        least: list[tuple[StepBlock, BlockChoice]] = []
        for block, choices in zip(self.blocks(parts), self._choices(parts), strict=True):
            smallest = min(choices, key=lambda option: (option.kept_bytes, option.most_bytes))
            least.append((block, smallest.choice))
        return least

    def _within(self, parts: int, limit: float) -> Decided:
        blocks, choices = self.blocks(parts), self._choices(parts)
        before = _bytes_before(self.flat, blocks)
        best: Decided | None = None
        low, high = 0.5 * limit, 2 * limit
        room = limit
        for _ in range(_LIMITS):
            picked = _least_time(choices, before, room)
            decided: Decided | None = None
            if picked is not None:
                decided = list(zip(blocks, picked, strict=True))
            if decided is None:
                low = room
            elif footprint(self.flat, decided)[0] <= limit:
                low = room
                if best is None or _seconds(decided) <= _seconds(best):
                    best = decided
                if not _seconds(decided):
                    break
            else:
                high = room
            room = (low + high) / 2
        return best or self.least(parts)

    def _choices(self, parts: int) -> list[list[Weighed]]:
        """What each block can keep."""
        if parts not in self._by_parts:
            blocks = self.blocks(parts)
            last = self._last(blocks)
            choices: list[list[Weighed]] = []
            for place, block in enumerate(blocks):
                of_block = self._of_block(self.flat, block, parts)
                if place == last:
                    of_block = of_block[:1]
                choices.append(of_block)
            self._by_parts[parts] = choices
        return self._by_parts[parts]

    @ft.cached_property
    def _by_parts(self) -> dict[int, list[list[Weighed]]]:
        return {}

    def _last(self, blocks: list[StepBlock]) -> int | None:
        """The last block that has derivatives, which run right after it; None for a loop.

        What it keeps is needed at once, so that it saves no memory to compute it again.
        """
        for place, block in reversed(list(enumerate(blocks))):
            steps = self.flat.steps[block.start : block.stop]
            if any(step.needs for step in steps):
                return None if steps[0].body is not None else place
        return None

    def _of_block(self, flat: Flat, block: StepBlock, parts: int) -> list[Weighed]:
        step = flat.steps[block.start]
        if step.body is not None:
            return self._of_loop(step, step.body, parts)
        # Layers that repeat have the same choices.
        outline = _outline(flat, block)
        numbers = _relative(flat, block)
        if outline not in self._known:
            self._known[outline] = numbers, choices_of_block(flat, block)
        known, choices = self._known[outline]
        if known == numbers:
            return choices
        own = dict(zip(known, numbers, strict=True))
        return [_renumbered(option, own) for option in choices]

    @ft.cached_property
    def _known(self) -> dict[object, tuple[list[int], list[Weighed]]]:
        return {}

    def _of_loop(self, loop: FlatStep, body: Flat, parts: int) -> list[Weighed]:
        """What a loop can keep: all of its iterations the same, or some in turn."""
        assert loop.scan is not None
        length = loop.scan.length
        keep_all: list[tuple[StepBlock, BlockChoice]] = []
        merged = [Weighed(BlockChoice(is_again=False, inner=((),)), 0.0)]
        for block in divide(body, self.total / parts):
            choices = self._of_block(body, block, parts)
            keep_all.append((block, choices[0].choice))
            merged = _merged(merged, block, choices)
        iterations = [_of_iteration(body, loop, tuple(keep_all))]
        iterations += [_of_iteration(body, loop, option.choice.inner[0]) for option in merged]
        iterations = [iterations[0], *without_worse(iterations[1:], _MOST_OF_BODY)]
        mixed = [_in_turn([option], length) for option in iterations]
        for period in _PERIODS:
            if length % period:
                continue
            for fewer, more in combinations(iterations, 2):
                for count in range(1, period):
                    if math.gcd(count, period) == 1:
                        turns = [more] * count + [fewer] * (period - count)
                        mixed.append(_in_turn(turns, length))
        return [mixed[0], *without_worse(mixed[1:], _MOST_OF_LOOP)]


def footprint(flat: Flat, decided: Decided) -> tuple[float, float]:
    """The most bytes that are kept and needed at once, and the bytes that are kept in all."""
    outside = {*flat.inputs, *flat.constants}
    kept: set[int] = set()
    most = total = 0.0
    for block, choice in decided:
        new = set(choice.kept)
        if choice.is_again and not choice.inner:
            # What comes into a block that is computed again is kept too.
            new.update(block.inputs)
        elif not choice.is_again:
            new.update(_needed_inputs(flat, block))
        new -= outside
        total += choice.bytes + bytes_of(flat, new - kept)
        kept |= new
        most = max(most, total + choice.needs)
    return most, total


def _needed_inputs(flat: Flat, block: StepBlock) -> set[int]:
    needed: set[int] = set()
    for step in flat.steps[block.start : block.stop]:
        if step.body is None:
            needed |= step.needs
    return needed.intersection(block.inputs)


def _seconds(decided: Decided) -> float:
    return sum((choice.seconds for _, choice in decided), 0.0)


def _least_time(
    choices: Sequence[Sequence[Weighed]], before: Sequence[float], limit: float
) -> list[BlockChoice] | None:
    """A choice of each block, with the least time within a limit of memory; None if none is.

    `before` has the bytes of what comes into each block. For each level of memory, it is known
    in which time the blocks so far keep at most that.
    """
    unit = limit / _LEVELS
    if unit <= 0:
        return None
    seconds = np.full(_LEVELS + 1, np.inf)
    seconds[0] = 0.0
    picks: list[np.ndarray] = []
    steps: list[list[int]] = []
    for of_block, incoming in zip(choices, before, strict=True):
        after = np.full(_LEVELS + 1, np.inf)
        pick = np.zeros(_LEVELS + 1, int)
        moves = [round((incoming + option.kept_bytes) / unit) for option in of_block]
        for place, (option, move) in enumerate(zip(of_block, moves, strict=True)):
            most = _LEVELS - math.ceil(option.choice.needs / unit)
            if move > most:
                continue
            candidate = np.full(_LEVELS + 1, np.inf)
            candidate[move : most + 1] = seconds[: most + 1 - move] + option.choice.seconds
            is_better = candidate < after
            after[is_better] = candidate[is_better]
            pick[is_better] = place
        seconds = after
        picks.append(pick)
        steps.append(moves)
    level = int(np.argmin(seconds))
    if not np.isfinite(seconds[level]):
        return None
    picked: list[BlockChoice] = []
    for of_block, pick, moves in reversed(list(zip(choices, picks, steps, strict=True))):
        place = int(pick[level])
        picked.append(of_block[place].choice)
        level -= moves[place]
    return picked[::-1]


def _bytes_before(flat: Flat, blocks: Sequence[StepBlock]) -> list[float]:
    """For each block, the bytes of what it reads and no block before it does."""
    known: set[int] = {*flat.inputs, *flat.constants}
    sizes: list[float] = []
    for block in blocks:
        steps = flat.steps[block.start : block.stop]
        new: set[int] = set()
        if any(step.needs for step in steps):
            new = set(block.inputs) - known
        sizes.append(bytes_of(flat, new))
        known |= new
    return sizes


def _merged(
    before: Sequence[Weighed], block: StepBlock, choices: Sequence[Weighed]
) -> list[Weighed]:
    """What the blocks of an iteration up to one can keep."""
    merged: list[Weighed] = []
    for earlier in before:
        for option in choices:
            choice = BlockChoice(
                earlier.choice.is_again or option.choice.is_again,
                inner=((*earlier.choice.inner[0], (block, option.choice)),),
                needs=max(earlier.choice.needs, option.choice.needs),
                seconds=earlier.choice.seconds + option.choice.seconds,
                flops=earlier.choice.flops + option.choice.flops,
            )
            merged.append(Weighed(choice, earlier.kept_bytes + option.kept_bytes))
    return without_worse(merged, 2 * _MOST_OF_BODY)


def _of_iteration(
    body: Flat, loop: FlatStep, decided: tuple[tuple[StepBlock, BlockChoice], ...]
) -> Weighed:
    """The choice of an iteration, with what it keeps counted once."""
    needs, kept = footprint(body, decided)
    choice = BlockChoice(
        any(choice.is_again for _, choice in decided),
        inner=(decided,),
        needs=needs - kept,
        seconds=_seconds(decided),
        flops=sum((choice.flops for _, choice in decided), 0.0),
    )
    return Weighed(choice, kept + _carried(body, loop))


def _in_turn(turns: Sequence[Weighed], length: int) -> Weighed:
    """What a loop keeps whose iterations choose in turn."""
    times = length / len(turns)
    of_iteration = sum((option.kept_bytes for option in turns), 0.0)
    kept = times * of_iteration
    is_again = any(option.choice.is_again for option in turns)
    inner: tuple[tuple[tuple[StepBlock, BlockChoice], ...], ...] = ()
    if is_again:
        inner = tuple(option.choice.inner[0] for option in turns)
    choice = BlockChoice(
        is_again,
        inner=inner,
        bytes=kept,
        # What an iteration keeps is copied to where all of them keep it, and back.
        needs=max(option.choice.needs for option in turns) + of_iteration,
        seconds=times * sum((option.choice.seconds for option in turns), 0.0),
        flops=times * sum((option.choice.flops for option in turns), 0.0),
    )
    return Weighed(choice, kept)


def _renumbered(option: Weighed, numbers: dict[int, int]) -> Weighed:
    """The same choice of a block that repeats."""
    choice = option.choice
    kept = frozenset(numbers[number] for number in choice.kept)
    same = BlockChoice(
        choice.is_again,
        kept,
        needs=choice.needs,
        seconds=choice.seconds,
        flops=choice.flops,
    )
    return Weighed(same, option.kept_bytes)


def _carried(body: Flat, loop: FlatStep) -> float:
    """The bytes of what one iteration gets from the one before, which are always kept."""
    assert loop.scan is not None
    _, carry, _ = loop.scan.split(body.inputs)
    needed: set[int] = set()
    for step in body.steps:
        if step.needs:
            needed.update(step.reads)
    return bytes_of(body, needed.intersection(carry))


def _total(flat: Flat) -> float:
    total = bytes_for_derivatives(flat)
    for step in flat.steps:
        if step.body is not None and step.scan is not None:
            total += step.scan.length * bytes_for_derivatives(step.body)
    return total


def _relative(flat: Flat, block: StepBlock) -> list[int]:
    """The values of a block, in the order in which it writes them."""
    numbers: list[int] = []
    for step in flat.steps[block.start : block.stop]:
        numbers += step.outputs
    return numbers


def _outline(flat: Flat, block: StepBlock) -> object:
    """What decides about a block, the same for layers that repeat."""
    place_of: dict[int, int] = {}
    outline: list[object] = []
    for step in flat.steps[block.start : block.stop]:
        for number in step.outputs:
            place_of[number] = len(place_of)
        reads = tuple(place_of.get(number, -1) for number in step.reads)
        needs = tuple(sorted(place_of.get(number, -1) for number in step.needs))
        sizes = tuple(flat.sizes[number] for number in step.outputs)
        outline.append((reads, needs, sizes, step.seconds, step.is_free, step.hides))
    kept = tuple(place_of[number] for number in block.outputs)
    return block.alone, tuple(outline), kept
