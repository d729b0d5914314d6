"""Low-rank adapters: two small matrices beside a large one, whose product is added to it."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from ..nodes import Leaf, Node
from .splits import Split, Splits

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
