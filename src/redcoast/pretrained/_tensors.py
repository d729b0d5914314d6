"""One-line descriptions of how the arrays of a model correspond to published tensors."""

import itertools as it
import re
import string
from dataclasses import dataclass, field
from math import prod

Groups = tuple[tuple[str, ...], ...]
# The end of a field that counts some of the layers.
SOME_LAYERS = r"(\+\d+|:[\d,]+)}"


@dataclass(frozen=True, init=False)
class Tensor:
    """The published tensors that one array (a leaf) of a model consists of.

    ```python
    Tensor(
        "model.layers.{layer}.self_attn.q_proj.weight",
        "(heads head_dim) width -> width heads head_dim",
        heads=32,
    )
    ```

    **Arguments:**

    - `name`: the names of the tensors. Each field in it, such as `{layer}`, is a leading dimension
      of the leaf, in the same order. `{layer+1}` counts from 1, if the first layer has no such
      tensor, and `{layer+0}` from 0, if the last layers have none.
      `{layer:0,1,3}` lists the numbers of the layers, if there are others between them.
    - `pattern`: how the dimensions of one tensor become the remaining dimensions of the leaf, in
      the style of einops. Each dimension is a factor, or several factors in parentheses, slowest
      first; a number is a factor of that size. Every factor must be on both sides, except factors
      of size 1 and factors that are fixed at an index.
    - `fixed`: sizes of factors that do not follow from the leaf's shape; or an index and a size, if
      the leaf only has that index of a factor: `qkv=(0, 3)` is the first of three. If this factor
      is on both sides, the leaf has a range of indices that begins there.

    **Raises:**

    `ValueError` if the name or the pattern is invalid.
    """

    name: str
    pattern: str
    fixed: tuple[tuple[str, int | tuple[int, int]], ...]
    fields: tuple[str, ...] = field(repr=False)
    starts: tuple[int, ...] = field(repr=False)
    numbers: tuple[tuple[int, ...], ...] = field(repr=False)
    left: Groups = field(repr=False)
    right: Groups = field(repr=False)

    def __init__(self, name: str, pattern: str, /, **fixed: int | tuple[int, int]):
        put = lambda key, value: object.__setattr__(self, key, value)
        put("name", name)
        put("pattern", pattern)
        put("fixed", tuple(fixed.items()))
        parsed = [(f, spec) for _, f, spec, _ in string.Formatter().parse(name) if f is not None]
        fields = [f for f, _ in parsed]
        starts = [re.fullmatch(r"(.*)\+(\d+)", f) for f in fields]
        found = [(m[1], int(m[2])) if m else (f, 0) for f, m in zip(fields, starts, strict=True)]
        put("fields", tuple(f for f, _ in found))
        put("starts", tuple(start for _, start in found))
        put("numbers", tuple(tuple(map(int, re.findall(r"\d+", spec or ""))) for _, spec in parsed))
        sides = pattern.split("->")
        if len(sides) != 2:
            raise ValueError(f"{self} must have exactly one `->` between its two sides.")
        put("left", _groups(sides[0], self))
        put("right", _groups(sides[1], self))
        _check(self)

    def __str__(self) -> str:
        return f"The pattern `{self.pattern}` of {self.name}"


def _groups(side: str, tensor: Tensor) -> Groups:
    """Parses one side of a pattern: the factors of each dimension."""
    found = re.findall(r"\(([\w\s]+)\)|(\w+)|(\S)", side)
    if odd := [sign for _, _, sign in found if sign]:
        raise ValueError(
            f"{tensor} has {odd[0]!r} where a factor is expected. Write factors as words or "
            "numbers, with the factors of one dimension in parentheses: `(heads head_dim) width`."
        )
    groups = tuple(tuple((inside or word).split()) for inside, word, _ in found)
    names = [f for group in groups for f in group if f != "1"]
    if again := {f for f in names if names.count(f) > 1}:
        raise ValueError(f"{tensor} has {_words(again)} more than once on one side.")
    if odd := [f for f in names if (not f.isidentifier() and not f.isdecimal()) or f == "0"]:
        raise ValueError(f"{tensor} has {_words(odd)}, which is neither a name nor a size.")
    return groups


