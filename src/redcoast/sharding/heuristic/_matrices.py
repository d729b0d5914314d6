"""Reads a tree as blocks of matrices, each with an input and an output side."""

import re
from collections import Counter
from dataclasses import dataclass, field
from math import prod
from typing import Literal

import equinox as eqx

from ..tree._leaves import Leaf, Node, leaves_below

NORMS = (eqx.nn.LayerNorm, eqx.nn.RMSNorm, eqx.nn.GroupNorm, eqx.nn.BatchNorm)
RECURRENT = (eqx.nn.LSTMCell, eqx.nn.GRUCell)
_CONVOLUTIONS = (eqx.nn.Conv, eqx.nn.ConvTranspose)
WINDOWS = range(1, 17)  # of usual convolutions; other dimensions are larger


@dataclass
class WeightMatrix:
    """A weight with its input dimensions `ins`, which are contracted, and output dimensions `outs`.

    `stack` is the number of stacked leading dimensions, and `groups` that of the groups of a
    convolution. `is_oriented` is whether a module or a bias tells the sides; of others, they are
    guessed by how frameworks store them.
    """

    leaf: Leaf
    stack: int
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


@dataclass
class Block:
    """A node of the tree as matrices.

    `near` are its matrices in order, with None in place of each inner node that has several of its
    own. `below` are all matrices of the node and of inner ones.
    """

    node: Node
    near: list[WeightMatrix | None] = field(default_factory=list)
    below: list[WeightMatrix] = field(default_factory=list)


