"""Partitions the steps of a program into blocks between which little has to be kept.

What crosses from one block to a later one is kept for the backward pass. A block is computed again
as a whole, and then needs memory for what its derivatives need.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter

import numpy as np

from ._flat import Flat, FlatLoop, FlatStep

# Where a program can be cut: so many places at most, which bounds the time to find the cuts.
_MOST_PLACES = 400
# How much more a byte above the limit costs than one that is kept.
_ABOVE_LIMIT = 1e3


@dataclass(frozen=True)
class StepBlock:
    """Steps in a row.

    `inputs` are the values from before that it reads, `outputs` those that are used after it.
    """

    steps: Sequence[FlatStep]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]

    @property
    def is_indivisible(self) -> bool:
        """Whether it is a loop that is partitioned itself, or a step that cannot run again."""
        return _is_indivisible(self.steps[0])

    @property
    def loop(self) -> FlatLoop | None:
        """The loop that is partitioned itself, if the block is one."""
        return self.steps[0].loop

    @property
    def written(self) -> list[int]:
        """The values that its steps write, in order."""
        written: list[int] = []
        for step in self.steps:
            written += step.outputs
        return written

    @property
    def seconds(self) -> list[float]:
        """What each of its steps takes."""
        return list(map(attrgetter("seconds"), self.steps))

    @property
    def needs(self) -> set[int]:
        """The values that the derivatives of its steps need."""
        return set().union(*map(attrgetter("needs"), self.steps))

    @property
    def residuals(self) -> set[int]:
        """The values that JAX keeps for its steps; in loops only."""
        return set().union(*map(attrgetter("residuals"), self.steps))


def bytes_for_derivatives(flat: Flat) -> float:
    """The bytes of all values that derivatives need, in all iterations of loops."""
    total = 0.0
    written: set[int] = set()
    needed: set[int] = set()
    for step in flat.steps:
        written.update(step.outputs)
        needed |= step.needs
        if step.loop is not None:
            total += step.loop.scan.length * bytes_for_derivatives(step.loop.body)
    return total + flat.bytes_of(written & needed)


def partition(flat: Flat, limit: float) -> list[StepBlock]:
    """The blocks that keep fewest bytes between them, each of which needs at most `limit` bytes.

    A block that cannot be partitioned may need more.
    """
    program = _Cuts(flat)
    cuts = program.places(limit)
    return list(map(program.block, cuts, cuts[1:]))


class _Cuts:
    """Where a program can be cut: place `n` is before step `n`. Values that are written before a
    place and read after it cross it."""

    def __init__(self, flat: Flat):
        self.flat = flat
        count = len(flat.steps)
        self.writer: dict[int, int] = {}  # the step that writes each value
        self.last_reader: dict[int, int] = {}  # the last step that reads it
        needed: set[int] = set()
        for index, step in enumerate(flat.steps):
            self.writer.update(dict.fromkeys(step.outputs, index))
            self.last_reader.update(dict.fromkeys(step.reads, index))
            needed |= step.needs
        for atom in flat.outputs:
            if isinstance(atom, int):
                self.last_reader[atom] = count
        # The bytes for derivatives that are written before each place.
        written = np.zeros(count + 1)
        for number in needed & self.writer.keys():
            written[1 + self.writer[number]] += flat.sizes[number]
        self.written = np.cumsum(written)

    def block(self, start: int, stop: int) -> StepBlock:
        steps = self.flat.steps[start:stop]
        inputs: dict[int, None] = {}
        outputs: list[int] = []
        for step in steps:
            for number in step.reads:
                if self.writer.get(number, -1) < start:
                    inputs[number] = None
            for number in step.outputs:
                if self.last_reader.get(number, -1) >= stop:
                    outputs.append(number)
        return StepBlock(steps, tuple(inputs), tuple(outputs))

    def places(self, limit: float) -> list[int]:
        """The places of the cuts, the first and the last place included."""
        count = len(self.flat.steps)
        forced: set[int] = {0, count}
        for index, step in enumerate(self.flat.steps):
            if _is_indivisible(step):
                forced |= {index, index + 1}
        cuts = [0]
        for start, stop in pairwise(sorted(forced)):
            cuts += self._between(start, stop, limit)
        return cuts

    def _between(self, start: int, stop: int, limit: float) -> list[int]:
        """The cuts after `start`, up to `stop`, with the least bytes that cross them."""
        if self.written[stop] - self.written[start] <= limit or stop - start == 1:
            return [stop]
        places = self._candidates(start, stop)
        crossing = self._newly_crossing(places)
        # The bytes for derivatives of a block from one place to another: (from, to).
        of_block = self.written[places][None, :] - self.written[places][:, None]
        # The shortest path from the first to the last place, where a step is a block.
        least = np.full(len(places), np.inf)
        least[0] = 0.0
        before = np.zeros(len(places), int)
        for at in range(1, len(places)):
            # What needs more than the limit is only taken where nothing else can be.
            excess = np.maximum(of_block[:at, at] - limit, 0.0)
            costs = least[:at] + crossing[:at, at] + _ABOVE_LIMIT * excess
            before[at] = np.argmin(costs)
            least[at] = costs[before[at]]
        cuts, at = [], len(places) - 1
        while at > 0:
            cuts.append(int(places[at]))
            at = before[at]
        return cuts[::-1]

    def _candidates(self, start: int, stop: int) -> np.ndarray:
        """Places that fewer bytes cross than the places beside them."""
        change = np.zeros(len(self.flat.steps) + 2)
        for number, index in self.writer.items():
            last = self.last_reader.get(number, index)
            change[index + 1] += self.flat.sizes[number]
            change[last + 1] -= self.flat.sizes[number]
        crossing = np.cumsum(change)[start : stop + 1]
        inner = crossing[1:-1]
        is_least = (inner <= crossing[:-2]) & (inner <= crossing[2:])
        places = np.flatnonzero(is_least) + 1
        if len(places) > _MOST_PLACES:
            order = np.argsort(crossing[places], kind="stable")
            places = np.sort(places[order[:_MOST_PLACES]])
        return np.concatenate([[start], places + start, [stop]])

    def _newly_crossing(self, places: np.ndarray) -> np.ndarray:
        """The bytes that are written between each two places and used later: (from, to)."""
        count = len(places)
        result = np.zeros((count, count))
        # Of each value: (values,)
        numbers = np.array(list(self.writer.keys()), int)
        writers = np.array(list(self.writer.values()), int)
        readers = np.array([self.last_reader.get(number, -1) for number in self.writer], int)
        sizes = np.array(self.flat.sizes)[numbers]
        # The value crosses what lies behind its step.
        first = np.searchsorted(places, writers, side="right")
        for at in range(count):
            alive = (writers < places[at]) & (readers >= places[at])
            written = np.bincount(first[alive], sizes[alive], minlength=count + 1)
            # Of the values that are alive here, those that were written after each place.
            after = np.cumsum(written[::-1])[::-1]
            result[:, at] = after[1 : count + 1]
        return result


def _is_indivisible(step: FlatStep) -> bool:
    return step.loop is not None or step.is_bare
