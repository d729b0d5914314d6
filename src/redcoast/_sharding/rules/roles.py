"""What every array of a model does, and which of its dimensions the `model` axis splits."""

import re
from dataclasses import dataclass

from ..nodes import Leaf, grow
from .adapters import set_adapters_aside, split_adapters
from .attention import split_attention
from .chains import is_open, split_alone, split_chains, split_pairs
from .convention import settle
from .reading import NORMS, RECURRENT, read_group
from .splits import Split, Splits, indivisible
from .stacks import stack_dims
from .units import Group, Votes, size_votes, units_below
from .vocabulary import split_heads, split_tables, table_widths, vocabulary_sizes

_NORM = re.compile(r"norm|ln|scale|gamma|beta|rms|batch_?stat|(^|_)bn", re.IGNORECASE)
_BIAS = re.compile(r"bias|^b$", re.IGNORECASE)


@dataclass(frozen=True)
class Roles:
    """For each leaf (by index): its split over `model`, and how many dimensions count layers.

    `fixed` are the dimensions that are never split: stacked layers and windows of convolutions.
    """

    splits: Splits
    stacks: dict[int, int]
    fixed: dict[int, frozenset[int]]


def find_roles(tree: object, n: int) -> Roles:
    """The roles of the arrays of `tree` when the `model` axis has `n` devices."""
    root, adapters = set_adapters_aside(grow(tree))
    stacks = stack_dims(root)
    votes = size_votes(root, stacks)
    group = settle(read_group(root, stacks, votes), votes)
    splits = _split_units(group, votes, n)
    for part in group:
        for leaf in part.loose:
            reason = _loose_reason(leaf, part.owner, stacks[leaf.index])
            splits.setdefault(leaf.index, Split(None, reason))
    splits |= _vocabulary_biases(group, splits, stacks, n)
    splits |= dict(split_adapters(adapters, splits))
    for adapter in adapters:
        stacks |= dict.fromkeys((adapter.a.index, adapter.b.index), stacks[adapter.weight.index])
    fixed = {i: frozenset(range(depth)) for i, depth in stacks.items()}
    for unit in units_below(group):
        fixed[unit.weight.index] |= frozenset(unit.spatial)
    return Roles(splits, stacks, fixed)


def _split_units(group: Group, votes: Votes, n: int) -> Splits:
    """Attention and pairs first: they tell which widths are the residual stream's."""
    parents = {id(m): g for g in group for m in g.members.values() if isinstance(m, Group)}
    clear: Splits = {}
    for part in group:
        clear |= split_attention(part, parents.get(id(part)), clear, n)
    done = dict(clear)
    for part in group:
        done |= split_chains(part, done, set(), n) if part.ordered else {}
    done |= split_tables(group, _residual(group, clear), n)
    widths = table_widths(group, done)
    for part in group:
        found = split_pairs(part, done, _residual(part, clear) | widths, votes, n)
        clear, done = clear | found, done | found
    done |= split_heads(group, done, n)
    return _split_rest(group, done, _residual(group, clear) | widths, n)


def _split_rest(group: Group, done: Splits, residual: set[int], n: int) -> Splits:
    """Chains among the fields of modules and dicts, and what stands alone."""
    done = dict(done)
    for part in group:
        done |= split_chains(part, done, residual, n)
    residual = residual | _residual(group, done)
    for unit in units_below(group):
        if is_open(unit, done):
            done |= split_alone(unit, residual, n)
    return done


def _residual(group: Group, done: Splits) -> set[int]:
    """The sizes that the matrices found so far read, or write, whole."""
    splits = (done.get(unit.weight.index) for unit in units_below(group))
    return {split.outer for split in splits if split is not None and split.outer is not None}


def _vocabulary_biases(group: Group, done: Splits, stacks: dict[int, int], n: int) -> Splits:
    """Biases of the logits that stand beside no matrix of theirs."""
    sizes = vocabulary_sizes(group, done)
    splits: Splits = {}
    for part in group:
        for leaf in part.loose:
            if not _BIAS.search("/".join(leaf.path[-1:])) or isinstance(part.owner, RECURRENT):
                continue
            dims = [d for d in range(len(leaf.shape)) if leaf.shape[d] > 1]
            if len(dims) == 1 and leaf.shape[dims[0]] in sizes and not stacks[leaf.index]:
                size = leaf.shape[dims[0]]
                bad = size % n
                reason = indivisible("vocabulary", size, n) if bad else "bias of the vocabulary"
                splits[leaf.index] = Split(None if bad else dims[0], reason)
    return splits


def _loose_reason(leaf: Leaf, owner: object, stack: int) -> str:
    if isinstance(owner, RECURRENT):
        return "recurrent: its output is needed whole at every step"
    if isinstance(owner, NORMS):
        return "norm scale"
    rank = sum(size > 1 for size in leaf.shape[stack:])
    if rank > 1:
        return "not recognised as a matrix"
    if rank == 0:
        return "scalar"
    return "norm scale" if any(map(_NORM.search, leaf.path[-2:])) else "vector"
