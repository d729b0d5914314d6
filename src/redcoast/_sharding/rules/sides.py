"""Which dimensions of an array are its input and which its output, where no module says so."""

import re
from collections import Counter

from ..nodes import Leaf
from .units import Unit

WEIGHTS = ("weight", "kernel", "embedding", "w", "W")
_OUT_NAME = re.compile(r"w?_?o|.*out.*|.*proj_o|attn_vec", re.IGNORECASE)
_KERNEL_WIDTH = 16  # convolutions in use are narrower; channels and heads times sizes are not
_TABLE_NAME = re.compile(r"embed|wte|wpe|shared$|vocab|relative|lookup", re.IGNORECASE)


def custom_unit(
    names: tuple[str, ...], key: str, weight: Leaf, bias: Leaf | None, stack: int, sizes: Counter
) -> Unit | None:
    """The array as a matrix, or None if it is none.

    `key` is the array's own name; `sizes` counts the sizes of the layer that it is in.
    """
    dims = [d for d in range(stack, len(weight.shape)) if weight.shape[d] > 1]
    conv = _conv_sides(key, weight.shape, stack)
    if conv is not None:
        ins, outs, spatial = conv
        return Unit(names, weight, bias, "conv", stack, ins, outs, spatial)
    if len(dims) == 2:
        return _matrix(names, key, weight, bias, stack, (dims[0], dims[1]))
    if len(dims) == 3:
        return _with_heads(names, weight, bias, stack, dims, sizes)
    return None


def _matrix(
    names: tuple[str, ...],
    key: str,
    weight: Leaf,
    bias: Leaf | None,
    stack: int,
    dims: tuple[int, int],
) -> Unit:
    first, last = (dims[0],), (dims[1],)
    if key == "kernel":
        return Unit(names, weight, bias, "linear", stack, first, last)
    if bias is None and (key == "embedding" or _TABLE_NAME.search("/".join(names))):
        return Unit(names, weight, None, "table", stack, first, last)
    torch = Unit(names, weight, bias, "linear", stack, last, first, sure=False)
    unit = torch if key.lower().endswith("weight") else torch.flipped()
    if bias is None or weight.shape[dims[0]] == weight.shape[dims[1]]:
        return unit
    outs = first if bias.shape[-1] == weight.shape[dims[0]] else last
    ins = last if outs == first else first
    return Unit(names, weight, bias, "linear", stack, ins, outs)


def _conv_sides(
    key: str, shape: tuple[int, ...], stack: int
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]] | None:
    """Channels and window of a convolution: Flax stores the window first, torch last."""
    rank = len(shape) - stack
    if rank < 3 or rank > 5 or key not in ("kernel", "weight"):
        return None
    if key == "kernel":
        spatial, ins, outs = tuple(range(stack, stack + rank - 2)), (-2,), (-1,)
    else:
        spatial, ins, outs = tuple(range(stack + 2, stack + rank)), (stack + 1,), (stack,)
    ins, outs = (ins[0] % len(shape),), (outs[0] % len(shape),)
    narrow = max(shape[d] for d in spatial) <= _KERNEL_WIDTH
    if rank == 3 and narrow:
        narrow = shape[spatial[0]] < min(shape[outs[0]], max(shape[ins[0]], 2))
    return (ins, outs, spatial) if narrow else None


def _with_heads(
    names: tuple[str, ...],
    weight: Leaf,
    bias: Leaf | None,
    stack: int,
    dims: list[int],
    sizes: Counter,
) -> Unit | None:
    """Query, key, value (width, heads, head size) or an output (heads, head size, width)."""
    shape = weight.shape
    width = _width_dim(names, shape, dims, sizes)
    rest = tuple(d for d in dims if d != width)
    if width == dims[-1]:
        return Unit(names, weight, bias, "linear", stack, rest, (width,))
    return Unit(names, weight, bias, "linear", stack, (width,), rest)


def _width_dim(
    names: tuple[str, ...], shape: tuple[int, ...], dims: list[int], sizes: Counter
) -> int:
    most = max(sizes[shape[d]] for d in dims)
    candidates = [d for d in dims if sizes[shape[d]] == most]
    if len(candidates) > 1 and dims[-1] in candidates and _OUT_NAME.fullmatch(names[-1]):
        return dims[-1]
    return candidates[0]
