"""Reads a tree as blocks of matrices, each with an input and an output side."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Literal

import equinox as eqx
from jaxtyping import PyTree

from ..tree._leaves import Leaf, Node, leaves_below

NORMS = (eqx.nn.LayerNorm, eqx.nn.RMSNorm, eqx.nn.GroupNorm, eqx.nn.BatchNorm)
RECURRENT = (eqx.nn.LSTMCell, eqx.nn.GRUCell)
_CONVOLUTIONS = (eqx.nn.Conv, eqx.nn.ConvTranspose)
_WEIGHTS = ("weight", "kernel", "embedding", "w", "W")
_GENERIC = (*_WEIGHTS, "bias", "b", "scale")
_KERNEL_WIDTH = 16  # the windows of usual convolutions are smaller, and other dimensions larger
_TABLE = re.compile(r"embed|wte|wpe|shared$|vocab|relative|lookup", re.IGNORECASE)
# Names decide where shapes do not, as in attention with four square matrices.
_ROLE = re.compile(
    r"(?:w|to|linear)?_?(?:(?P<query>q|query)|(?P<key>k|key)|(?P<value>v|value)"
    r"|(?P<fused>kv|qkv|query_key_value|c_attn)|(?P<output>o|out|output))"
    r"(?:_?(?:proj|projection|linear|dense|einsum|kernel|weight))*"
    r"|(?P<up>(?:w?_?(?:gate|up|fc_?1|c_fc|fc_?in|wi(?:_\d)?|expand|intermediate)|.*h_to_4h).*)"
    r"|(?P<down>(?:w?_?(?:down|fc_?2|fc_?out|contract)|.*4h_to_h).*)"
)
Dimensions = tuple[int, ...]


@dataclass(frozen=True)
class WeightMatrix:
    """A weight with its input dimensions `ins`, which are contracted, and output dimensions `outs`.

    `names` is its path in its block. `stack` is the number of stacked leading dimensions, and
    `groups` that of the groups of a convolution. `is_oriented` is whether a module, a bias or a
    name tells the sides; otherwise `orient` chooses them.
    """

    names: tuple[str, ...]
    weight: Leaf
    bias: Leaf | None
    kind: Literal["linear", "conv", "table"]
    stack: int
    ins: Dimensions
    outs: Dimensions
    groups: int = 1
    is_oriented: bool = True

    @property
    def index(self) -> int:
        return self.weight.index

    @property
    def name(self) -> str:
        return "/".join(self.names)

    @property
    def in_size(self) -> int:
        return self._size(self.ins)

    @property
    def out_size(self) -> int:
        return self._size(self.outs)

    def _size(self, dims: Dimensions) -> int:
        return prod(map(self.weight.shape.__getitem__, dims))

    @property
    def is_square(self) -> bool:
        return self.in_size == self.out_size

    @property
    def role(self) -> str | None:
        return role_of(*self.names)


def role_of(*names: str) -> str | None:
    """The role that names specify, in attention ("fused" is several in one) or an MLP."""
    for name in names:
        match = _ROLE.fullmatch(name.lower())
        if match is not None:
            return match.lastgroup
    return None


@dataclass(frozen=True)
class Block:
    """A node of the tree as matrices.

    `near` are its matrices in order, with None in place of each inner node that has several of its
    own. `below` are all matrices of the node and of inner ones. `loose` are its other arrays.
    """

    path: tuple[str, ...]
    owner: PyTree
    is_ordered: bool
    near: list[WeightMatrix | None] = field(default_factory=list)
    below: list[WeightMatrix] = field(default_factory=list)
    loose: list[Leaf] = field(default_factory=list)


@dataclass(frozen=True)
class SizeCounts:
    """How many leading dimensions of arrays are stacked, and how often sizes occur.

    `by_layer` counts, for each repeated layer, the arrays with a dimension of a size. The most
    frequent one is the width of the residual stream, which every block reads and writes.
    """

    stacks: dict[int, int]
    by_layer: dict[tuple[str, ...], Counter[int]]

    def count(self, leaf: Leaf, size: int) -> int:
        """How many arrays of the layer of `leaf` have a dimension of this size."""
        return self.by_layer[layer_of(leaf)][size]


def read_tree(root: Node) -> tuple[list[Block], SizeCounts]:
    """The blocks of a tree, inner ones first, so that the last one is the tree itself."""
    sizes = SizeCounts(_stacked_dimensions(root, 0), {})
    # Sizes are counted for each layer: an encoder and a decoder may have different widths.
    for leaf in leaves_below(root):
        unstacked = set(leaf.shape[sizes.stacks[leaf.index] :])
        counter = sizes.by_layer.setdefault(layer_of(leaf), Counter())
        counter.update(unstacked - {0, 1})
    blocks: list[Block] = []
    _read(root, sizes, blocks)
    return _orient(blocks, sizes), sizes


def layer_of(leaf: Leaf) -> tuple[str, ...]:
    """The repeated layer of an array: its path up to the last number, with numbers replaced."""
    above = leaf.path[:-1]
    if leaf.path[-1:] and leaf.path[-1] in _GENERIC:
        above = leaf.path[:-2]
    while above and not re.search(r"\d", above[-1]):
        above = above[:-1]
    return tuple(re.sub(r"\d+", "*", part) for part in above)


def _stacked_dimensions(node: Node, depth: int) -> dict[int, int]:
    """The number of stacked (scanned or vmapped) leading dimensions of each array, by index."""
    stacks: dict[int, int] = {}
    depth += _is_stacked(node, depth)
    for name, child in node.children.items():
        if isinstance(child, Node):
            stacks |= _stacked_dimensions(child, depth)
            continue
        rank = _rank_in_stock_layer(node.owner, name)
        stacks[child.index] = depth
        if rank is not None:
            stacks[child.index] = max(0, len(child.shape) - rank)
    return stacks


def _rank_in_stock_layer(owner: PyTree, name: str) -> int | None:
    """The rank of the array `name` in a stock Equinox layer, without stacking."""
    is_vector = name.startswith("bias")
    if isinstance(owner, _CONVOLUTIONS):
        return owner.num_spatial_dims + 2 - is_vector
    if isinstance(owner, (eqx.nn.Linear, eqx.nn.Embedding, *RECURRENT)):
        return 2 - is_vector
    return None


def _is_stacked(node: Node, depth: int) -> bool:
    """Whether arrays with equal leading sizes look like stacked matrices and vectors.

    They do if the matrices, of rank 3 or more, come with stacked vectors, or if the leading size
    does not occur in other dimensions.
    """
    shapes = [leaf.shape[depth:] for leaf in leaves_below(node)]
    leading = {shape[:1] for shape in shapes}
    # A list of layers is not a stack of them.
    if node.ordered or len(shapes) < 2 or len(leading) > 1:
        return False
    if min(map(len, shapes)) < 2 or max(map(len, shapes)) < 3:
        return False
    # The sizes of the matrices and of the vectors, without the leading dimension.
    of_matrices: set[int] = set()
    of_vectors: set[int] = set()
    for shape in shapes:
        if len(shape) == 2:
            of_vectors.add(shape[1])
        else:
            of_matrices.update(shape[1:])
    if of_vectors and of_vectors <= of_matrices:
        return True
    (size,) = leading.pop()
    return size not in of_matrices | of_vectors


def _read(node: Node, sizes: SizeCounts, blocks: list[Block]) -> list[WeightMatrix]:
    """Appends the blocks of a node, inner ones first, and returns all of its matrices."""
    block = Block(node.path, node.owner, node.ordered)
    matrices = _matrices_of_arrays(node, sizes)
    for name, child in node.children.items():
        matrix, inner = matrices.get(name), list[WeightMatrix]()
        if isinstance(child, Node):
            matrix = _layer(child, sizes)
            if matrix is None:
                inner = _read(child, sizes, blocks)
        if matrix is not None:
            inner = [matrix]
        block.below.extend(inner)
        if len(inner) == 1:
            # The path of a matrix in an inner node of its own begins with that node.
            names = inner[0].names
            if names != (name,):
                names = (name, *names)
            block.near.append(replace(inner[0], names=names))
        elif inner:
            block.near.append(None)
    in_matrices: set[int] = set()
    for matrix in matrices.values():
        in_matrices.add(matrix.index)
        if matrix.bias is not None:
            in_matrices.add(matrix.bias.index)
    for child in node.children.values():
        if isinstance(child, Leaf) and child.index not in in_matrices:
            block.loose.append(child)
    blocks.append(block)
    return block.below


def _matrices_of_arrays(node: Node, sizes: SizeCounts) -> dict[str, WeightMatrix]:
    """The arrays of a node itself that are matrices."""
    if isinstance(node.owner, NORMS + RECURRENT):
        return {}
    matrices: dict[str, WeightMatrix] = {}
    for name, child in node.children.items():
        if isinstance(child, Leaf):
            matrix = _matrix((name,), child, _bias_of(name, child, node), sizes)
            if matrix is not None:
                matrices[name] = matrix
    # Biases with a dimension of heads look like matrices.
    for matrix in list(matrices.values()):
        if matrix.bias is not None:
            matrices.pop(matrix.bias.path[-1], None)
    return matrices


def _layer(node: Node, sizes: SizeCounts) -> WeightMatrix | None:
    """The matrix of a stock layer, or of a dict or module with only a weight and a bias."""
    owner, names = node.owner, node.path[-1:]
    key, weight = _first_leaf(node, _WEIGHTS)
    _, bias = _first_leaf(node, ("bias", "b"))
    if weight is None or isinstance(owner, NORMS + RECURRENT):
        return None
    has_others = len(node.children) != 1 + (bias is not None)
    if len(weight.shape) < 2 or has_others:
        return None
    stack = sizes.stacks[weight.index]
    if isinstance(owner, eqx.nn.Embedding):
        return WeightMatrix(names, weight, None, "table", stack, ins=(stack,), outs=(stack + 1,))
    if isinstance(owner, eqx.nn.Linear):
        return WeightMatrix(names, weight, bias, "linear", stack, ins=(stack + 1,), outs=(stack,))
    if isinstance(owner, _CONVOLUTIONS):
        return WeightMatrix(
            names, weight, bias, "conv", stack, (stack + 1,), (stack,), owner.groups
        )
    return _matrix((*names, key), weight, bias, sizes, named_by_node=True)


def _first_leaf(node: Node, names: Sequence[str]) -> tuple[str, Leaf | None]:
    """The first array of a node that has one of some names."""
    for name in names:
        child = node.children.get(name)
        if isinstance(child, Leaf):
            return name, child
    return "", None


def _bias_of(name: str, weight: Leaf, node: Node) -> Leaf | None:
    """The array that is named like the bias of `name`, or is the next in a list, and fits it."""
    candidates = [re.sub("weight|kernel", "bias", name), re.sub("^[wW]", "b", name)]
    candidates.append(f"{name}_bias")
    if node.ordered:
        names = list(node.children)
        candidates += names[names.index(name) + 1 :][:1]
    for candidate in candidates:
        bias = node.children.get(candidate)
        if not isinstance(bias, Leaf):
            continue
        if 0 < len(bias.shape) < len(weight.shape) and bias.shape[-1] in weight.shape:
            return bias
    return None


def _matrix(
    names: tuple[str, ...],
    weight: Leaf,
    bias: Leaf | None,
    sizes: SizeCounts,
    *,
    named_by_node: bool = False,
) -> WeightMatrix | None:
    """An array as a matrix, or None if it is not one. The last of `names` is its own."""
    key, shape, stack = names[-1], weight.shape, sizes.stacks[weight.index]
    if named_by_node:
        names = names[:-1]
    matrix = WeightMatrix(names, weight, bias, "linear", stack, (), ())
    channels = _channels(key, shape, stack)
    if channels is not None:
        ins, outs = channels
        return replace(matrix, kind="conv", ins=(ins,), outs=(outs,))
    dims = [d for d in range(stack, len(shape)) if shape[d] > 1]
    # (width, heads, head_dim), or reversed.
    if len(dims) == 3:
        ins, outs = _sides_with_heads(names[-1], weight, dims, sizes)
        return replace(matrix, ins=ins, outs=outs)
    if len(dims) != 2:
        return None
    first, last = dims  # without those of size one
    if bias is None and (key == "embedding" or _TABLE.search("/".join(names))):
        return replace(matrix, kind="table", ins=(first,), outs=(last,))
    if bias is not None and shape[first] != shape[last]:
        outputs_first, is_oriented = bias.shape[-1:] == (shape[first],), True
    else:
        # PyTorch stores outputs first in `weight`, and Flax inputs first in `kernel`.
        outputs_first, is_oriented = key.lower().endswith("weight"), key == "kernel"
    ins, outs = (first,), (last,)
    if outputs_first:
        ins, outs = outs, ins
    return replace(matrix, ins=ins, outs=outs, is_oriented=is_oriented)


def _channels(key: str, shape: tuple[int, ...], stack: int) -> tuple[int, int] | None:
    """The input and output channels of a convolution."""
    rank = len(shape) - stack
    if not 3 <= rank <= 5 or key not in ("kernel", "weight"):
        return None
    ins, outs = stack + 1, stack
    if key == "kernel":  # Flax stores the window first, PyTorch last
        ins, outs = len(shape) - 2, len(shape) - 1
    window = list(shape[stack:])  # what is left without the channels
    for d in sorted((ins, outs), reverse=True):
        del window[d - stack]
    # With rank 3, it may also be a matrix with a dimension of heads or experts.
    is_narrow = rank > 3 or window[0] < min(shape[outs], max(shape[ins], 2))
    if is_narrow and max(window) <= _KERNEL_WIDTH:
        return ins, outs
    return None


def _sides_with_heads(
    name: str, weight: Leaf, dims: list[int], sizes: SizeCounts
) -> tuple[Dimensions, Dimensions]:
    """The sides of a query, key or value (width, heads, head size), or output (reversed)."""
    counts = {d: sizes.count(weight, weight.shape[d]) for d in dims}
    width = max(dims, key=counts.__getitem__)  # every block reads and writes it
    if role_of(name) == "output" and counts[dims[-1]] == counts[width]:
        width = dims[-1]
    heads = tuple(d for d in dims if d != width)
    if width == dims[-1]:
        return heads, (width,)
    return (width,), heads


def _orient(blocks: list[Block], sizes: SizeCounts) -> list[Block]:
    """The blocks with matrices whose sides are not known, such as square ones, like the others.

    Arrays with the same generic name (`weight`) are stored alike, and so are all with other names.
    """
    # A framework stores all of its weights alike, so that those whose sides are known decide.
    votes: Counter[str] = Counter()  # positive for outputs first, negative for inputs first
    for matrix in blocks[-1].below:
        # A square matrix looks the same both ways.
        if matrix.kind == "linear" and not matrix.is_square:
            votes[_storage(matrix)] += _outputs_first(matrix, sizes)

    def oriented(matrix: WeightMatrix) -> WeightMatrix:
        vote = votes[_storage(matrix)]
        if matrix.is_oriented or vote == 0 or (vote > 0) == (matrix.outs < matrix.ins):
            return matrix
        return replace(matrix, ins=matrix.outs, outs=matrix.ins)

    for block in blocks:
        block.below[:] = map(oriented, block.below)
        for place, matrix in enumerate(block.near):
            if matrix is not None:
                block.near[place] = oriented(matrix)
    return blocks


def _storage(matrix: WeightMatrix) -> str:
    key = "".join(matrix.weight.path[-1:])
    if key in _GENERIC:
        return key
    return "own name"


def _outputs_first(matrix: WeightMatrix, sizes: SizeCounts) -> int:
    """1 if the output dimension is stored before the input, -1 if after, 0 if unknown."""
    outputs_first = matrix.outs < matrix.ins
    if not matrix.is_oriented:
        # The more frequent size is that of the residual stream, which all but two roles read.
        reads = sizes.count(matrix.weight, matrix.in_size)
        writes = sizes.count(matrix.weight, matrix.out_size)
        if reads == writes or matrix.role in (None, "output"):
            return 0
        if (reads > writes) == (matrix.role == "down"):
            outputs_first = not outputs_first
    if outputs_first:
        return 1
    return -1
