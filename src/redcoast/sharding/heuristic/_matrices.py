"""Reads a tree as blocks of matrices, each with an input and an output side.

Arrays are read without the leading dimensions of stacked (scanned or vmapped) layers, so that all
shapes and dimensions here are those of one layer.
"""

import re
from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from math import prod
from typing import Literal

import equinox as eqx

from ..tree._leaves import Leaf, Node, leaves_below

NORMS = (eqx.nn.LayerNorm, eqx.nn.RMSNorm, eqx.nn.GroupNorm, eqx.nn.BatchNorm)
RECURRENT = (eqx.nn.LSTMCell, eqx.nn.GRUCell)
_CONVOLUTIONS = (eqx.nn.Conv, eqx.nn.ConvTranspose)
WINDOWS = range(1, 17)  # of usual convolutions; other dimensions are larger
Sides = tuple[tuple[int, ...], tuple[int, ...]]


@dataclass
class WeightMatrix:
    """A weight with its input dimensions `ins`, which are contracted, and output dimensions `outs`.

    `groups` is the number of groups of a convolution. `is_oriented` is whether a module or a bias
    tells the sides; of others, they are guessed by how frameworks store them.
    """

    leaf: Leaf
    ins: tuple[int, ...]
    outs: tuple[int, ...]
    bias: Leaf | None = None
    kind: Literal["linear", "conv", "table"] = "linear"
    groups: int = 1
    is_oriented: bool = True

    @property
    def in_size(self) -> int:
        return prod(map(self.leaf.shape.__getitem__, self.ins))

    @property
    def out_size(self) -> int:
        return prod(map(self.leaf.shape.__getitem__, self.outs))

    @property
    def is_square(self) -> bool:
        return self.in_size == self.out_size

    @property
    def is_flat(self) -> bool:
        """Whether it is no kernel and no table, and has no dimension of heads or experts."""
        return self.kind == "linear" and len(self.ins) == len(self.outs) == 1


@dataclass(frozen=True)
class Block:
    """A node of the tree as matrices.

    `own` are its matrices in order, with None in place of each inner node that has several. `all`
    are those of the node and of inner ones.
    """

    node: Node
    own: list[WeightMatrix | None]
    all: list[WeightMatrix]


@dataclass(frozen=True)
class Tree:
    """The blocks of a tree, inner ones first, so that the last one is the tree itself.

    `stacks` has the number of stacked leading dimensions of each array, by index. `counts` has, for
    each layer, how many of its arrays have a dimension of a size. The most frequent one is usually
    the width of the residual stream, which every block reads and writes.
    """

    blocks: list[Block]
    stacks: dict[int, int]
    counts: defaultdict[tuple[str, ...], Counter[int]]

    @property
    def matrices(self) -> list[WeightMatrix]:
        """All matrices of the tree."""
        return self.blocks[-1].all

    def is_in_layer(self, leaf: Leaf) -> bool:
        """Whether an array is in a repeated layer, of a list or stacked."""
        return self.stacks[leaf.index] > 0 or bool(layer_of(leaf))


def read_tree(root: Node) -> Tree:
    tree = Tree([], {}, defaultdict(Counter))
    root = _unstack(root, 0, tree.stacks)
    # Layers are counted apart: an encoder and a decoder may have different widths.
    for leaf in leaves_below(root):
        tree.counts[layer_of(leaf)].update(set(leaf.shape) - {0, 1})
    _read_block(root, tree)
    _orient(tree.matrices)
    return tree


def layer_of(leaf: Leaf) -> tuple[str, ...]:
    """The path of an array up to its first number, as of one of several layers; empty without."""
    for place, part in enumerate(leaf.path[:-1]):
        if part.isdecimal():
            return leaf.path[: place + 1]
    return ()


def _unstack(node: Node, depth: int, stacks: dict[int, int]) -> Node:
    """The node with arrays of one layer. Notes in `stacks` how many dimensions they have lost."""
    depth += _is_stacked(node, depth)
    rank = None  # of a matrix without stacking, which is known in a stock Equinox layer
    if isinstance(node.owner, _CONVOLUTIONS):
        rank = node.owner.num_spatial_dims + 2
    elif isinstance(node.owner, (eqx.nn.Linear, eqx.nn.Embedding, *RECURRENT)):
        rank = 2
    children: dict[str, Node | Leaf] = {}
    for name, child in node.children.items():
        if isinstance(child, Node):
            children[name] = _unstack(child, depth, stacks)
            continue
        stack = depth
        if rank is not None:
            stack = max(0, len(child.shape) - rank + name.startswith("bias"))
        stacks[child.index] = stack
        children[name] = replace(child, shape=child.shape[stack:])
    return replace(node, children=children)


def _is_stacked(node: Node, depth: int) -> bool:
    """Whether arrays with equal leading sizes look like stacked matrices and vectors.

    They do if the matrices, of rank 3 or more, come with stacked vectors, or if the leading size
    does not occur in other dimensions.
    """
    shapes = [leaf.shape[depth:] for leaf in leaves_below(node)]
    leading = {shape[:1] for shape in shapes}
    ranks = list(map(len, shapes))
    # A list of layers is not a stack of them.
    if node.ordered or len(shapes) < 2 or len(leading) > 1 or min(ranks) < 2 or max(ranks) < 3:
        return False
    of_vectors = {shape[1:] for shape in shapes if len(shape) == 2}
    of_matrices: set[tuple[int, ...]] = set()
    for _, *sizes in shapes:
        if len(sizes) > 1:
            of_matrices.update((size,) for size in sizes)
    if of_vectors and of_vectors <= of_matrices:
        return True
    return leading.isdisjoint(of_matrices | of_vectors)


