"""One-line descriptions of how the arrays of a model correspond to published tensors."""

import itertools as it
import re
import string
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

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

    Raises `ValueError` if the name or the pattern is invalid.
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
        # As dataclasses do where they are frozen.
        vars(self).update(name=name, pattern=pattern, fixed=tuple(fixed.items()))
        fields, starts, numbers = [], [], []
        for _, field_name, spec, _ in string.Formatter().parse(name):
            if field_name is None:  # the text behind the last field
                continue
            start = 0
            if match := re.fullmatch(r"(.*)\+(\d+)", field_name):
                field_name, start = match[1], int(match[2])
            fields.append(field_name)
            starts.append(start)
            numbers.append(tuple(map(int, re.findall(r"\d+", spec or ""))))
        vars(self).update(fields=tuple(fields), starts=tuple(starts), numbers=tuple(numbers))
        sides = pattern.split("->")
        if len(sides) != 2:
            raise ValueError(f"{self} must have exactly one `->` between its two sides.")
        vars(self).update(left=_groups(sides[0], self), right=_groups(sides[1], self))
        _check(self)

    def __str__(self) -> str:
        return f"The pattern `{self.pattern}` of {self.name}"


def _groups(side: str, tensor: Tensor) -> Groups:
    """Parses one side of a pattern: the factors of each dimension."""
    groups, counts = [], Counter()
    # Factors in parentheses, or one factor, or any other sign, which is an error.
    for in_parentheses, factor, sign in re.findall(r"\(([\w\s]+)\)|(\w+)|(\S)", side):
        if sign:
            raise ValueError(
                f"{tensor} has {sign!r} where a factor is expected. Write factors as words or "
                "numbers, with the factors of one dimension in parentheses: `(heads head_dim) "
                "width`."
            )
        groups.append(tuple((in_parentheses or factor).split()))
        counts.update(groups[-1])
    # A placeholder, which may stand several times.
    del counts["1"]
    if repeated := {factor for factor, count in counts.items() if count > 1}:
        raise ValueError(f"{tensor} has {_words(repeated)} more than once on one side.")
    invalid: set[str] = set()
    for factor in counts:
        is_size = factor.isdecimal() and factor != "0"
        if not (is_size or factor.isidentifier()):
            invalid.add(factor)
    if invalid:
        raise ValueError(f"{tensor} has {_words(invalid)}, which is neither a name nor a size.")
    return tuple(groups)


def factors_in(groups: Groups) -> list[str]:
    """Returns the factors of all dimensions, in their order."""
    return [*it.chain(*groups)]


def _check(tensor: Tensor) -> None:
    left = {*factors_in(tensor.left)} - {"1"}
    right = {*factors_in(tensor.right)} - {"1"}
    fixed = dict(tensor.fixed)
    # Factors of which the leaf has one index, and thus no dimension.
    indexed: set[str] = set()
    for factor, size in tensor.fixed:
        if isinstance(size, tuple) and factor not in right:
            indexed.add(factor)
    if unknown := fixed.keys() - left - right:
        raise ValueError(f"{tensor} has no {_words(unknown)}, for which a size is given.")
    if one_sided := (left - indexed) ^ right:
        raise ValueError(
            f"{tensor} has {_words(one_sided)} on one side only. This is allowed only for factors "
            "of size 1 and, on the left, for factors fixed at an index, such as qkv=(0, 3)."
        )
    for factor, size in fixed.items():
        index = 0
        if isinstance(size, tuple):
            index, size = size
        if not 0 <= index < size:
            raise ValueError(f"{tensor} fixes {factor} at {index} of {size}.")
    for group in tensor.right:
        # One unknown factor follows from the dimension's size and the known ones.
        unsized = [factor for factor in group if _known_size(factor, tensor) is None]
        if len(unsized) > 1:
            raise ValueError(f"{tensor} needs the size of {_words(unsized[:-1])}.")
    if len({*tensor.fields}) < len(tensor.fields) or not all(map(str.isidentifier, tensor.fields)):
        raise ValueError(f"The fields of {tensor.name} must be distinct names, such as {{layer}}.")


