"""Embeddings and language-model heads, split on the vocabulary however they are stored."""

import re

from ._splits import Split, Splits, indivisible
from ._units import Group, Unit, units_below

_SMALL = re.compile(
    r"(^|_)(pos|positions?|positional|time|timesteps?)(_|emb|$)|wpe|(^|_)type(_|$)|segment|relative",
    re.IGNORECASE,
)
_HEAD = re.compile(r"head|logits|vocab|(^|_)(lm|output|decoder|unembed\w*)($|_)", re.IGNORECASE)
_MANY = 8  # a table this many times shorter than the longest is none of words


def split_tables(root: Group, residual: set[int], n: int) -> Splits:
    """Every table of the tree: words on the vocabulary, positions and token types whole."""
    tables = [unit for unit in units_below(root) if unit.kind == "table"]
    longest = max((_rows(unit) for unit in tables if not _is_small(unit)), default=0)
    splits: Splits = {}
    for unit in tables:
        if _is_small(unit) or _rows(unit) * _MANY < longest:
            reason = "table of positions or types, small"
            splits[unit.weight.index] = Split(None, reason, unit.out_size)
        else:
            splits[unit.weight.index] = _vocabulary(unit, _vocabulary_dim(unit, residual), n)
    return splits


def split_heads(root: Group, done: Splits, n: int) -> Splits:
    """Matrices outside the layers that have the vocabulary on one side, and their biases."""
    sizes = vocabulary_sizes(root, done)
    splits: Splits = {}
    for unit in units_below(root):
        if unit.weight.index in done or unit.kind != "linear" or unit.scope:
            continue
        dim = _head_dim(unit, sizes)
        if dim is None:
            continue
        split = splits[unit.weight.index] = _vocabulary(unit, dim, n)
        if unit.bias is not None:
            split_too = split.dim is not None and dim in unit.outs
            last = len(unit.bias.shape) - 1
            splits[unit.bias.index] = Split(last if split_too else None, "follows its matrix")
    return splits


def _head_dim(unit: Unit, sizes: set[int]) -> int | None:
    """Where both sides have the vocabulary's size, only a name makes a matrix a head."""
    dims = [d for d in (*unit.outs, *unit.ins) if unit.weight.shape[d] in sizes]
    if len(dims) == 1 or (dims and _HEAD.search(unit.name)):
        return dims[0]
    return None


def vocabulary_sizes(root: Group, done: Splits) -> set[int]:
    """The sizes of the vocabularies found, split or not."""
    found = set()
    for unit in units_below(root):
        reason = done[unit.weight.index].reason if unit.weight.index in done else ""
        if unit.kind == "table" and reason.startswith("vocabulary"):
            found.add(_rows(unit))
    return found


def table_widths(root: Group, done: Splits) -> set[int]:
    """The sizes of the tables' other dimension."""
    tables = (unit for unit in units_below(root) if unit.kind == "table")
    return {split.outer for unit in tables if (split := done[unit.weight.index]).outer is not None}


def _rows(unit: Unit) -> int:
    return max(unit.weight.shape[d] for d in (*unit.ins, *unit.outs))


def _is_small(unit: Unit) -> bool:
    return any(_SMALL.search(part) for part in unit.weight.path[-3:])


def _vocabulary_dim(unit: Unit, residual: set[int]) -> int:
    first, second = unit.ins[0], unit.outs[0]
    shape = unit.weight.shape
    if shape[first] in residual and shape[second] not in residual:
        return second
    return first


def _vocabulary(unit: Unit, dim: int, n: int) -> Split:
    size = unit.weight.shape[dim]
    outer = unit.in_size if dim in unit.outs else unit.out_size
    if size % n:
        return Split(None, indivisible("vocabulary", size, n), outer)
    return Split(dim, "vocabulary", outer)
