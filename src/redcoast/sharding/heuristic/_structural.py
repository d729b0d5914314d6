"""Plans a tree by its structure alone. Imported only when needed."""

import re
from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Any

from jax.sharding import PartitionSpec as P

from ...core._low_rank import AbstractLowRank
from ..tree._leaves import LARGE, Leaf, Node, flat_leaves, is_inexact_leaf, leaves_below, to_nodes
from ..tree._overrides import Override, apply_overrides
from ..tree._plan_rows import OVERRIDE, STORED, Reason, Row, trim_spec
from ._matrices import NORMS, RECURRENT, read_tree
from ._rules import Split, Splits, indivisible, shard_matrices, vocabularies

_NORM = re.compile(r"norm|ln|scale|gamma|beta|rms|batch_?stat|(^|_)bn", re.IGNORECASE)
_BIAS = re.compile(r"bias|^b$", re.IGNORECASE)


def structural_rows(model: Any, axes: dict[str, int], overrides: Sequence[Override]) -> list[Row]:
    """Returns a row for each array of a model, by the rules on the structure of the tree."""
    leaves = flat_leaves(model)
    given = apply_overrides(leaves, overrides, axes)
    splits, stacks, sides = _find_splits(model, axes["model"])
    rows = []
    for leaf in leaves:
        stack = stacks[leaf.index]
        free = sides.get(leaf.index, tuple(range(stack, len(leaf.shape))))
        if leaf.index in given:
            spec, reason = given[leaf.index], OVERRIDE
        elif is_inexact_leaf(leaf):
            spec, reason = _spec(leaf, splits[leaf.index], stack, free, axes)
        else:
            spec, reason = P(), Reason("replicated", "integers or keys, not a parameter")
        rows.append(Row(leaf, spec, reason, "parameter" if is_inexact_leaf(leaf) else "other"))
    return rows


def _spec(
    leaf: Leaf, split: Split, stack: int, free: tuple[int, ...], axes: dict[str, int]
) -> tuple[P, Reason]:
    """The spec and reason of one array: first over `model`, then another dimension over `fsdp`.

    `free` are the dimensions that may be sharded: not stacked layers, nor windows of convolutions.
    """
    if axes["model"] == 1:
        split = Split(None, "")
    elements, stored, why = prod(leaf.shape[stack:]), None, "fsdp and model have one device each"
    if axes["fsdp"] > 1:
        fits = [d for d in free if d != split.dim and leaf.shape[d] % axes["fsdp"] == 0]
        if elements >= LARGE:
            stored = max(fits, key=lambda d: (leaf.shape[d], -d), default=None)
        why = f"no other dimension is a multiple of fsdp={axes['fsdp']}"
        why = why if elements >= LARGE else f"small, {elements:,} elements"
    names = {split.dim: "model", stored: "fsdp"}
    spec = trim_spec(tuple(names.get(d) for d in range(len(leaf.shape))))
    if split.dim is not None:
        return spec, Reason("tensor-parallel", split.reason)
    if stored is not None:
        return spec, Reason("fsdp", split.reason or STORED)
    return spec, Reason("replicated", split.reason or why)


def _find_splits(tree: Any, n: int) -> tuple[Splits, dict[int, int], dict[int, tuple[int, ...]]]:
    """For each array, its split over `n` devices, number of stacked dimensions and matrix sides."""
    layers: list[Node] = []
    group, known = read_tree(_without_lora(to_nodes(tree), layers))
    stacks = dict(known.stacks)
    splits = shard_matrices(group, known, n)
    sizes = vocabularies(splits)
    for part in group:
        for leaf in part.loose:
            splits.setdefault(leaf.index, _loose(leaf, part.owner, stacks[leaf.index], sizes, n))
    for layer in layers:
        weight, a, b = leaves_below(layer)
        splits |= _shard_lora(layer, splits[weight.index])
        stacks |= dict.fromkeys((a.index, b.index), stacks[weight.index])
    sides = {matrix.index: matrix.ins + matrix.outs for matrix in group.matrices()}
    return splits, stacks, sides


def _loose(leaf: Leaf, owner: Any, stack: int, vocabularies: set[int], n: int) -> Split:
    """The split of an array that is not in a matrix: a bias of the logits, or none."""
    if isinstance(owner, RECURRENT):
        return Split(None, "recurrent, every step needs its full output")
    dims = [d for d in range(stack, len(leaf.shape)) if leaf.shape[d] > 1]
    if len(dims) == 1 and not stack and _BIAS.search("".join(leaf.path[-1:])):
        size = leaf.shape[dims[0]]
        if size in vocabularies and size % n:
            return Split(None, indivisible("vocabulary", size, n))
        if size in vocabularies:
            return Split(dims[0], "bias of the vocabulary")
    if isinstance(owner, NORMS):
        return Split(None, "norm scale")
    if len(dims) != 1:
        return Split(None, "not recognised as a matrix" if dims else "scalar")
    return Split(None, "norm scale" if any(map(_NORM.search, leaf.path[-2:])) else "vector")


def _without_lora(node: Node, layers: list[Node]) -> Node:
    """Returns the tree with each LoRA layer replaced by its weight, and appends it to `layers`."""
    children: dict[str, Node | Leaf] = {}
    for name, child in node.children.items():
        if isinstance(child, Node):
            lora = isinstance(child.owner, AbstractLowRank)
            layers += [child] if lora else []
            child = child.children["weight"] if lora else _without_lora(child, layers)
        children[name] = child
    return replace(node, children=children)


def _shard_lora(layer: Node, split: Split) -> Splits:
    """Shards `a`, which has the inputs of the weight, or `b`, which has its outputs, like it."""
    weight, a, b = leaves_below(layer)
    stack = len(a.shape) + len(b.shape) - len(weight.shape) - 2
    inputs, outputs = len(a.shape) - stack - 1, len(b.shape) - stack - 1
    first = layer.owner.outputs_first
    of_a = {stack + d + first * outputs: stack + d for d in range(inputs)}
    of_b = {stack + d + (not first) * inputs: stack + 1 + d for d in range(outputs)}
    stacked = {d: d for d in range(stack)}  # such as experts, in all three arrays
    other = "is replicated over model" if split.dim is None else "is sharded on its other side"
    splits = {leaf.index: Split(None, f"LoRA, its matrix {other}") for leaf in (a, b)}
    for leaf, dims in ((a, stacked | of_a), (b, stacked | of_b)):
        if split.dim is not None and split.dim in dims:
            splits[leaf.index] = Split(dims[split.dim], "LoRA, like its matrix")
    return splits
