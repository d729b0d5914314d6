"""Searches for the smallest number of devices, and for the longest sequence."""

from collections.abc import Callable, Iterator
from itertools import combinations_with_replacement
from math import prod

from redcoast.dryrun._chips import CHIPS, Chip
from redcoast.dryrun._target_name import TargetDevices, parse_target

STEP = 128  # tokens; lengths are multiples of it
MOST = 2**20  # tokens; the longest sequence to try
SIDES = (1, 2, 4, 8, 16)  # the sides of slices
CARDS = tuple(2**n for n in range(11))  # numbers of GPUs, over several hosts if need be


def longest_sequence(fits: Callable[[int], bool], start: int) -> int:
    """The longest sequence that fits, in tokens, found by doubling and then bisection.

    It is 0 if 128 tokens do not fit, and at most 2**20. `fits` is called once for each length.
    """
    low, high, most = 0, min(-(-start // STEP), MOST // STEP), MOST // STEP
    while fits(high * STEP):
        if high == most:
            return MOST
        low, high = high, min(2 * high, most)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle * STEP) else (low, middle)
    return low * STEP


def read_chip(name: str) -> Chip:
    """The chip of a target, with or without a number of devices."""
    return CHIPS.get(name.strip().lower()) or parse_target(name).chip


def sizes_of(chip: Chip) -> list[TargetDevices]:
    """The targets of a chip, from the smallest to the largest.

    For TPUs, the most compact slice of each size whose sides are powers of two. For GPUs, powers of
    two, in full hosts.
    """
    found: dict[int, TargetDevices] = {}
    for one in _candidates(chip):
        found.setdefault(one.count, one)
    return [found[count] for count in sorted(found)]


def _candidates(chip: Chip) -> Iterator[TargetDevices]:
    if chip.kind != "tpu":
        for count in CARDS:
            cards = min(count, chip.per_host)
            shape = (cards,) if count <= cards else (count // cards, cards)
            yield from _existing(chip.name, shape)
        return
    shapes = [(2, 2, 1), *combinations_with_replacement(SIDES, 2)]
    shapes += combinations_with_replacement(SIDES, 3)
    for shape in sorted(shapes, key=lambda shape: (prod(shape), sum(shape))):
        yield from _existing(chip.name, shape)


def _existing(chip: str, shape: tuple[int, ...]) -> Iterator[TargetDevices]:
    try:
        yield parse_target(f"{chip}:{'x'.join(map(str, shape))}")
    except ValueError:
        return
