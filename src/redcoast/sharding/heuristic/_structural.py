"""Plans a tree by its structure alone. Imported only when needed."""

from collections.abc import Sequence
from dataclasses import replace
from math import prod

from jax.sharding import PartitionSpec as P
from jaxtyping import PyTree

from ...core._low_rank import AbstractLowRank, AbstractQuantised
from ..tree._leaf_plans import OVERRIDE, STORED, LeafPlan, Reason, trim_spec
from ..tree._leaves import LARGE, Leaf, Node, flat_leaves, is_inexact_leaf, leaves_below, to_nodes
from ..tree._overrides import Override, apply_overrides
from ._matrices import NORMS, RECURRENT, layer_of, read_tree
from ._rules import ModelSharding, Rules, indivisible


def structural_plans(
    model: PyTree, axes: dict[str, int], overrides: Sequence[Override]
) -> list[LeafPlan]:
    """Returns the plan of each array of a model, by the rules on the structure of the tree."""
    leaves = flat_leaves(model)
    overridden = apply_overrides(leaves, overrides, axes)
    n = axes["model"]
    adapters: list[Node] = []
    quantised: list[Node] = []
    tree = read_tree(_only_weights(to_nodes(model), adapters, quantised))
    rules = Rules(tree, n)
    rules.shard_tree()
    splits, stacks = rules.splits, tree.stacks
    matrices = tree.matrices
    vocabularies = rules.vocabularies - rules.widths(matrices)
    for block in tree.blocks:
        for leaf in block.node.children.values():
            if isinstance(leaf, Leaf) and leaf.index not in splits:
                owner, stack = block.node.owner, stacks[leaf.index]
                splits[leaf.index] = _split_of_loose(leaf, owner, stack, vocabularies, n)
    # The factors of LoRA follow their weight, which was sharded as if it were alone.
    for adapter in adapters:
        # Of a quantised weight, the first are its integers.
        weight, *_, a, b = leaves_below(adapter)
        dim = splits[weight.index].dim
        reason = "LoRA, its matrix is sharded on its other side"
        if dim is None:
            reason = "LoRA, its matrix is replicated over model"
        sharded = _dims_of_lora(adapter, weight, a, b).get(dim, {})
        for leaf in (a, b):
            splits[leaf.index] = ModelSharding(None, reason)
            stacks[leaf.index] = stacks[weight.index]
            if leaf.index in sharded:
                splits[leaf.index] = ModelSharding(sharded[leaf.index], "LoRA, like its matrix")
    numbers: set[int] = set()  # arrays that are sharded although they are integers
    for node in quantised:
        codes, scales = leaves_below(node)
        split = splits[codes.index]
        stacks[scales.index] = stacks[codes.index]
        for leaf in (codes, scales):
            numbers.add(leaf.index)
            splits[leaf.index] = split
            # A dimension has fewer scales than numbers, since each is of a block of these.
            if split.dim is not None and leaf.shape[split.dim] % n:
                reason = indivisible("quantised blocks", leaf.shape[split.dim], n)
                splits[leaf.index] = ModelSharding(None, reason)
    # Of a matrix, its sides may be FSDP-sharded, and not the window of a convolution.
    sides = {matrix.leaf.index: matrix.ins + matrix.outs for matrix in matrices}
    plans: list[LeafPlan] = []
    for leaf in leaves:
        role = "other"
        spec, reason = P(), Reason("replicated", "integers or keys, not a parameter")
        if is_inexact_leaf(leaf) or leaf.index in numbers:
            role = "parameter"
            stack = stacks[leaf.index]
            free = sides.get(leaf.index, tuple(range(stack, len(leaf.shape))))
            spec, reason = _spec(leaf, splits[leaf.index], stack, free, axes)
        if leaf.index in overridden:
            spec, reason = overridden[leaf.index], OVERRIDE
        plans.append(LeafPlan(leaf, spec, reason, role))
    return plans


