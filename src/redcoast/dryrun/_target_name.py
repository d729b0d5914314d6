"""Parses the name of a target: the chip, the number of devices, and their arrangement."""

import difflib
import functools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from ._chips import CHIPS, Chip

# The published slices of chips with a two-dimensional torus.
_PLANE = ((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16))
# With a three-dimensional torus: these slices below a cube of 4 x 4 x 4, and multiples of the cube.
_LESS_THAN_A_CUBE = ((2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4))
_MOST_CHIPS = {"v4": 4096, "v5p": 6144, "tpu7x": 9216}
_MOST_HOSTS = 1024
_MOST_SLICES = 128
_SIZES = re.compile(r"[1-9][0-9]{0,5}(x[1-9][0-9]{0,5})*")


@dataclass(frozen=True)
class TargetDevices:
    """Devices that a program is compiled for.

    - `shape`: Chips along each dimension of a slice (TPU), or hosts and cards (GPU, CPU).
    """

    name: str  # such as `"v4:4x4x4"`
    chip: Chip
    count: int  # the number of devices, as JAX counts them
    hosts: int
    shape: tuple[int, ...]
    slices: int = 1  # the number of TPU slices, which are connected by the network of their hosts

    @property
    def groups(self) -> int:
        """The number of slices (TPU) or hosts, between which the network is slower than inside."""
        return self.slices if self.chip.kind == "tpu" else self.hosts


def parse_target(name: str) -> TargetDevices:
    """Parses a name such as `"v4:4x4x4"`, `"h100:8x8"`, `"l4"` or `"cpu:8"`.

    A TPU slice may have one more size before its own, the number of such slices: `"v5e:2x16x16"`.

    Raises `ValueError` if there is no such chip or slice; it lists the existing ones. `TypeError`
    if `name` is not a string.
    """
    if not isinstance(name, str):
        raise TypeError(f'`target` is {name!r}. It must be a name, such as "a100-80gb:8".')
    name = name.strip().lower()
    first, colon, sizes = name.partition(":")
    chip = CHIPS.get(first)
    if chip is None:
        raise ValueError(
            f"There is no target {name!r}: {first!r} is none of {', '.join(CHIPS)}."
            f'{_did_you_mean(first)} Write a TPU slice as "v4:2x2x2", cards as "h100:4", cards of '
            'several hosts as "h100:2x8", and emulated devices as "cpu:8".'
        )
    shape: tuple[int, ...] = ()
    if colon:
        if not _SIZES.fullmatch(sizes):
            raise ValueError(
                f"The target {name!r} does not give the number of devices. {_form(chip)}"
            )
        shape = tuple(map(int, sizes.split("x")))
    if chip.kind == "tpu":
        return _slice(name, chip, shape)
    if len(shape) > 2 or (chip.kind == "cpu" and len(shape) > 1):
        raise ValueError(f"The target {name!r} has too many sizes. {_form(chip)}")
    hosts, cards = (1, 1, *shape)[-2:]  # one host, if only the cards are written
    if cards > chip.per_host:
        raise ValueError(
            f"The target {name!r} has {cards} devices in a host, but a host has at most "
            f"{chip.per_host}. {_form(chip)}"
        )
    if hosts > _MOST_HOSTS:
        raise ValueError(f"The target {name!r} has more than {_MOST_HOSTS} hosts. {_form(chip)}")
    return TargetDevices(name, chip, hosts * cards, hosts, (hosts, cards))


def _did_you_mean(name: str) -> str:
    near: list[str] = []
    if name:
        near = [chip for chip in CHIPS if chip.startswith(name)]
    near = near or difflib.get_close_matches(name, CHIPS, n=2, cutoff=0.5)
    if not near:
        return ""
    return f" Did you mean {' or '.join(map(repr, near))}?"


def _slice(name: str, chip: Chip, shape: tuple[int, ...]) -> TargetDevices:
    slices = 1
    if len(shape) == chip.torus + 1:
        slices, *rest = shape
        shape = tuple(rest)
        if slices > _MOST_SLICES:
            raise ValueError(f"The target {name!r} has more than {_MOST_SLICES} slices.")
    if shape not in (sizes := _slices(chip.name)):
        chips = math.prod(shape)

        # Among slices with the same number of chips, the closest to a cube come first.
        def distance(size: Sequence[int]) -> tuple[float, int]:
            return abs(math.log(math.prod(size) / chips)), sum(size)

        near = sorted(sizes, key=distance)[:5]
        near.sort(key=math.prod)
        names = ", ".join(f"{chip.name}:{_written(size)}" for size in near)
        rule = f"all slices are {', '.join(map(_written, sizes))}"
        if chip.torus == 3:
            rule = (
                "slices of more than 32 chips have three sizes that are multiples of 4, the "
                f"smallest first, and up to {_MOST_CHIPS[chip.name]} chips"
            )
        raise ValueError(
            f"{chip.name} has no slice {_written(shape) or 'of unknown size'}, as in {name!r}. The "
            f"nearest that exist are {names}; {rule}."
        )
    count = slices * math.prod(shape) * chip.cores
    # A host of v5e and v6e has eight chips, so slices of up to eight are in one host. Larger slices
    # use four chips of each host.
    alone = chip.torus == 2 and count <= 8 * slices
    hosts = count // chip.per_host
    if alone:
        hosts = slices
    return TargetDevices(name, chip, count, hosts, shape, slices)


@functools.cache
def _slices(chip: str) -> Sequence[tuple[int, ...]]:
    """The sides of all slices of a TPU."""
    if chip not in _MOST_CHIPS:
        return _PLANE
    most = _MOST_CHIPS[chip]
    slices = [*_LESS_THAN_A_CUBE]
    # Multiples of the cube, the shortest side first. No side is shorter than the one before.
    # The two shorter sides have at least 4 chips each.
    longest = most // 16
    for a in range(4, longest + 1, 4):
        for b in range(a, longest + 1, 4):
            for c in range(b, most // (a * b) + 1, 4):
                slices.append((a, b, c))
    return slices


def _written(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape))


def _form(chip: Chip) -> str:
    if chip.kind == "tpu":
        sizes = "2x2x2"
        if chip.torus == 2:
            sizes = "4x4"
        example = f"{chip.name}:{sizes}"
        several = f"{chip.name}:2x{sizes}"
        return (
            f'Write the number of chips along each dimension of the slice, such as "{example}", '
            f'after the number of slices if there are several, such as "{several}".'
        )
    if chip.kind == "cpu":
        return f'Write a number of devices up to {chip.per_host}, such as "cpu:8".'
    return (
        f'Write a number of cards, such as "{chip.name}:{chip.per_host}", or hosts x cards, such '
        f'as "{chip.name}:2x{chip.per_host}".'
    )
