"""Reads a tree as matrices with an input and an output side, in groups of siblings."""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import equinox as eqx

from ..tree._leaves import Leaf, Node, leaves_below

NORMS = (eqx.nn.LayerNorm, eqx.nn.RMSNorm, eqx.nn.GroupNorm, eqx.nn.BatchNorm)
RECURRENT = (eqx.nn.LSTMCell, eqx.nn.GRUCell)
_CONVOLUTIONS = (eqx.nn.Conv, eqx.nn.ConvTranspose)
_WEIGHTS = ("weight", "kernel", "embedding", "w", "W")
_GENERIC = (*_WEIGHTS, "bias", "b", "scale")
_KERNEL_WIDTH = 16  # the windows of usual convolutions are smaller, and other dimensions larger
_TABLE = re.compile(r"embed|wte|wpe|shared$|vocab|relative|lookup", re.IGNORECASE)
_ROLE = re.compile(
    r"(?:w|to|linear)?_?(?:(?P<query>q|query)|(?P<key>k|key)|(?P<value>v|value)"
    r"|(?P<fused>kv|qkv|query_key_value|c_attn)|(?P<output>o|out|output))"
    r"(?:_?(?:proj|projection|linear|dense|einsum|kernel|weight))*"
    r"|(?P<up>(?:w?_?(?:gate|up|fc_?1|c_fc|fc_?in|wi(?:_\d)?|expand|intermediate)|.*h_to_4h).*)"
    r"|(?P<down>(?:w?_?(?:down|fc_?2|fc_?out|contract)|.*4h_to_h).*)"
)
Sides = tuple[tuple[int, ...], tuple[int, ...]]  # input dimensions, output dimensions


@dataclass(frozen=True)
class WeightMatrix:
    """A weight with its input dimensions `ins`, which are contracted, and output dimensions `outs`.

    `kind` is "linear", "conv" or "table". `stack` is the number of stacked leading dimensions.
    `groups` is the number of groups of a convolution. `sure` is whether the sides are known from a
    module, a name or a bias, not by convention.
    """

    names: tuple[str, ...]
    weight: Leaf
    bias: Leaf | None
    kind: str
    stack: int
    ins: tuple[int, ...]
    outs: tuple[int, ...]
    groups: int = 1
    sure: bool = True

    @property
    def index(self) -> int:
        return self.weight.index

    @property
    def name(self) -> str:
        return "/".join(self.names)

    @property
    def in_size(self) -> int:
        return prod(self.weight.shape[d] for d in self.ins)

    @property
    def out_size(self) -> int:
        return prod(self.weight.shape[d] for d in self.outs)

    @property
    def square(self) -> bool:
        return self.in_size == self.out_size

    @property
    def role(self) -> str | None:
        return role_of(*self.names)


def role_of(*names: str) -> str | None:
    """The role that names specify, in attention ("fused" is several in one) or an MLP."""
    found = (_ROLE.fullmatch(name.lower()) for name in names)
    return next((match.lastgroup for match in found if match), None)


@dataclass(frozen=True)
class Group:
    """The matrices and inner groups of a node, in order, and its other arrays, `loose`."""

    path: tuple[str, ...]
    owner: Any
    ordered: bool
    members: "dict[str, WeightMatrix | Group]"
    loose: list[Leaf]

    def __iter__(self) -> Iterator["Group"]:
        """The inner groups, innermost first, then this one."""
        for member in self.members.values():
            if isinstance(member, Group):
                yield from member
        yield self

    def matrices(self) -> Iterator[WeightMatrix]:
        """All matrices of the group and of inner groups."""
        for member in self.members.values():
            yield from [member] if isinstance(member, WeightMatrix) else member.matrices()

    def near(self) -> list[WeightMatrix | None]:
        """The matrices of the group and of inner groups with one matrix, with relative names.

        An inner group with several matrices is replaced by None.
        """
        near: list[WeightMatrix | None] = []
        for key, member in self.members.items():
            if isinstance(member, WeightMatrix):
                near.append(replace(member, names=(key,)))
            elif below := list(member.matrices()):
                names = (key, *below[0].names)
                near.append(replace(below[0], names=names) if len(below) == 1 else None)
        return near


def stack_dims(node: Node, depth: int = 0) -> dict[int, int]:
    """The number of stacked (scanned or vmapped) leading dimensions of each array, by index."""
    stacks: dict[int, int] = {}
    depth += _is_stacked(node, depth)
    for name, child in node.children.items():
        if isinstance(child, Node):
            stacks |= stack_dims(child, depth)
        else:
            rank = _stock_rank(node.owner, name)
            stacks[child.index] = depth if rank is None else max(0, len(child.shape) - rank)
    return stacks