def _spec(
    leaf: Leaf, split: ModelSharding, stack: int, free: tuple[int, ...], axes: dict[str, int]
) -> tuple[P, Reason]:
    """The spec and reason of one array: first over `model`, then another dimension over `fsdp`.

    `free` are the dimensions that may be sharded: not stacked layers, nor windows of convolutions.
    """
    fsdp, elements = axes["fsdp"], prod(leaf.shape[stack:])
    # With one device on `model`, no side is sharded.
    if axes["model"] == 1:
        split = ModelSharding(None, "")
    fits = [d for d in free if d != split.dim and leaf.shape[d] % fsdp == 0]
    entries: list[str | None] = [None] * len(leaf.shape)
    kind = "replicated"
    if fsdp == 1:
        why = "fsdp and model have one device each"
    elif elements < LARGE:
        why = f"small, {elements:,} elements"
    elif not fits:
        why = f"no other dimension is a multiple of fsdp={fsdp}"
    else:
        # The first of the largest.
        largest = max(fits, key=lambda d: (leaf.shape[d], -d))
        entries[largest] = "fsdp"
        kind, why = "fsdp", STORED
    if split.dim is not None:
        entries[split.dim] = "model"
        kind = "tensor-parallel"
    return trim_spec(tuple(entries)), Reason(kind, split.reason or why)


def _split_of_loose(
    leaf: Leaf, owner: PyTree, stack: int, vocabularies: set[int], n: int
) -> ModelSharding:
    """The split of an array that is not in a matrix: a bias of the logits, or none."""
    # Its gates are stacked in one matrix, and each step needs all of them.
    if isinstance(owner, RECURRENT):
        return ModelSharding(None, "recurrent, every step needs its full output")
    if isinstance(owner, NORMS):
        return ModelSharding(None, "norm scale")
    dims = [d for d in range(stack, len(leaf.shape)) if leaf.shape[d] > 1]
    if not dims:
        return ModelSharding(None, "scalar")
    if len(dims) > 1:
        return ModelSharding(None, "not recognised as a matrix")
    size = leaf.shape[dims[0]]
    if stack or layer_of(leaf) or size not in vocabularies:
        return ModelSharding(None, "vector")
    if size % n:
        return ModelSharding(None, indivisible("vocabulary", size, n))
    return ModelSharding(dims[0], "bias of the vocabulary")


def _only_weights(node: Node, adapters: list[Node], quantised: list[Node]) -> Node:
    """The tree with weights in place of LoRA layers and of quantised weights, which are appended to
    `adapters` and `quantised`."""
    children: dict[str, Node | Leaf] = {}
    for name, child in node.children.items():
        if isinstance(child, Node) and isinstance(child.owner, AbstractLowRank):
            adapters.append(child)
            child = child.children["weight"]
        if isinstance(child, Node) and isinstance(child.owner, AbstractQuantised):
            quantised.append(child)
            codes = next(leaves_below(child))
            child = replace(codes, shape=child.owner.shape)
        elif isinstance(child, Node):
            child = _only_weights(child, adapters, quantised)
        children[name] = child
    return replace(node, children=children)


def _dims_of_lora(
    adapter: Node, weight: Leaf, a: Leaf, b: Leaf
) -> dict[int | None, dict[int, int]]:
    """For each dimension of a weight, those of its factors, by their index in the tree.

    `a` is (*stack, *inputs, rank) and `b` (*stack, rank, *outputs).
    """
    stack = len(a.shape) + len(b.shape) - len(weight.shape) - 2
    inputs = [{a.index: dim} for dim in range(stack, len(a.shape) - 1)]
    outputs = [{b.index: dim} for dim in range(stack + 1, len(b.shape))]
    if adapter.owner.outputs_first:
        inputs, outputs = outputs, inputs
    # Such as experts, in all three arrays.
    stacked = [{a.index: dim, b.index: dim} for dim in range(stack)]
    return dict(enumerate([*stacked, *inputs, *outputs]))
