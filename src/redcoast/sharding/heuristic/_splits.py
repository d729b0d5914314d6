"""Splitting one matrix over the `model` axis, on its output or its input side."""

from dataclasses import dataclass

from ._units import Unit


@dataclass(frozen=True)
class Split:
    """The dimension of an array that is split over `model` (None: none), and why.

    `outer` is the size of a matrix' other side, which stays whole. It is there as well where only
    the sizes were against a split.
    """

    dim: int | None
    reason: str
    outer: int | None = None


Splits = dict[int, Split]


def column(unit: Unit, n: int, reason: str, *, parts: int = 1, heads: int | None = None) -> Splits:
    """Splits the output side over `n` devices, and the bias with it.

    `parts` equal matrices may be fused side by side; `heads` have to stay whole each.
    """
    trouble = _trouble(unit, unit.outs[0], n, parts, heads)
    if trouble:
        return whole(unit, trouble, outer=unit.in_size)
    dim = unit.outs[0]
    splits = {unit.weight.index: Split(dim, f"column-split: {reason}", unit.in_size)}
    return splits | _bias(unit, dim)


def row(unit: Unit, n: int, reason: str, *, heads: int | None = None) -> Splits:
    """Splits the input side over `n` devices; the bias is added once to the sum, so it is whole."""
    trouble = _trouble(unit, unit.ins[0], n, 1, heads)
    if trouble:
        return whole(unit, trouble, outer=unit.out_size)
    splits = {unit.weight.index: Split(unit.ins[0], f"row-split: {reason}", unit.out_size)}
    if unit.bias is not None:
        splits[unit.bias.index] = Split(None, "bias of a row-split matrix")
    return splits


def whole(unit: Unit, reason: str, *, outer: int | None = None) -> Splits:
    splits = {unit.weight.index: Split(None, reason, outer)}
    if unit.bias is not None:
        splits[unit.bias.index] = Split(None, "follows its matrix")
    return splits


def indivisible(what: str, size: int, n: int) -> str:
    """A reason that names the sizes next to `size` that would divide."""
    below = size // n * n
    near = f"{below} or {below + n}" if below else f"{n}"
    return f"{what} {size} is not a multiple of model={n} ({near} would be)"


def _trouble(unit: Unit, dim: int, n: int, parts: int, heads: int | None) -> str | None:
    if unit.groups > 1:
        return f"convolution in {unit.groups} groups"
    if heads is not None and heads % n:
        return indivisible("number of heads", heads, n)
    size = unit.weight.shape[dim]
    if size % (n * parts):
        explicit = len(unit.ins) + len(unit.outs) > 2
        return indivisible("number of heads" if explicit else "size", size // parts, n)
    return None


def _bias(unit: Unit, dim: int) -> Splits:
    if unit.bias is None:
        return {}
    shape, size = unit.bias.shape, unit.weight.shape[dim]
    dims = [d for d in range(len(shape)) if d >= unit.stack and shape[d] == size]
    if not dims:
        return {unit.bias.index: Split(None, "does not have its matrix's output size")}
    return {unit.bias.index: Split(dims[0], "follows its matrix")}