def _stock_rank(owner: Any, name: str) -> int | None:
    """The rank of the array `name` in a stock Equinox layer, without stacking."""
    vector = name.startswith("bias")
    if isinstance(owner, _CONVOLUTIONS):
        return owner.num_spatial_dims + (1 if vector else 2)
    stock = isinstance(owner, (eqx.nn.Linear, eqx.nn.Embedding, *RECURRENT))
    return (1 if vector else 2) if stock else None


def _is_stacked(node: Node, depth: int) -> bool:
    """Whether arrays with equal leading sizes look like stacked matrices and vectors.

    They do if the matrices, of rank 3 or more, come with stacked vectors, or if the leading size
    does not occur in other dimensions.
    """
    shapes = [leaf.shape[depth:] for leaf in leaves_below(node)]
    if node.ordered or len(shapes) < 2 or len({shape[:1] for shape in shapes}) > 1:
        return False
    vectors = [shape for shape in shapes if len(shape) == 2]
    sizes = {size for shape in shapes if len(shape) > 2 for size in shape[1:]}
    if not sizes or any(len(shape) < 2 for shape in shapes):
        return False
    with_vectors = bool(vectors) and all(size in sizes for _, size in vectors)
    return with_vectors or all(shape[0] not in shape[1:] for shape in shapes)


def layer_of(leaf: Leaf) -> tuple[str, ...]:
    """The repeated layer of an array: its path up to the last number, with numbers replaced."""
    above = leaf.path[: -2 if leaf.path[-1:] and leaf.path[-1] in _GENERIC else -1]
    parts = [re.sub(r"\d+", "*", part) for part in above]
    last = max((i for i, part in enumerate(parts) if "*" in part), default=-1)
    return tuple(parts[: last + 1])


@dataclass(frozen=True)
class Known:
    """Facts on a tree: the numbers of stacked dimensions, and how often sizes occur.

    `sizes` counts, for each repeated layer, the arrays that have a dimension of a size. The most
    frequent one is the width of the residual stream, which every block reads and writes. `layouts`
    is positive for names of arrays that are stored with outputs first, negative with inputs first.
    """

    stacks: dict[int, int]
    sizes: dict[tuple[str, ...], Counter[int]]
    layouts: Counter[str]


def read_tree(root: Node) -> tuple[Group, Known]:
    """The matrices of a tree, with their input and output sides, and what is known of it.

    Matrices whose sides are not known, such as square ones, are oriented like the others. Arrays
    with the same generic name (`weight`) are stored alike, and so are all arrays with other names.
    """
    known = Known(stack_dims(root), {}, Counter())
    for leaf in leaves_below(root):
        sizes = {size for size in leaf.shape[known.stacks[leaf.index] :] if size > 1}
        known.sizes.setdefault(layer_of(leaf), Counter()).update(sizes)
    layouts: Counter[str] = Counter()
    for matrix in _read(root, known).matrices():
        if matrix.kind == "linear" and not matrix.square:
            layouts[_layout(matrix.weight)] += _outputs_first(matrix, known)
    known = replace(known, layouts=layouts)
    return _read(root, known), known


def _layout(weight: Leaf) -> str:
    key = "".join(weight.path[-1:])
    return key if key in _GENERIC else "own name"


def _outputs_first(matrix: WeightMatrix, known: Known) -> int:
    """1 if the output dimension is stored before the input, -1 if after, 0 if unknown."""
    first = matrix.outs < matrix.ins
    if not matrix.sure:
        sizes = known.sizes[layer_of(matrix.weight)]
        reads = sizes[matrix.in_size] - sizes[matrix.out_size]
        if reads == 0 or matrix.role in (None, "output"):
            return 0
        first ^= (reads > 0) == (matrix.role == "down")
    return 1 if first else -1


def _read(node: Node, known: Known) -> Group:
    """The group of a node: its matrices and inner groups, and other arrays."""
    members: dict[str, WeightMatrix | Group | None] = {}
    for name, child in node.children.items():
        if isinstance(child, Node):
            members[name] = _layer(child, known) or _read(child, known)
        elif not isinstance(node.owner, NORMS + RECURRENT):
            members[name] = _matrix((name,), name, child, _bias_of(name, child, node), known)
    own = [member for member in members.values() if isinstance(member, WeightMatrix)]
    # Biases with a dimension of heads look like matrices.
    biases = {matrix.bias.index for matrix in own if matrix.bias is not None}
    kept = {k: m for k, m in members.items() if m and getattr(m, "index", None) not in biases}
    used = [m for m in kept.values() if isinstance(m, WeightMatrix)]
    taken = {leaf.index for m in used for leaf in (m.weight, m.bias) if leaf is not None}
    leaves = [child for child in node.children.values() if isinstance(child, Leaf)]
    loose = [leaf for leaf in leaves if leaf.index not in taken]
    return Group(node.path, node.owner, node.ordered, kept, loose)


