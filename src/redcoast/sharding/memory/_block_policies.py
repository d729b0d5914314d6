"""What one block of a program can keep for its backward pass, from everything to least."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter

from ._flat import Flat
from ._min_cut import choose_kept
from ._partition import StepBlock

_HALVINGS = 4  # of the interval between what costs least time and what keeps fewest bytes
_DEAREST = 4  # steps of a block that are excepted from recomputation one by one
_EXCEPTIONS = 32  # exceptions that are tried in a block
_WORTH_TRYING = 0.01  # the part of a block's time that a step takes at least to be excepted
_LARGE = 400  # steps of a block in which no exceptions are tried
_CHEAP, _DEAR = 1e-3, 1e3  # the first and the last price, by the mean one
_MOST_POLICIES = 48


@dataclass(frozen=True)
class BlockPolicy:
    """What a block keeps for the backward pass.

    - `recomputes`: whether the block is computed again; if not, the compiler keeps what it needs.
    - `kept`: the values that are kept, of those that the block writes.
    - `inner`: for a loop, what so many iterations in turn keep: for each, its blocks and their
        policies.
    - `kept_bytes`: the bytes of what is kept, without what the block returns; for a loop, those of
        all iterations.
    - `backward_bytes`: the bytes that the backward pass needs beside these.
    - `seconds`, `flops`: what is computed again.
    """

    recomputes: bool
    kept: frozenset[int] = frozenset()
    inner: "tuple[BlockPolicies, ...]" = ()
    kept_bytes: float = 0.0
    backward_bytes: float = 0.0
    seconds: float = 0.0
    flops: float = 0.0

    @property
    def most_bytes(self) -> float:
        return self.kept_bytes + self.backward_bytes

    def dominates(self, other: "BlockPolicy") -> bool:
        return (
            self.kept_bytes <= other.kept_bytes
            and self.most_bytes <= other.most_bytes
            and self.seconds <= other.seconds
        )


# The blocks of a program, and what each keeps.
BlockPolicies = Sequence[tuple[StepBlock, BlockPolicy]]


def combined(policies: Iterable[BlockPolicy]) -> BlockPolicy:
    """What several blocks keep, whose backward passes run one after another."""
    total = BlockPolicy(recomputes=False)
    for policy in policies:
        total = BlockPolicy(
            recomputes=total.recomputes or policy.recomputes,
            kept_bytes=total.kept_bytes + policy.kept_bytes,
            backward_bytes=max(total.backward_bytes, policy.backward_bytes),
            seconds=total.seconds + policy.seconds,
            flops=total.flops + policy.flops,
        )
    return total


def pareto_front(policies: Iterable[BlockPolicy], most: int = _MOST_POLICIES) -> list[BlockPolicy]:
    """The policies that no other is as good as in both memory and time, at most so many."""
    best: list[BlockPolicy] = []
    by_cost = attrgetter("seconds", "kept_bytes", "most_bytes")
    for policy in sorted(policies, key=by_cost):
        if not any(other.dominates(policy) for other in best):
            best.append(policy)
    if len(best) <= most:
        return best
    # Of very many policies, those at equal distances, the first and the last included.
    places = {round(place * (len(best) - 1) / (most - 1)) for place in range(most)}
    return list(map(best.__getitem__, sorted(places)))


def policies_of_block(flat: Flat, block: StepBlock) -> list[BlockPolicy]:
    """What a block that is no loop can keep: everything first, and then what takes least time."""
    finder = _PolicyFinder(flat, block)
    keep_all = finder.keep_all()
    if block.is_indivisible or not block.needs:
        return [keep_all]
    priced = finder.at_all_prices()
    if len(block.steps) <= _LARGE:
        priced += finder.with_exceptions(priced)
    return [keep_all, *pareto_front(item.policy for item in priced)]


@dataclass(frozen=True)
class _PricedPolicy:
    """What is kept at a price, of steps without `excepted` ones, and the steps of the others."""

    policy: BlockPolicy
    price: float
    again: frozenset[int]
    excepted: frozenset[int] = frozenset()

    @property
    def cost(self) -> tuple[float, float]:
        return self.policy.kept_bytes, self.policy.seconds


@dataclass(frozen=True)
class _PolicyFinder:
    """Finds what a block can keep. Steps are known by their places in the block."""

    flat: Flat
    block: StepBlock

    def keep_all(self) -> BlockPolicy:
        """What is kept by itself. The compiler computes again what it can fuse, but in a loop."""
        before = {*self.flat.inputs, *self.flat.constants, *self.block.inputs}
        kept = self.block.residuals - before
        if kept:
            return BlockPolicy(False, frozenset(kept), kept_bytes=self._kept_bytes(kept))
        costs = [float(not step.is_free) for step in self.block.steps]
        # All bytes together cost less than one step that is not free.
        price = 0.5 / max(1.0, self.flat.bytes_of(self.block.written))
        kept, _ = choose_kept(self.flat, self.block.steps, price, costs, (), forced=False)
        return BlockPolicy(False, frozenset(kept), kept_bytes=self._kept_bytes(kept))

    def at_all_prices(self) -> list[_PricedPolicy]:
        """The policies that are best at some price of a byte."""
        mean = sum(self.block.seconds) / max(1.0, self.flat.bytes_of(self.block.written))
        if not mean:
            return [self.at_price(1.0)]
        first, last = self.at_price(_CHEAP * mean), self.at_price(_DEAR * mean)
        return [first, *self._between(first, last, _HALVINGS), last]

    def _between(
        self, first: _PricedPolicy, last: _PricedPolicy, halvings: int
    ) -> list[_PricedPolicy]:
        more, fewer = first.cost, last.cost
        if not halvings or fewer[0] >= more[0] or fewer[1] <= more[1]:
            return []
        # The price at which both policies are worth as much: a better one lies between, if any.
        middle = self.at_price((fewer[1] - more[1]) / (more[0] - fewer[0]))
        if middle.cost in (more, fewer):
            return []
        before = self._between(first, middle, halvings - 1)
        return [*before, middle, *self._between(middle, last, halvings - 1)]

    def with_exceptions(self, priced: Sequence[_PricedPolicy]) -> list[_PricedPolicy]:
        """Policies between those of all prices: some steps are not computed again."""
        steps = self.block.steps
        least = _WORTH_TRYING * sum(self.block.seconds)
        waiting = list(priced)
        known = {item.again for item in priced}
        results: list[_PricedPolicy] = []
        tried = 0
        while waiting and tried < _EXCEPTIONS:
            item = waiting.pop(0)
            places: list[int] = []
            for place in item.again:
                if steps[place].seconds > least and not steps[place].hides:
                    places.append(place)
            places.sort(key=lambda place: (-steps[place].seconds, place))
            for place in places[:_DEAREST]:
                tried += 1
                other = self.at_price(item.price, item.excepted | {place})
                if other.again not in known:
                    known.add(other.again)
                    results.append(other)
                    waiting.append(other)
        return results

    def at_price(self, price: float, excepted: frozenset[int] = frozenset()) -> _PricedPolicy:
        """What is kept at a price for each byte, if some steps are not computed again."""
        steps, costs = self.block.steps, self.block.seconds
        everything = sum(costs) + price * self.flat.bytes_of(self.block.written)
        for place in excepted:
            costs[place] = 2 * everything
        kept, again = choose_kept(self.flat, steps, price, costs, self.block.outputs)
        backward_bytes = seconds = flops = 0.0
        for place in sorted(again):
            step = steps[place]
            seconds += step.seconds
            flops += step.flops
            if not step.is_free:
                backward_bytes += self.flat.bytes_of(step.outputs)
        policy = BlockPolicy(
            recomputes=True,
            kept=frozenset(kept),
            kept_bytes=self._kept_bytes(kept),
            backward_bytes=backward_bytes,
            seconds=seconds,
            flops=flops,
        )
        return _PricedPolicy(policy, price, frozenset(again), excepted)

    def _kept_bytes(self, kept: set[int]) -> float:
        return self.flat.bytes_of(kept.difference(self.block.outputs))