class Tree:
    """The blocks of a tree, inner ones first, so that the last one is the tree itself.

    `stacks` has the number of stacked leading dimensions of each array, by index. `counts` has, for
    each layer, how many of its arrays have a dimension of a size, and `sides` how many of its
    matrices have a side of a size. The most frequent one is the width of the residual stream, which
    every block reads and writes.
    """

    def __init__(self, root: Node):
        self.blocks: list[Block] = []
        self.stacks: dict[int, int] = {}
        self.counts: dict[tuple[str, ...], Counter[int]] = {}
        self.sides: dict[tuple[str, ...], Counter[int]] = {}
        self._find_stacks(root, 0)
        # Layers are counted apart: an encoder and a decoder may have different widths.
        for leaf in leaves_below(root):
            counter = self.counts.setdefault(layer_of(leaf), Counter())
            counter.update(set(leaf.shape[self.stacks[leaf.index] :]) - {0, 1})
        self._read(root)
        # A framework stores all of its weights alike, so those whose sides are known decide of
        # those whose are not, such as square ones.
        flat = [matrix for matrix in self.blocks[-1].below if matrix.is_flat]
        votes: Counter[bool] = Counter()  # for outputs first, and for inputs first
        for matrix in flat:
            # A square matrix looks the same both ways.
            if matrix.is_oriented and not matrix.is_square:
                votes[matrix.outs < matrix.ins] += 1
        for matrix in flat:
            outputs_first = matrix.outs < matrix.ins
            if not matrix.is_oriented and votes[not outputs_first] > votes[outputs_first]:
                matrix.ins, matrix.outs = matrix.outs, matrix.ins
        for matrix in self.blocks[-1].below:
            if matrix.kind == "linear":
                counter = self.sides.setdefault(layer_of(matrix.leaf), Counter())
                counter.update({matrix.in_size, matrix.out_size})

    def _find_stacks(self, node: Node, depth: int) -> None:
        """Counts the stacked (scanned or vmapped) leading dimensions of the arrays of a node."""
        depth += _is_stacked(node, depth)
        for name, child in node.children.items():
            if isinstance(child, Node):
                self._find_stacks(child, depth)
                continue
            self.stacks[child.index] = depth
            # In a stock Equinox layer, the rank of an array without stacking is known.
            rank = 2
            if isinstance(node.owner, _CONVOLUTIONS):
                rank = node.owner.num_spatial_dims + 2
            elif not isinstance(node.owner, (eqx.nn.Linear, eqx.nn.Embedding, *RECURRENT)):
                continue
            rank -= name.startswith("bias")
            self.stacks[child.index] = max(0, len(child.shape) - rank)

    def _read(self, node: Node) -> list[WeightMatrix]:
        """Appends the blocks of a node, inner ones first, and returns all of its matrices."""
        block = Block(node)
        # The arrays of the node itself that are matrices, by name.
        matrices: dict[str, WeightMatrix] = {}
        if not isinstance(node.owner, NORMS + RECURRENT):
            for name, leaf in node.children.items():
                matrix = isinstance(leaf, Leaf) and self._matrix(node, name, leaf)
                if matrix:
                    matrices[name] = matrix
        # Biases with a dimension of heads look like matrices.
        for matrix in list(matrices.values()):
            if matrix.bias is not None:
                matrices.pop(matrix.bias.path[-1], None)
        for name, child in node.children.items():
            inner: list[WeightMatrix] = []
            if isinstance(child, Node):
                inner = self._read(child)
            elif name in matrices:
                inner = [matrices[name]]
            block.below.extend(inner)
            # A layer with one matrix is a matrix of the block around it.
            if len(inner) == 1:
                block.near.append(inner[0])
            elif inner:
                block.near.append(None)
        self.blocks.append(block)
        return block.below

    def _matrix(self, node: Node, name: str, leaf: Leaf) -> WeightMatrix | None:
        """An array as a matrix, or None if it is not one."""
        owner, shape, stack = node.owner, leaf.shape, self.stacks[leaf.index]
        bias = _bias_of(name, leaf, node)
        # Equinox stores outputs first, (outputs, inputs, *window).
        is_weight = name == "weight" and len(shape) > stack + 1
        if is_weight and isinstance(owner, eqx.nn.Embedding):
            return WeightMatrix(leaf, stack, (stack,), (stack + 1,), kind="table")
        if is_weight and isinstance(owner, eqx.nn.Linear):
            return WeightMatrix(leaf, stack, (stack + 1,), (stack,), bias)
        if is_weight and isinstance(owner, _CONVOLUTIONS):
            return WeightMatrix(leaf, stack, (stack + 1,), (stack,), bias, "conv", owner.groups)
        channels = _channels(name, shape, stack)
        if channels is not None:
            ins, outs = channels
            return WeightMatrix(leaf, stack, (ins,), (outs,), bias, "conv")
        dims = [d for d in range(stack, len(shape)) if shape[d] > 1]
        if len(dims) == 3:
            ins, outs = self._sides_with_heads(leaf, dims)
            return WeightMatrix(leaf, stack, ins, outs, bias)
        if len(dims) != 2:
            return None
        first, second = dims
        is_oriented = bias is not None and shape[first] != shape[second]
        if bias is not None and is_oriented:
            outputs_first = bias.shape[-1] == shape[first]
        else:
            # PyTorch stores outputs first, in `weight`. Flax and most others store inputs first.
            outputs_first = name == "weight"
        if outputs_first:
            first, second = second, first
        return WeightMatrix(leaf, stack, (first,), (second,), bias, is_oriented=is_oriented)

    def _sides_with_heads(
        self, leaf: Leaf, dims: list[int]
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The sides of a query, key or value (width, heads, head size), or output (reversed)."""
        counter = self.counts[layer_of(leaf)]
        # A width is larger than a number of heads that occurs as often.
        order = lambda size: (counter[size], size)
        first, middle, last = sizes = [leaf.shape[d] for d in dims]
        frequent = max(sizes, key=order)
        if frequent == middle == max(counter, key=order):
            width = dims[1]  # of matrices of experts (experts, width, hidden)
        elif frequent == last != first:
            width = dims[2]
        else:
            width = dims[0]
        dims.remove(width)
        if width > dims[-1]:
            return tuple(dims), (width,)
        return (width,), tuple(dims)


def layer_of(leaf: Leaf) -> tuple[str, ...]:
    """The path of an array up to its first number, as of one of several layers; empty without."""
    for place, part in enumerate(leaf.path[:-1]):
        if part.isdecimal():
            return leaf.path[: place + 1]
    return ()


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


def _channels(name: str, shape: tuple[int, ...], stack: int) -> tuple[int, int] | None:
    """The input and output channels of a convolution of Flax, (*window, inputs, outputs)."""
    rank = len(shape) - stack
    if not 3 <= rank <= 5 or name != "kernel":
        return None
    ins, outs, window = len(shape) - 2, len(shape) - 1, shape[stack:-2]
    # With rank 3, it may also be a matrix with a dimension of heads or experts.
    is_narrow = rank > 3 or window[0] < min(shape[outs], max(shape[ins], 2))
    if is_narrow and max(window) in WINDOWS:
        return ins, outs
    return None