def _layer(node: Node, known: Known) -> WeightMatrix | None:
    """The matrix of a stock layer, or of a dict or module with only a weight and a bias."""
    leaves = {name: child for name, child in node.children.items() if isinstance(child, Leaf)}
    key = next((key for key in _WEIGHTS if key in leaves), None)
    if key is None or len(leaves[key].shape) < 2 or isinstance(node.owner, NORMS + RECURRENT):
        return None
    weight, bias, names = leaves[key], leaves.get("bias", leaves.get("b")), node.path[-1:]
    stack, owner = known.stacks[weight.index], node.owner
    if len(node.children) != 1 + (bias is not None):
        return None
    if isinstance(owner, eqx.nn.Embedding):
        return WeightMatrix(names, weight, None, "table", stack, (stack,), (stack + 1,))
    if isinstance(owner, (eqx.nn.Linear, *_CONVOLUTIONS)):
        kind = "linear" if isinstance(owner, eqx.nn.Linear) else "conv"
        groups = getattr(owner, "groups", 1)
        return WeightMatrix(names, weight, bias, kind, stack, (stack + 1,), (stack,), groups)
    return _matrix(names, key, weight, bias, known)


def _bias_of(name: str, weight: Leaf, node: Node) -> Leaf | None:
    """The array that is named like the bias of `name`, or is the next in a list, and fits it."""
    names = list(node.children)
    following = names[names.index(name) + 1 :][:1] if node.ordered else []
    like = (re.sub("weight|kernel", "bias", name), re.sub("^[wW]", "b", name), f"{name}_bias")
    found = (node.children.get(candidate) for candidate in (*like, *following))
    for bias in (one for one in found if isinstance(one, Leaf)):
        if 0 < len(bias.shape) < len(weight.shape) and bias.shape[-1] in weight.shape:
            return bias
    return None


def _matrix(
    names: tuple[str, ...], key: str, weight: Leaf, bias: Leaf | None, known: Known
) -> WeightMatrix | None:
    """Returns an array with the name `key` as a matrix, or None if it is not one."""
    stack, shape, sure = known.stacks[weight.index], weight.shape, True
    dims = [d for d in range(stack, len(shape)) if shape[d] > 1]
    if sides := _channels(key, shape, stack):
        return WeightMatrix(names, weight, bias, "conv", stack, *sides)
    if len(dims) == 3:
        sides = _sides_with_heads(names[-1], weight, dims, known)
        return WeightMatrix(names, weight, bias, "linear", stack, *sides)
    if len(dims) != 2:
        return None
    first, last = dims
    if bias is None and (key == "embedding" or _TABLE.search("/".join(names))):
        return WeightMatrix(names, weight, None, "table", stack, (first,), (last,))
    outputs_first = key.lower().endswith("weight")  # as in PyTorch
    if bias is not None and shape[first] != shape[last]:
        outputs_first = bias.shape[-1:] == (shape[first],)
    elif key != "kernel":
        sure, layout = False, known.layouts[_layout(weight)]
        outputs_first = layout > 0 if layout else outputs_first
    ins, outs = (last, first) if outputs_first else (first, last)
    return WeightMatrix(names, weight, bias, "linear", stack, (ins,), (outs,), sure=sure)


def _channels(key: str, shape: tuple[int, ...], stack: int) -> Sides | None:
    """The channels of a convolution. Flax stores the window first, PyTorch last."""
    rank = len(shape) - stack
    if not 3 <= rank <= 5 or key not in ("kernel", "weight"):
        return None
    ins, outs = (len(shape) - 2, len(shape) - 1) if key == "kernel" else (stack + 1, stack)
    width = max(shape[d] for d in range(stack, len(shape)) if d not in (ins, outs))
    narrow = rank > 3 or width < min(shape[outs], max(shape[ins], 2))
    return ((ins,), (outs,)) if narrow and width <= _KERNEL_WIDTH else None


def _sides_with_heads(name: str, weight: Leaf, dims: list[int], known: Known) -> Sides:
    """The sides of a query, key or value (width, heads, head size), or output (reversed)."""
    count = lambda d: known.sizes[layer_of(weight)][weight.shape[d]]
    width = max(dims, key=count)
    if role_of(name) == "output" and count(dims[-1]) == count(width):
        width = dims[-1]
    rest = tuple(d for d in dims if d != width)
    return (rest, (width,)) if width == dims[-1] else ((width,), rest)
