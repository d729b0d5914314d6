"""Storing large arrays split over the `fsdp` axis, along their largest remaining dimension."""

from math import prod

from .chains import LARGE
from .splits import Split


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
