"""Embeddings and language-model heads, split on the vocabulary however they are stored."""

import re

from .splits import Split, Splits, indivisible
from .units import Group, Unit, units_below

_SMALL = re.compile(r"pos|wpe|token_type|segment|type_|relative|time", re.IGNORECASE)
_MANY = 8  # a table this many times shorter than the longest is none of words


def split_tables(root: Group, residual: set[int], n: int) -> Splits:
    """Every table of the tree: words on the vocabulary, positions and token types whole."""
    tables = [unit for unit in units_below(root) if unit.kind == "table"]
    longest = max((_rows(unit) for unit in tables if not _is_small(unit)), default=0)
    splits: Splits = {}
    for unit in tables:
        if _is_small(unit) or _rows(unit) * _MANY < longest:
            splits[unit.weight.index] = Split(None, "table of positions or types, small")
        else:
            splits[unit.weight.index] = _vocabulary(unit, _vocabulary_dim(unit, residual), n)
    return splits


def split_heads(root: Group, done: Splits, n: int) -> Splits:
    """Matrices outside the layers that have the vocabulary on one side, and their biases."""
    sizes = vocabulary_sizes(root, done)
    splits: Splits = {}
    for unit in units_below(root):
        both = {*unit.ins, *unit.outs}
        dims = [d for d in sorted(both) if unit.weight.shape[d] in sizes]
        if unit.weight.index in done or unit.kind != "linear" or unit.scope or len(dims) != 1:
            continue
        split = splits[unit.weight.index] = _vocabulary(unit, dims[0], n)
        if unit.bias is not None and dims[0] in unit.outs:
            last = len(unit.bias.shape) - 1
            dim = None if split.dim is None else last
            splits[unit.bias.index] = Split(dim, "follows its matrix")
    return splits


def vocabulary_sizes(root: Group, done: Splits) -> set[int]:
    """The sizes of the vocabularies found, split or not."""
    found = set()
    for unit in units_below(root):
        reason = done[unit.weight.index].reason if unit.weight.index in done else ""
        if unit.kind == "table" and reason.startswith("vocabulary"):
            found.add(_rows(unit))
    return found


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
    if size % n:
        return Split(None, indivisible("vocabulary", size, n))
    return Split(dim, "vocabulary")
