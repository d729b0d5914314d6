"""Matrices that follow one another: split alternately, on the output and then on the input.

This is the first rule of RedCoast (arXiv:2310.16355, section 3.1): what one matrix leaves split
the next one reads split, so that one all-reduce serves both.
"""

from collections.abc import Iterator
from math import prod

from ._sides import reads_width, writes_width
from ._splits import Split, Splits, column, row, whole
from ._units import Group, Unit, Votes, near_units


def fsdp_dim(
    shape: tuple[int, ...], stack: int, fixed: frozenset[int], split: Split, n: int
) -> tuple[int | None, str]:
    """The dimension to split over `n` devices, or None, and the reason.

    Small arrays (by the elements of one layer) cost more in messages than they save.
    """
    elements = prod(shape[stack:])
    if elements < LARGE:
        return None, f"small, {elements:,} elements"
    free = [d for d in range(len(shape)) if d not in fixed and d != split.dim]
    fitting = [d for d in free if shape[d] % n == 0]
    if not fitting:
        return None, f"no other dimension is a multiple of fsdp={n}"
    return max(fitting, key=lambda d: (shape[d], -d)), "fsdp: largest remaining dimension"


LARGE = 4096  # elements; splitting fewer saves less than the communication costs
NARROW = 8  # an output this many times narrower than its input is little work, done whole


def split_pairs(group: Group, done: Splits, residual: set[int], votes: Votes, n: int) -> Splits:
    """Matrices from the residual width to an inner one, and from there back: both split inside.

    `residual` are the widths that attention below the group reads; those are not inner ones.
    """
    units = [unit for unit in near_units(group) if unit is not None and is_open(unit, done)]
    if group.ordered or len(units) < 2:
        return {}
    width = _width(units, votes)
    units = [unit for unit in units if width in sizes(unit)]
    ups = [unit for unit in units if unit.in_size == width and _reads(unit)]
    downs = [unit for unit in units if unit.out_size == width and _writes(unit)]
    splits: Splits = {}
    for down in downs:
        inner = down.square or down.in_size not in residual
        mates = [up for up in ups if inner and up.out_size in (down.in_size, 2 * down.in_size)]
        if mates:
            splits |= row(down, n, f"pairs with {mates[-1].name}")
        for up in mates:
            parts = up.out_size // down.in_size
            splits |= column(up, n, f"pairs with {down.name}", parts=parts)
    return splits


def split_chains(group: Group, done: Splits, residual: set[int], n: int) -> Splits:
    """Matrices in order, each reading what the one before writes: column, row, column, row.

    A chain in a list may split any size; elsewhere the residual widths stay whole.
    """
    splits: Splits = {}
    for run in _runs(group, done):
        if len(run) > 1:
            place = f"{group.path[-1]}/" if group.ordered and group.path else ""
            splits |= _alternate(run, set() if group.ordered else residual, place, n)
    return splits


def split_alone(unit: Unit, residual: set[int], n: int) -> Splits:
    """A matrix without a partner: an output is split where that divides and pays."""
    if unit.out_size in residual:
        return whole(unit, "no matrix after it to pair with, and its output is whole")
    elements = prod(unit.weight.shape[unit.stack :])
    if elements < LARGE:
        return whole(unit, f"small, {elements:,} elements")
    return column(unit, n, "output")


def is_open(unit: Unit, done: Splits) -> bool:
    return unit.kind != "table" and unit.weight.index not in done


def sizes(unit: Unit) -> tuple[int, int]:
    return unit.in_size, unit.out_size


def _width(units: list[Unit], votes: Votes) -> int:
    """The size that most of the matrices have on one side, and most arrays of the layer."""

    def score(size: int) -> tuple[int, int, int]:
        near = sum(size in sizes(unit) for unit in units)
        reads = sum((unit.in_size == size) - (unit.out_size == size) for unit in units)
        return near, votes[units[0].scope][size] if units[0].scope in votes else 0, reads

    return max((size for unit in units for size in sizes(unit)), key=score)


def _reads(unit: Unit) -> bool:
    """Only where both sides are alike has the name to say which is the inner one."""
    return not unit.square or reads_width(unit)


def _writes(unit: Unit) -> bool:
    return not unit.square or writes_width(unit)


def _runs(group: Group, done: Splits) -> Iterator[list[Unit]]:
    """Stretches of open matrices in which each reads what the one before writes."""
    run: list[Unit] = []
    for unit in near_units(group):
        if unit is None or not is_open(unit, done):
            yield run
            run = []
        elif run and _follows(run[-1], unit):
            run.append(unit)
        elif len(run) == 1 and _turns(run[0], unit):
            run = [run[0].flipped(), unit.flipped()]
        else:
            yield run
            run = [unit]
    yield run


def _follows(before: Unit, after: Unit) -> bool:
    if before.kind == "conv" and after.kind == "linear":
        return after.in_size % before.out_size == 0  # flattened, the channels in front
    return before.out_size == after.in_size


def _turns(before: Unit, after: Unit) -> bool:
    return not before.sure and not after.sure and before.in_size == after.out_size


def _alternate(run: list[Unit], residual: set[int], place: str, n: int) -> Splits:
    splits: Splits = {}
    before: Unit | None = None
    for unit, after in zip(run, [*run[1:], None], strict=True):
        if before is not None:
            splits |= row(unit, n, f"pairs with {place}{before.name}")
            before = None
        elif unit.out_size in residual:
            splits |= split_alone(unit, residual, n)
        elif after is None:
            splits |= _last(unit, n)
        else:
            splits |= column(unit, n, f"pairs with {place}{after.name}")
            before = unit if splits[unit.weight.index].dim is not None else None
    return splits


def _last(unit: Unit, n: int) -> Splits:
    """The end of a chain of odd length is split if it is worth gathering its output."""
    if unit.out_size * NARROW < unit.in_size:
        return whole(unit, f"output of {unit.out_size} from {unit.in_size}, narrow")
    return column(unit, n, "output")
