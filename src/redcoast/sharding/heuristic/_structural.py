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
from ._matrices import NORMS, RECURRENT, layer_of, long_dims, read_tree
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
    shardings, stacks = rules.shardings, tree.stacks
    matrices = tree.matrices
    vocabularies = rules.vocabularies - rules.widths(matrices)
    for block in tree.blocks:
        for leaf in block.node.children.values():
            if isinstance(leaf, Leaf) and leaf.index not in shardings:
                owner, stack = block.node.owner, stacks[leaf.index]
                shardings[leaf.index] = _sharding_of_vector(leaf, owner, stack, vocabularies, n)
    # The factors of LoRA follow their weight, which was sharded as if it were alone.
    for adapter in adapters:
        # Of a quantised weight, the first are its integers.
        weight, *_, a, b = leaves_below(adapter)
        dim = shardings[weight.index].dim
        reason = "LoRA, its matrix is sharded on its other side"
        if dim is None:
            reason = "LoRA, its matrix is replicated over model"
        sharded = _dims_of_lora(adapter, weight, a, b).get(dim, {})
        for leaf in (a, b):
            shardings[leaf.index] = ModelSharding(None, reason)
            stacks[leaf.index] = stacks[weight.index]
            if leaf.index in sharded:
                shardings[leaf.index] = ModelSharding(sharded[leaf.index], "LoRA, like its matrix")
    numbers: set[int] = set()  # arrays that are sharded although they are integers
    for node in quantised:
        codes, scales = leaves_below(node)
        sharding = shardings[codes.index]
        stacks[scales.index] = stacks[codes.index]
        for leaf in (codes, scales):
            numbers.add(leaf.index)
            shardings[leaf.index] = sharding
            # A dimension has fewer scales than numbers, since each is of a block of these.
            if sharding.dim is not None and leaf.shape[sharding.dim] % n:
                reason = indivisible("quantised blocks", leaf.shape[sharding.dim], n)
                shardings[leaf.index] = ModelSharding(None, reason)
    # Of a matrix, its sides may be FSDP-sharded, and not the window of a convolution.
    sides: dict[int, tuple[int, ...]] = {}
    for matrix in matrices:
        sides[matrix.leaf.index] = matrix.ins + matrix.outs
    plans: list[LeafPlan] = []
    for leaf in leaves:
        role = "other"
        spec, reason = P(), Reason("replicated", "integers or keys, not a parameter")
        if is_inexact_leaf(leaf) or leaf.index in numbers:
            role = "parameter"
            stack = stacks[leaf.index]
            free = sides.get(leaf.index, tuple(range(stack, len(leaf.shape))))
            spec, reason = _spec(leaf, shardings[leaf.index], stack, free, axes)
        if leaf.index in overridden:
            spec, reason = overridden[leaf.index], OVERRIDE
        plans.append(LeafPlan(leaf, spec, reason, role))
    return plans


def _spec(
    leaf: Leaf, sharding: ModelSharding, stack: int, free: tuple[int, ...], axes: dict[str, int]
) -> tuple[P, Reason]:
    """The spec and reason of one array: first over `model`, then another dimension over `fsdp`.

    `free` are the dimensions that may be sharded: not stacked layers, nor windows of convolutions.
    """
    fsdp, elements = axes["fsdp"], prod(leaf.shape[stack:])
    # With one device on `model`, no side is sharded.
    if axes["model"] == 1:
        sharding = ModelSharding(None, "")
    fits = [d for d in free if d != sharding.dim and leaf.shape[d] % fsdp == 0]
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
    if sharding.dim is not None:
        entries[sharding.dim] = "model"
        kind = "tensor-parallel"
    return trim_spec(tuple(entries)), Reason(kind, sharding.reason or why)


def _sharding_of_vector(
    leaf: Leaf, owner: PyTree, stack: int, vocabularies: set[int], n: int
) -> ModelSharding:
    """The sharding of an array that no matrix has: of a bias of the logits, or none."""
    # Its gates are stacked in one matrix, and each step needs all of them.
    if isinstance(owner, RECURRENT):
        return ModelSharding(None, "recurrent, every step needs its full output")
    if isinstance(owner, NORMS):
        return ModelSharding(None, "norm scale")
    dims = long_dims(leaf, stack)
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
    sides = [(a, range(stack, len(a.shape) - 1)), (b, range(stack + 1, len(b.shape)))]
    if adapter.owner.outputs_first:
        sides.reverse()
    dims: list[dict[int, int]] = []  # by the dimension of the weight
    for dim in range(stack):  # such as experts, in all three arrays
        dims.append({a.index: dim, b.index: dim})
    for factor, of_side in sides:
        for dim in of_side:
            dims.append({factor.index: dim})
    return dict(enumerate(dims))