def _read_block(node: Node, tree: Tree) -> list[WeightMatrix]:
    """Adds the blocks of a node, inner ones first, and returns all of its matrices."""
    by_name: dict[str, WeightMatrix] = {}  # the arrays of the node itself that are matrices
    if not isinstance(node.owner, NORMS + RECURRENT):
        for name, leaf in node.children.items():
            matrix = isinstance(leaf, Leaf) and _matrix(node, name, leaf, tree)
            if matrix:
                by_name[name] = matrix
    # Biases with a dimension of heads look like matrices.
    for matrix in list(by_name.values()):
        if matrix.bias is not None:
            by_name.pop(matrix.bias.path[-1], None)
    block = Block(node, [], [])
    for name, child in node.children.items():
        inner: list[WeightMatrix] = []
        if isinstance(child, Node):
            inner = _read_block(child, tree)
        elif name in by_name:
            inner = [by_name[name]]
        block.all.extend(inner)
        # A layer with one matrix is a matrix of the block around it.
        if len(inner) == 1:
            block.own.append(inner[0])
        elif inner:
            block.own.append(None)
    tree.blocks.append(block)
    return block.all


def _matrix(node: Node, name: str, leaf: Leaf, tree: Tree) -> WeightMatrix | None:
    """An array as a matrix, or None if it is not one."""
    owner, shape = node.owner, leaf.shape
    bias = _bias_of(name, leaf, node)
    if name == "weight" and len(shape) > 1:
        if isinstance(owner, eqx.nn.Embedding):
            return WeightMatrix(leaf, (0,), (1,), kind="table")
        # Equinox stores outputs first, (outputs, inputs, *window).
        if isinstance(owner, eqx.nn.Linear):
            return WeightMatrix(leaf, (1,), (0,), bias)
        if isinstance(owner, _CONVOLUTIONS):
            return WeightMatrix(leaf, (1,), (0,), bias, "conv", owner.groups)
    if name == "kernel" and _is_window(shape):
        ins, outs = len(shape) - 2, len(shape) - 1  # Flax: (*window, inputs, outputs)
        return WeightMatrix(leaf, (ins,), (outs,), bias, "conv")
    dims = long_dims(leaf)
    if len(dims) == 3:
        return WeightMatrix(leaf, *_sides_with_heads(leaf, dims, tree), bias)
    if len(dims) != 2:
        return None
    first, second = dims
    # PyTorch stores outputs first, in `weight`. Flax and most others store inputs first.
    outputs_first = name == "weight"
    is_oriented = bias is not None and shape[first] != shape[second]
    if bias is not None and is_oriented:
        outputs_first = bias.shape[-1] == shape[first]
    if outputs_first:
        first, second = second, first
    return WeightMatrix(leaf, (first,), (second,), bias, is_oriented=is_oriented)


def long_dims(leaf: Leaf) -> list[int]:
    """The dimensions of an array with more than one element."""
    return [d for d, size in enumerate(leaf.shape) if size > 1]


def _bias_of(name: str, weight: Leaf, node: Node) -> Leaf | None:
    """The array that is named like the bias of `name`, or is the next in a list, and fits it."""
    candidates = [f"{name}_bias", re.sub("weight|kernel", "bias", name), re.sub("^w", "b", name)]
    if node.ordered:
        names = list(node.children)
        candidates += names[names.index(name) + 1 :][:1]
    for candidate in candidates:
        bias = node.children.get(candidate)
        if not isinstance(bias, Leaf):
            continue
        # The bias of a convolution is (channels, 1, 1).
        size = max(bias.shape, default=0)
        if len(bias.shape) < len(weight.shape) and size in weight.shape:
            return bias
    return None


def _is_window(shape: tuple[int, ...]) -> bool:
    """Whether the first dimensions of a kernel of Flax are the window of a convolution."""
    if not 3 <= len(shape) <= 5:
        return False
    *window, ins, outs = shape
    # With rank 3, it may also be a matrix with a dimension of heads or experts.
    is_narrow = len(shape) > 3 or window[0] < min(outs, max(ins, 2))
    return is_narrow and max(window) in WINDOWS


def _sides_with_heads(leaf: Leaf, dims: list[int], tree: Tree) -> Sides:
    """The sides of a query, key or value (width, heads, head size), or output (reversed)."""
    first, middle, last = dims
    counter = tree.counts[layer_of(leaf)]

    def frequency(size: int) -> tuple[int, int]:
        # A width is larger than a number of heads that occurs as often.
        return counter[size], size

    if leaf.shape[middle] == max(counter, key=frequency):
        return (middle,), (first, last)  # of matrices of experts (experts, width, hidden)
    if frequency(leaf.shape[last]) > frequency(leaf.shape[first]):
        return (first, middle), (last,)
    return (first,), (middle, last)


def _orient(matrices: list[WeightMatrix]) -> None:
    """Turns matrices whose sides are guessed, if most others of the tree are stored otherwise.

    A framework stores all of its weights alike, so those whose sides are known decide.
    """
    flat = [matrix for matrix in matrices if matrix.is_flat]
    votes: Counter[bool] = Counter()  # for outputs first, and for inputs first
    for matrix in flat:
        if matrix.is_oriented:
            votes[matrix.outs < matrix.ins] += 1
    for matrix in flat:
        outputs_first = matrix.outs < matrix.ins
        if not matrix.is_oriented and votes[not outputs_first] > votes[outputs_first]:
            matrix.ins, matrix.outs = matrix.outs, matrix.ins
