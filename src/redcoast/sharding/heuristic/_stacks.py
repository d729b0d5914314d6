"""Leading dimensions that count stacked (scanned or vmapped) layers."""

import re
from collections.abc import Iterator
from typing import Any

import equinox as eqx

from ..tree._leaves import Leaf, Node, leaves_below

_VECTOR_NAME = re.compile(r"norm|ln|scale|gamma|beta|bias|layernorm|rms", re.IGNORECASE)


def stack_dims(root: Node) -> dict[int, int]:
    """How many leading dimensions of each leaf (by index) count layers."""
    found = dict(_stock(root))
    stacks = {leaf.index: found.get(leaf.index, 0) for leaf in leaves_below(root)}
    for index, depth in _custom(root, 0, found):
        if index not in found:
            stacks[index] = depth
    return stacks


def _stock(node: Node | Leaf) -> Iterator[tuple[int, int]]:
    """Stock layers know the rank of their weights, so more dimensions are a stack."""
    if isinstance(node, Leaf):
        return
    for name, child in node.children.items():
        rank = stock_rank(node.owner, name) if isinstance(child, Leaf) else None
        if rank is not None and isinstance(child, Leaf):
            yield child.index, max(0, len(child.shape) - rank)
        yield from _stock(child)


def stock_rank(owner: Any, name: str) -> int | None:
    """The rank of one layer's array `name` in a stock Equinox layer."""
    nn = eqx.nn
    if name not in ("weight", "bias", "weight_ih", "weight_hh", "bias_n"):
        return None
    if isinstance(owner, (nn.Conv, nn.ConvTranspose)):
        return owner.num_spatial_dims + (2 if name == "weight" else 1)
    if isinstance(owner, (nn.LayerNorm, nn.RMSNorm)):
        return len(owner.shape)
    if isinstance(owner, (nn.GroupNorm, nn.BatchNorm)):
        return 1
    if isinstance(owner, (nn.Linear, nn.Embedding, nn.LSTMCell, nn.GRUCell)):
        return 1 if name.startswith("bias") else 2
    return None


def _custom(node: Node, depth: int, known: dict[int, int]) -> Iterator[tuple[int, int]]:
    """Subtrees whose arrays all share their leading size, the topmost first."""
    if _is_stack(node, depth, known):
        depth += 1
        yield from ((leaf.index, depth) for leaf in leaves_below(node))
    for child in node.children.values():
        if isinstance(child, Node):
            yield from _custom(child, depth, known)


def _is_stack(node: Node, depth: int, known: dict[int, int]) -> bool:
    leaves = list(leaves_below(node))
    if len(leaves) < 2 or node.ordered or any(len(leaf.shape) <= depth for leaf in leaves):
        return False
    if len({leaf.shape[depth] for leaf in leaves}) > 1:
        return False
    stock = [known[leaf.index] for leaf in leaves if leaf.index in known]
    if stock:
        return min(stock) > depth
    return _looks_stacked([(leaf, leaf.shape[depth:]) for leaf in leaves])


def _looks_stacked(leaves: list[tuple[Leaf, tuple[int, ...]]]) -> bool:
    """Matrices of rank 3 or more, with stacked vectors beside them or a size of their own."""
    matrices = [shape for _, shape in leaves if len(shape) > 2]
    vectors = [(leaf, shape) for leaf, shape in leaves if len(shape) == 2]
    if not matrices or len(matrices) + len(vectors) < len(leaves):
        return False
    sizes = {size for shape in matrices for size in shape[1:]}
    if vectors and all(
        shape[1] in sizes or _VECTOR_NAME.search(leaf.name) for leaf, shape in vectors
    ):
        return True
    return all(leaves[0][1][0] not in shape[1:] for _, shape in leaves)
