"""Divides the steps of a program into blocks between which little has to be kept.

What crosses from one block to a later one is kept for the backward pass. A block is computed again
as a whole, and then needs memory for what its derivatives need.
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from ._flat import Flat

# Where a program can be cut: so many places at most, which bounds the time to find the cuts.
_MOST_PLACES = 400


@dataclass(frozen=True)
class StepBlock:
    """The steps from `start` to `stop`. `alone` is whether it is one loop, or cannot run again.

    `inputs` are the values from before that it reads, `outputs` those that are used after it.
    """

    start: int
    stop: int
    alone: bool
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


def bytes_for_derivatives(flat: Flat) -> float:
    """The bytes of all values that derivatives need, without those inside of loops."""
    return float(np.sum(_Places(flat).needed))


def divide(flat: Flat, room: float) -> list[StepBlock]:
    """The blocks that keep fewest bytes between them, each of which needs at most `room` bytes.

    A block that cannot be divided may need more.
    """
    places = _Places(flat)
    cuts = places.cuts(room)
    blocks: list[StepBlock] = []
    for start, stop in pairwise(cuts):
        blocks.append(places.block(start, stop))
    return blocks


class _Places:
    """The places between the steps of a program, and the values that cross them."""

    def __init__(self, flat: Flat):
        self.flat = flat
        count = len(flat.steps)
        self.made: dict[int, int] = {}  # the step that writes a value
        self.used: dict[int, int] = {}  # the last step that reads it
        self.needed = np.zeros(count)
        needed_by_any: set[int] = set()
        for index, step in enumerate(flat.steps):
            self.made.update(dict.fromkeys(step.outputs, index))
            self.used.update(dict.fromkeys(step.reads, index))
            needed_by_any |= step.needs
        self.used.update(dict.fromkeys((x for x in flat.outputs if isinstance(x, int)), count))
        for number in needed_by_any:
            if number in self.made:
                self.needed[self.made[number]] += flat.sizes[number]
        self.results = frozenset(x for x in flat.outputs if isinstance(x, int))

    def block(self, start: int, stop: int) -> StepBlock:
        steps = self.flat.steps[start:stop]
        inputs: dict[int, None] = {}
        outputs: list[int] = []
        for step in steps:
            for number in step.reads:
                if self.made.get(number, -1) < start:
                    inputs[number] = None
            for number in step.outputs:
                if self.used.get(number, -1) >= stop:
                    outputs.append(number)
        return StepBlock(start, stop, self._is_alone(start), tuple(inputs), tuple(outputs))

    def _is_alone(self, index: int) -> bool:
        step = self.flat.steps[index]
        return step.body is not None or step.is_bare

    def cuts(self, room: float) -> list[int]:
        """The places of the cuts, the first and the last place included."""
        count = len(self.flat.steps)
        forced: set[int] = {0, count}
        for index in range(count):
            if self._is_alone(index):
                forced |= {index, index + 1}
        bounds = sorted(forced)
        cuts = [0]
        for start, stop in pairwise(bounds):
            cuts += self._between(start, stop, room)
        return cuts

    def _between(self, start: int, stop: int, room: float) -> list[int]:
        """The cuts after `start`, up to `stop`, with the least bytes that cross them."""
        total = np.concatenate([[0.0], np.cumsum(self.needed)])
        if total[stop] - total[start] <= room or stop - start == 1:
            return [stop]
        places = self._candidates(start, stop)
        crossing = self._newly_crossing(places)
        need = total[places][None, :] - total[places][:, None]  # from one place to another
        least = np.full(len(places), np.inf)
        least[0] = 0.0
        before = np.zeros(len(places), int)
        for at in range(1, len(places)):
            # What needs more than there is room for is only taken where nothing else can be.
            excess = np.maximum(need[:at, at] - room, 0.0)
            costs = least[:at] + crossing[:at, at] + 1e3 * excess
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
        for number, index in self.made.items():
            last = self.used.get(number, index)
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
        """For each pair of places, the bytes that are written between them and used later."""
        count = len(places)
        written = np.full(count + 1, 0.0)
        result = np.zeros((count, count))
        numbers = np.array(list(self.made), int)
        made = np.array([self.made[number] for number in numbers], int)
        used = np.array([self.used.get(number, -1) for number in numbers], int)
        sizes = np.array([self.flat.sizes[number] for number in numbers])
        # The value crosses what lies behind its step.
        first = np.searchsorted(places, made, side="right")
        for at in range(count):
            alive = (made < places[at]) & (used >= places[at])
            written = np.bincount(first[alive], sizes[alive], minlength=count + 1)
            # Of the values that are alive here, those that were written after each place.
            after = np.cumsum(written[::-1])[::-1]
            result[:, at] = after[1 : count + 1]
        return result
