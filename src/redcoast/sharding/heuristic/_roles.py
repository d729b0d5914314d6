"""What every array of a model does, and which of its dimensions the `model` axis splits."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from ..tree._leaves import Leaf, Node, grow
from ._attention import split_attention
from ._chains import is_open, split_alone, split_chains, split_pairs
from ._sides import NORMS, RECURRENT, read_group, settle
from ._splits import Split, Splits, indivisible
from ._stacks import stack_dims
from ._units import Group, Votes, size_votes, units_below
from ._vocabulary import split_heads, split_tables, table_widths, vocabulary_sizes

_NAMES = {"weight", "a", "b"}


@dataclass(frozen=True)
class Adapter:
    """`a` has the inputs of `weight`, and `b` its outputs: which dimension of each is which of the
    weight's. Both have those of a stack first."""

    weight: Leaf
    a: Leaf
    b: Leaf
    of_a: dict[int, int]
    of_b: dict[int, int]


def set_adapters_aside(node: Node) -> tuple[Node, list[Adapter]]:
    """The tree as it would be without adapters, and these."""
    found: list[Adapter] = []
    children: dict[str, Node | Leaf] = {}
    for name, child in node.children.items():
        if not isinstance(child, Node):
            children[name] = child
        elif (adapter := _adapter(child)) is not None:
            children[name] = adapter.weight
            found.append(adapter)
        else:
            children[name], below = set_adapters_aside(child)
            found += below
    return replace(node, children=children), found


def split_adapters(adapters: Iterable[Adapter], splits: Splits) -> Iterator[tuple[int, Split]]:
    """Splits for both parts of each adapter: that side which its matrix is split on."""
    for adapter in adapters:
        dim = splits[adapter.weight.index].dim
        for leaf, dims in ((adapter.a, adapter.of_a), (adapter.b, adapter.of_b)):
            reason = "its matrix is whole" if dim is None else "its matrix' other side is split"
            split = Split(None, f"low-rank adapter: {reason}")
            if dim in dims:
                split = Split(dims[dim], "low-rank adapter, as its matrix")
            yield leaf.index, split


def _adapter(node: Node) -> Adapter | None:
    if set(node.children) != _NAMES:
        return None
    weight, a, b = (node.children[name] for name in ("weight", "a", "b"))
    if not (isinstance(weight, Leaf) and isinstance(a, Leaf) and isinstance(b, Leaf)):
        return None
    stack = len(a.shape) + len(b.shape) - len(weight.shape) - 2
    inputs, outputs = len(a.shape) - stack - 1, len(b.shape) - stack - 1
    if min(stack, inputs - 1, outputs - 1) < 0 or a.shape[-1] != b.shape[stack]:
        return None
    first = outputs if getattr(node.owner, "outputs_first", False) else 0
    second = 0 if first else inputs
    of_stack = {d: d for d in range(stack)}
    of_a = of_stack | {stack + first + i: stack + i for i in range(inputs)}
    of_b = of_stack | {stack + second + i: stack + 1 + i for i in range(outputs)}
    sized = (
        (weight.shape[d], leaf.shape[e])
        for leaf, dims in ((a, of_a), (b, of_b))
        for d, e in dims.items()
    )
    if any(one != other for one, other in sized):
        return None
    return Adapter(weight, a, b, of_a, of_b)


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