def _check(tensor: Tensor) -> None:
    left, right = ({*it.chain(*side)} - {"1"} for side in (tensor.left, tensor.right))
    fixed = dict(tensor.fixed)
    parts = {f for f, size in fixed.items() if isinstance(size, tuple)} - right
    if unknown := fixed.keys() - left - right:
        raise ValueError(f"{tensor} has no {_words(unknown)}, for which a size is given.")
    if alone := (left - parts) ^ right:
        raise ValueError(
            f"{tensor} has {_words(alone)} on one side only. This is allowed only for factors of "
            "size 1 and, on the left, for factors fixed at an index, such as qkv=(0, 3)."
        )
    for factor, size in fixed.items():
        index, size = size if isinstance(size, tuple) else (0, size)
        if not 0 <= index < size:
            raise ValueError(f"{tensor} fixes {factor} at {index} of {size}.")
    for group in tensor.right:
        if len(unsized := [f for f in group if _given(f, tensor) is None]) > 1:
            raise ValueError(f"{tensor} needs the size of {_words(unsized[:-1])}.")
    if len({*tensor.fields}) < len(tensor.fields) or not all(map(str.isidentifier, tensor.fields)):
        raise ValueError(f"The fields of {tensor.name} must be distinct names, such as {{layer}}.")


def _given(factor: str, tensor: Tensor) -> int | None:
    """Returns the size of a factor of the leaf, if it does not follow from the leaf's shape."""
    if factor.isdecimal():
        return int(factor)
    size = dict(tensor.fixed).get(factor)
    if isinstance(size, tuple):
        return None if factor in it.chain(*tensor.right) else size[1]
    return size


def _words(factors) -> str:
    return " and ".join(f"`{f}`" for f in sorted(factors))


def factor_sizes(tensor: Tensor, leaf_shape: tuple[int, ...]) -> dict[str, int]:
    """Returns the size of each factor for a leaf of this shape.

    **Raises:**

    `ValueError` if the shape does not match the pattern.
    """
    shape = leaf_shape[len(tensor.fields) :]
    sizes = {f: _given(f, tensor) for f in it.chain(*tensor.left, *tensor.right)}
    if len(leaf_shape) != len(tensor.fields) + len(tensor.right):
        raise ValueError(
            f"{tensor} has {len(tensor.fields) + len(tensor.right)} dimensions, but the array has "
            f"shape {leaf_shape}."
        )
    for group, size in zip(tensor.right, shape, strict=True):
        known = prod(sizes[f] or 1 for f in group)
        unsized = [f for f in group if sizes[f] is None]
        if size % known or (not unsized and size != known):
            raise ValueError(
                f"{tensor} has sizes whose product cannot be {size}, as the array's shape "
                f"{leaf_shape} requires: { ({f: sizes[f] for f in group}) }."
            )
        sizes |= dict.fromkeys(unsized, size // known)
    found = {f: size for f, size in sizes.items() if size is not None}
    for f, start in ranges(tensor).items():
        if start + found[f] > (whole := tensor_sizes(tensor, found)[f]):
            raise ValueError(
                f"{tensor} has {whole} of {f}, of which an array of shape {leaf_shape} would hold "
                f"{start} to {start + found[f]}."
            )
    return found


def ranges(tensor: Tensor) -> dict[str, int]:
    """Returns the factors of which the leaf has a range, with its first index."""
    right = {*it.chain(*tensor.right)}
    return {f: at[0] for f, at in tensor.fixed if isinstance(at, tuple) and f in right}


def tensor_sizes(tensor: Tensor, sizes: dict[str, int]) -> dict[str, int]:
    """Returns the size of each factor in the tensor, given the sizes in the leaf."""
    fixed = dict(tensor.fixed)
    totals = {f: at[1] for f in ranges(tensor) if isinstance(at := fixed[f], tuple)}
    return sizes | totals


def tensor_name(tensor: Tensor, index: tuple[int, ...]) -> str:
    """Returns the name of the tensor at an index of a leaf's leading dimensions."""
    each = zip(index, tensor.starts, tensor.numbers, strict=True)
    numbers = [listed[i] if listed else i + start for i, start, listed in each]
    name = re.sub(SOME_LAYERS, "}", tensor.name)
    return name.format(**dict(zip(tensor.fields, numbers, strict=True)))


def tensor_names(tensor: Tensor, leaf_shape: tuple[int, ...]) -> dict[tuple[int, ...], str]:
    """Returns the names of a leaf's tensors, by their index in its leading dimensions."""
    counts = map(range, leaf_shape[: len(tensor.fields)])
    return {index: tensor_name(tensor, index) for index in it.product(*counts)}


def tensor_shape(tensor: Tensor, leaf_shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the shape of each of a leaf's tensors."""
    sizes = tensor_sizes(tensor, factor_sizes(tensor, leaf_shape))
    return tuple(prod(sizes[f] for f in group) for group in tensor.left)
