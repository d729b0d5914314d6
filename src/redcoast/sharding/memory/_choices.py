"""What one block of a program can keep for its backward pass, from everything to least."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ._blocks import StepBlock
from ._flat import Flat, FlatStep
from ._min_cut import choose_kept

_HALVINGS = 4  # of the interval between what costs least time and what keeps fewest bytes
_DEAREST = 4  # steps of a block that are excepted from recomputation one by one
_EXCEPTIONS = 32  # exceptions that are tried in a block
_LARGE = 400  # steps of a block in which no exceptions are tried
_CHEAP, _DEAR = 1e-3, 1e3  # the first and the last price, by the mean one
_MOST_CHOICES = 48


@dataclass(frozen=True)
class BlockChoice:
    """What a block keeps.

    - `is_again`: whether the block is computed again. Otherwise, the compiler keeps what it needs.
    - `kept`: the values that are kept, of those that the block writes.
    - `inner`: for a loop, what so many iterations in turn keep: for each, its blocks and their
        choices.
    - `bytes`: for a loop, what is kept of all iterations.
    - `needs`: the bytes that the backward pass needs beside these.
    - `seconds`, `flops`: what is computed again.
    """

    is_again: bool
    kept: frozenset[int] = frozenset()
    inner: "tuple[tuple[tuple[StepBlock, BlockChoice], ...], ...]" = ()
    bytes: float = 0.0
    needs: float = 0.0
    seconds: float = 0.0
    flops: float = 0.0


@dataclass(frozen=True)
class Weighed:
    """A choice with the bytes that it keeps inside of its block."""

    choice: BlockChoice
    kept_bytes: float

    @property
    def most_bytes(self) -> float:
        return self.kept_bytes + self.choice.needs

    def is_as_good_as(self, other: "Weighed") -> bool:
        return (
            self.kept_bytes <= other.kept_bytes
            and self.most_bytes <= other.most_bytes
            and self.choice.seconds <= other.choice.seconds
        )


def weighed(flat: Flat, block: StepBlock, choice: BlockChoice) -> Weighed:
    """A choice with its bytes."""
    inside = choice.kept - frozenset(block.outputs)
    return Weighed(choice, choice.bytes + bytes_of(flat, inside))


def bytes_of(flat: Flat, numbers: Iterable[int]) -> float:
    """The bytes of values on a device."""
    return sum((flat.sizes[number] for number in numbers), 0.0)


def without_worse(choices: Iterable[Weighed], most: int = _MOST_CHOICES) -> list[Weighed]:
    """The choices that no other is as good as in both memory and time, at most so many."""
    order = lambda option: (option.choice.seconds, option.kept_bytes, option.most_bytes)
    ordered = sorted(choices, key=order)
    best: list[Weighed] = []
    for option in ordered:
        if not any(other.is_as_good_as(option) for other in best):
            best.append(option)
    if len(best) <= most:
        return best
    # Of very many choices, those at equal distances, the first and the last included.
    places = {round(place * (len(best) - 1) / (most - 1)) for place in range(most)}
    return [best[place] for place in sorted(places)]


def choices_of_block(flat: Flat, block: StepBlock) -> list[Weighed]:
    """What a block that is no loop can keep: everything first, and then what takes least time."""
    steps = flat.steps[block.start : block.stop]
    keep_all = weighed(flat, block, _keep_all(flat, steps))
    if block.alone or not any(step.needs for step in steps):
        return [keep_all]
    cutter = _Cutter(flat, block, steps)
    cuts = cutter.at_all_prices()
    if len(steps) <= _LARGE:
        cuts += cutter.with_exceptions(cuts)
    return [keep_all, *without_worse(cut.weighed for cut in cuts)]


@dataclass(frozen=True)
class _Cut:
    """What is kept at a price, of steps without `excepted` ones, and the steps of the others."""

    weighed: Weighed
    price: float
    again: frozenset[int]
    excepted: frozenset[int] = frozenset()

    @property
    def cost(self) -> tuple[float, float]:
        return self.weighed.kept_bytes, self.weighed.choice.seconds


@dataclass(frozen=True)
class _Cutter:
    """Finds what a block that is computed again can keep."""

    flat: Flat
    block: StepBlock
    steps: Sequence[FlatStep]

    def at_all_prices(self) -> list[_Cut]:
        """The choices that are best at some price of a byte."""
        seconds = sum((step.seconds for step in self.steps), 0.0)
        written = sum((bytes_of(self.flat, step.outputs) for step in self.steps), 0.0)
        mean = seconds / max(1.0, written)
        if not mean:
            return [self.at_price(1.0)]
        first, last = self.at_price(_CHEAP * mean), self.at_price(_DEAR * mean)
        return [first, *self._between(first, last, _HALVINGS), last]

    def _between(self, first: _Cut, last: _Cut, halvings: int) -> list[_Cut]:
        more, fewer = first.cost, last.cost
        if not halvings or fewer[0] >= more[0] or fewer[1] <= more[1]:
            return []
        # The price at which both choices are worth as much: a better one lies between, if any.
        middle = self.at_price((fewer[1] - more[1]) / (more[0] - fewer[0]))
        if middle.cost in (more, fewer):
            return []
        before = self._between(first, middle, halvings - 1)
        return [*before, middle, *self._between(middle, last, halvings - 1)]

    def with_exceptions(self, cuts: Sequence[_Cut]) -> list[_Cut]:
        """Choices between those of all prices: some steps are not computed again."""
        waiting = list(cuts)
        known = {cut.again for cut in cuts}
        results: list[_Cut] = []
        tried = 0
        while waiting and tried < _EXCEPTIONS:
            cut = waiting.pop(0)
            for place in self._dearest(cut):
                tried += 1
                other = self.at_price(cut.price, cut.excepted | {place})
                if other.again not in known:
                    known.add(other.again)
                    results.append(other)
                    waiting.append(other)
        return results

    def _dearest(self, cut: _Cut) -> list[int]:
        places = [place for place in cut.again if not self.steps[place].hides]
        places.sort(key=lambda place: (-self.steps[place].seconds, place))
        return places[:_DEAREST]

    def at_price(self, price: float, excepted: frozenset[int] = frozenset()) -> _Cut:
        """What is kept at a price for each byte, if some steps are not computed again."""
        seconds = {place: step.seconds for place, step in enumerate(self.steps)}
        everything = sum(seconds.values())
        everything += price * sum((bytes_of(self.flat, s.outputs) for s in self.steps), 0.0)
        costs = seconds | dict.fromkeys(excepted, 2 * everything)
        kept, again = choose_kept(self.flat, self.steps, price, costs, self.block.outputs)
        choice = self._choice(kept, again, seconds)
        return _Cut(
            weighed(self.flat, self.block, choice), price, frozenset(again), frozenset(excepted)
        )

    def _choice(self, kept: set[int], again: set[int], seconds: Mapping[int, float]) -> BlockChoice:
        needs = 0.0
        for place in again:
            if not self.steps[place].is_free:
                needs += bytes_of(self.flat, self.steps[place].outputs)
        places = sorted(again)
        return BlockChoice(
            True,
            frozenset(kept),
            needs=needs,
            seconds=sum((seconds[place] for place in places), 0.0),
            flops=sum((self.steps[place].flops for place in places), 0.0),
        )


def _keep_all(flat: Flat, steps: Sequence[FlatStep]) -> BlockChoice:
    """What the compiler keeps by itself: it computes again what it can fuse."""
    seconds: dict[int, float] = {}
    for place, step in enumerate(steps):
        seconds[place] = 0.0
        if not step.is_free:
            seconds[place] = 1.0
    most = max(1.0, sum((bytes_of(flat, step.outputs) for step in steps), 0.0))
    kept, _ = choose_kept(flat, steps, 0.5 / most, seconds, (), forced=False)
    return BlockChoice(False, frozenset(kept))
