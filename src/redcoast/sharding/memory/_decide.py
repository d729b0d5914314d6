"""What each block of a program keeps at a price of memory."""

import functools as ft
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ..tree._leaf_plans import Recompute
from ._blocks import StepBlock, bytes_for_derivatives, divide
from ._flat import Flat, FlatStep
from ._min_cut import choose_kept


@dataclass(frozen=True)
class BlockChoice:
    """What a block keeps.

    - `is_again`: whether the block is computed again. Otherwise, the compiler keeps what it needs.
    - `kept`: the values that are kept, of those that the block writes.
    - `inner`: for a loop, its blocks and their choices.
    - `bytes`: for a loop, what is kept of all iterations.
    - `needs`: the bytes that the backward pass needs beside these.
    - `seconds`, `flops`: what is computed again.
    """

    is_again: bool
    kept: frozenset[int] = frozenset()
    inner: "tuple[tuple[StepBlock, BlockChoice], ...]" = ()
    bytes: float = 0.0
    needs: float = 0.0
    seconds: float = 0.0
    flops: float = 0.0


Decided = Sequence[tuple[StepBlock, BlockChoice]]


@dataclass(eq=False)
class Decider:
    """Decides the blocks of a program at several prices. What is decided once is kept."""

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
        """The blocks of the program, and what each keeps."""
        parts, blocks = recompute.parts, recompute.blocks
        dearer = self._decide_at(parts, recompute.higher)
        return [*dearer[:blocks], *self._decide_at(parts, recompute.price)[blocks:]]

    def _decide_at(self, parts: int, price: float) -> Decided:
        """The blocks, and what each keeps at one price."""
        if (parts, price) not in self._at_price:
            decided: list[tuple[StepBlock, BlockChoice]] = []
            blocks = self.blocks(parts)
            last = self._last(blocks)
            for place, block in enumerate(blocks):
                own = price
                if place == last:
                    own = 0.0
                decided.append((block, self._choice(self.flat, block, own, parts)))
            self._at_price[parts, price] = decided
        return self._at_price[parts, price]

    @ft.cached_property
    def _at_price(self) -> dict[tuple[int, float], Decided]:
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

    def _choice(self, flat: Flat, block: StepBlock, price: float, parts: int) -> BlockChoice:
        # Layers that repeat are decided alike.
        if (id(flat), block) not in self._outlines:
            self._outlines[id(flat), block] = _outline(flat, block)
        key = (self._outlines[id(flat), block], price, parts)
        relative = _relative(flat, block)
        if key not in self._known:
            choice = self._decide_block(flat, block, price, parts)
            number = {value: place for place, value in enumerate(relative)}
            self._known[key] = choice, frozenset(number[value] for value in choice.kept)
        choice, places = self._known[key]
        kept = frozenset(relative[place] for place in places)
        return BlockChoice(
            choice.is_again,
            kept,
            self._inner(flat, block, choice, price, parts),
            choice.bytes,
            choice.needs,
            choice.seconds,
            choice.flops,
        )

    @ft.cached_property
    def _outlines(self) -> dict[tuple[int, StepBlock], object]:
        return {}

    @ft.cached_property
    def _known(self) -> dict[tuple[object, float, int], tuple[BlockChoice, frozenset[int]]]:
        return {}

    def _inner(
        self, flat: Flat, block: StepBlock, choice: BlockChoice, price: float, parts: int
    ) -> tuple[tuple[StepBlock, BlockChoice], ...]:
        body = flat.steps[block.start].body
        if body is None or not choice.is_again:
            return ()
        inner: list[tuple[StepBlock, BlockChoice]] = []
        for one in divide(body, self.total / parts):
            inner.append((one, self._choice(body, one, price, parts)))
        return tuple(inner)

    def _decide_block(self, flat: Flat, block: StepBlock, price: float, parts: int) -> BlockChoice:
        steps = flat.steps[block.start : block.stop]
        if steps[0].body is not None:
            return self._decide_loop(steps[0], steps[0].body, price, parts)
        is_open = _keep_all(flat, steps)
        if price <= 0 or block.alone or not any(step.needs for step in steps):
            return is_open
        again = _keep_some(flat, block, steps, price)
        saved = _bytes(flat, is_open.kept) - _bytes(flat, again.kept - frozenset(block.outputs))
        if again.seconds < price * saved:
            return again
        return is_open

    def _decide_loop(self, loop: FlatStep, body: Flat, price: float, parts: int) -> BlockChoice:
        assert loop.scan is not None
        length = loop.scan.length
        blocks = divide(body, self.total / parts)
        choices = [self._choice(body, block, price, parts) for block in blocks]
        needs, kept = footprint(body, list(zip(blocks, choices, strict=True)))
        kept += _carried(body, loop)
        return BlockChoice(
            any(choice.is_again for choice in choices),
            bytes=length * kept,
            needs=needs - kept,
            seconds=length * sum((choice.seconds for choice in choices), 0.0),
            flops=length * sum((choice.flops for choice in choices), 0.0),
        )


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
        new -= outside
        total += choice.bytes + _bytes(flat, new - kept)
        kept |= new
        most = max(most, total + choice.needs)
    return most, total


def _bytes(flat: Flat, numbers: Iterable[int]) -> float:
    return sum((flat.sizes[number] for number in numbers), 0.0)


def _carried(body: Flat, loop: FlatStep) -> float:
    """The bytes of what one iteration gets from the one before, which are always kept."""
    assert loop.scan is not None
    _, carry, _ = loop.scan.split(body.inputs)
    needed: set[int] = set()
    for step in body.steps:
        if step.needs:
            needed.update(step.reads)
    return _bytes(body, needed.intersection(carry))


def _total(flat: Flat) -> float:
    total = bytes_for_derivatives(flat)
    for step in flat.steps:
        if step.body is not None and step.scan is not None:
            total += step.scan.length * bytes_for_derivatives(step.body)
    return total


def _keep_all(flat: Flat, steps: list[FlatStep]) -> BlockChoice:
    """What the compiler keeps by itself: it computes again what it can fuse."""
    seconds: dict[int, float] = {}
    for place, step in enumerate(steps):
        seconds[place] = 0.0
        if not step.is_free:
            seconds[place] = 1.0
    most = max(1.0, sum((flat.sizes[number] for step in steps for number in step.outputs), 0.0))
    kept, _ = choose_kept(flat, steps, 0.5 / most, seconds, (), forced=False)
    return BlockChoice(False, frozenset(kept))


def _keep_some(flat: Flat, block: StepBlock, steps: list[FlatStep], price: float) -> BlockChoice:
    """What a block keeps that is computed again."""
    seconds = {place: step.seconds for place, step in enumerate(steps)}
    kept, again = choose_kept(flat, steps, price, seconds, block.outputs)
    needs = 0.0
    for place in again:
        if not steps[place].is_free:
            needs += sum((flat.sizes[number] for number in steps[place].outputs), 0.0)
    return BlockChoice(
        True,
        frozenset(kept),
        needs=needs,
        seconds=sum((seconds[place] for place in again), 0.0),
        flops=sum((steps[place].flops for place in again), 0.0),
    )


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
        if step.body is not None:
            return id(step)
        for number in step.outputs:
            place_of[number] = len(place_of)
        reads = tuple(place_of.get(number, -1) for number in step.reads)
        needs = tuple(sorted(place_of.get(number, -1) for number in step.needs))
        sizes = tuple(flat.sizes[number] for number in step.outputs)
        outline.append((reads, needs, sizes, step.seconds, step.is_free, step.hides))
    kept = tuple(place_of[number] for number in block.outputs)
    return block.alone, tuple(outline), kept
