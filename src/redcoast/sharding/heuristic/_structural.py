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
from ._matrices import read_tree
from ._rules import ModelSharding, indivisible, shard_arrays


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
    shardings, stacks = shard_arrays(tree, n), tree.stacks
    # The factors of LoRA follow their weight, which was sharded as if it were alone.
    for adapter in adapters:
        # Of a quantised weight, the first are its integers.
        weight, *_, a, b = leaves_below(adapter)
        dim, stack = shardings[weight.index].dim, stacks[weight.index]
        sharded: dict[int, int] = {}
        reason = "LoRA, its matrix is replicated over model"
        if dim is not None:
            sharded = _dims_of_factors(adapter, weight, a, b, stack, dim)
            reason = "LoRA, its matrix is sharded on its other side"
        for leaf in (a, b):
            stacks[leaf.index] = stack
            shardings[leaf.index] = ModelSharding(None, reason)
            if leaf.index in sharded:
                shardings[leaf.index] = ModelSharding(sharded[leaf.index], "LoRA, like its matrix")
    numbers: set[int] = set()  # arrays that are sharded although they are integers
    for node in quantised:
        codes, scales = leaves_below(node)
        sharding, stack = shardings[codes.index], stacks[codes.index]
        for leaf in (codes, scales):
            numbers.add(leaf.index)
            stacks[leaf.index] = stack
            shardings[leaf.index] = sharding
            if sharding.dim is None:
                continue
            # A dimension has fewer scales than numbers, since each is of a block of these.
            size = leaf.shape[stack + sharding.dim]
            if size % n:
                shardings[leaf.index] = ModelSharding(
                    None, indivisible("quantised blocks", size, n)
                )
    # Of a matrix, its sides may be FSDP-sharded, and not the window of a convolution.
    sides = {matrix.leaf.index: matrix.ins + matrix.outs for matrix in tree.matrices}
    plans: list[LeafPlan] = []
    for leaf in leaves:
        role = "other"
        spec, reason = P(), Reason("replicated", "integers or keys, not a parameter")
        if is_inexact_leaf(leaf) or leaf.index in numbers:
            role = "parameter"
            stack = stacks[leaf.index]
            shape = leaf.shape[stack:]
            free = sides.get(leaf.index, range(len(shape)))
            entries, reason = _entries(shape, shardings[leaf.index], free, axes)
            spec = trim_spec((*[None] * stack, *entries))
        if leaf.index in overridden:
            spec, reason = overridden[leaf.index], OVERRIDE
        plans.append(LeafPlan(leaf, spec, reason, role))
    return plans


def _entries(
    shape: tuple[int, ...], sharding: ModelSharding, free: Sequence[int], axes: dict[str, int]
) -> tuple[list[str | None], Reason]:
    """The spec of an array of one layer, and its reason: over `model`, and another dimension over
    `fsdp`. `free` are the dimensions that may be sharded."""
    fsdp, elements = axes["fsdp"], prod(shape)
    # With one device on `model`, no side is sharded.
    if axes["model"] == 1:
        sharding = ModelSharding(None, "")
    fits = [d for d in free if d != sharding.dim and shape[d] % fsdp == 0]
    entries: list[str | None] = [None] * len(shape)
    kind = "replicated"
    if fsdp == 1:
        why = "fsdp and model have one device each"
    elif elements < LARGE:
        why = f"small, {elements:,} elements"
    elif not fits:
        why = f"no other dimension is a multiple of fsdp={fsdp}"
    else:
        # The first of the largest.
        largest = max(fits, key=lambda d: (shape[d], -d))
        entries[largest] = "fsdp"
        kind, why = "fsdp", STORED
    if sharding.dim is not None:
        entries[sharding.dim] = "model"
        kind = "tensor-parallel"
    return entries, Reason(kind, sharding.reason or why)


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


def _dims_of_factors(
    adapter: Node, weight: Leaf, a: Leaf, b: Leaf, stack: int, dim: int
) -> dict[int, int]:
    """What dimension `dim` of a weight is in its factors, by their index in the tree.

    Of one layer, `a` is (*experts, *inputs, rank) and `b` (*experts, rank, *outputs).
    """
    experts = len(a.shape) + len(b.shape) - len(weight.shape) - stack - 2
    if dim < experts:  # in all three arrays
        return {a.index: dim, b.index: dim}
    inputs = [(a.index, d) for d in range(experts, len(a.shape) - stack - 1)]
    outputs = [(b.index, d) for d in range(experts + 1, len(b.shape) - stack)]
    sides = inputs + outputs
    if adapter.owner.outputs_first:
        sides = outputs + inputs
    factor, own_dim = sides[dim - experts]
    return {factor: own_dim}