def _known_size(factor: str, tensor: Tensor) -> int | None:
    """Returns the size of a factor of the leaf, if it does not follow from the leaf's shape."""
    if factor.isdecimal():
        return int(factor)
    # The size of a range is that of the leaf's dimension, and not that of the tensor's.
    if factor in ranges(tensor):
        return None
    size = dict(tensor.fixed).get(factor)
    if isinstance(size, tuple):
        return size[1]
    return size


def _words(factors) -> str:
    return " and ".join(f"`{factor}`" for factor in sorted(factors))


def factor_sizes(tensor: Tensor, leaf_shape: tuple[int, ...]) -> dict[str, int]:
    """Returns the size of each factor for a leaf of this shape.

    Raises `ValueError` if the shape does not match the pattern.
    """
    shape = leaf_shape[len(tensor.fields) :]
    sizes = {}
    for factor in factors_in(tensor.left + tensor.right):
        sizes[factor] = _known_size(factor, tensor)
    if len(leaf_shape) != len(tensor.fields) + len(tensor.right):
        raise ValueError(
            f"{tensor} has {len(tensor.fields) + len(tensor.right)} dimensions, but the array has "
            f"shape {leaf_shape}."
        )
    for group, size in zip(tensor.right, shape, strict=True):
        # At most one factor has no size yet: it is what the others leave of the dimension.
        product, unsized = 1, []
        for factor in group:
            if (factor_size := sizes[factor]) is None:
                unsized.append(factor)
            else:
                product *= factor_size
        if size % product or (not unsized and size != product):
            listed = ", ".join(f"{factor}={sizes[factor]}" for factor in group)
            raise ValueError(
                f"{tensor} has sizes whose product cannot be {size}, as the array's shape "
                f"{leaf_shape} requires: {listed}."
            )
        sizes |= dict.fromkeys(unsized, size // product)
    complete = {factor: size for factor, size in sizes.items() if size is not None}
    totals = tensor_sizes(tensor, complete)
    for factor, start in ranges(tensor).items():
        # An array may have a part of a fused tensor, which must not end after the tensor.
        stop = start + complete[factor]
        if stop > totals[factor]:
            raise ValueError(
                f"{tensor} has {totals[factor]} of {factor}, of which an array of shape "
                f"{leaf_shape} would hold {start} to {stop}."
            )
    return complete


def ranges(tensor: Tensor) -> dict[str, int]:
    """Returns the factors of which the leaf has a range, with its first index."""
    right = factors_in(tensor.right)
    first: dict[str, int] = {}
    for factor, size in tensor.fixed:
        if isinstance(size, tuple) and factor in right:
            first[factor], _ = size
    return first


def tensor_sizes(tensor: Tensor, sizes: dict[str, int]) -> dict[str, int]:
    """Returns the size of each factor in the tensor, given the sizes in the leaf."""
    fixed: dict[str, Any] = dict(tensor.fixed)
    totals = dict(sizes)
    for factor in ranges(tensor):
        _, totals[factor] = fixed[factor]
    return totals


def product_of(factors: Iterable[str], sizes: Mapping[str, int]) -> int:
    """Returns the size of a dimension that consists of these factors."""
    return prod(map(sizes.__getitem__, factors))


def tensor_name(tensor: Tensor, index: tuple[int, ...]) -> str:
    """Returns the name of the tensor at an index of a leaf's leading dimensions."""
    numbers = {}
    for i, name in enumerate(tensor.fields):
        numbers[name] = tensor.starts[i] + index[i]
        if tensor.numbers[i]:
            numbers[name] = tensor.numbers[i][index[i]]
    # `format` would read `:0,1,3` as a format, and `layer+1` as a name.
    return re.sub(SOME_LAYERS, "}", tensor.name).format(**numbers)


def tensor_names(tensor: Tensor, leaf_shape: tuple[int, ...]) -> dict[tuple[int, ...], str]:
    """Returns the names of a leaf's tensors, by their index in its leading dimensions."""
    counts = map(range, leaf_shape[: len(tensor.fields)])
    return {index: tensor_name(tensor, index) for index in it.product(*counts)}


def tensor_shape(tensor: Tensor, leaf_shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the shape of each of a leaf's tensors."""
    sizes = tensor_sizes(tensor, factor_sizes(tensor, leaf_shape))
    return tuple(product_of(group, sizes) for group in tensor.left)
