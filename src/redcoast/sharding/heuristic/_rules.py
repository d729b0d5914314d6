"""Shards matrices over `model` by the rules of RedCoast (arXiv:2310.16355, section 3.1).

Consecutive matrices are sharded alternately, on the output and then on the input: the sharded
output of one matrix is the sharded input of the next, so that one all-reduce is enough for both.
In attention, query, key and value are sharded on their outputs, and the output matrix on its input.
Embeddings and language-model heads are sharded on the vocabulary. For transformers, these are the
rules of Megatron-LM (arXiv:1909.08053, section 3).
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import gcd, prod
from typing import Literal

import equinox as eqx
from jaxtyping import PyTree

from ..tree._leaves import LARGE, Leaf
from ..tree._overrides import multiples_near
from ._matrices import Block, SizeCounts, WeightMatrix, layer_of

# A matrix with this many times fewer outputs than inputs is not worth sharding.
_NARROW = 8
_SMALL = re.compile(
    r"(^|_)(pos|positions?|positional|time|timesteps?)(_|emb|$)|wpe|(^|_)type(_|$)|segment|relative",
    re.IGNORECASE,
)
_HEAD = re.compile(r"head|logits|vocab|(^|_)(lm|output|decoder|unembed\w*)($|_)", re.IGNORECASE)
_INPUTS = ("query", "key", "value", "fused")  # the roles of matrices into attention
_COMPLETE = ({"query", "key", "value"}, {"query", "fused"}, {"fused"})
_HEADS = ("num_heads", "n_heads", "n_head", "num_attention_heads", "heads")
_KV_HEADS = ("num_kv_heads", "n_kv_heads", "num_key_value_heads", "kv_heads")


@dataclass(frozen=True)
class ModelSharding:
    """The dimension of an array that is sharded over `model`, or None, and the reason.

    `outer` is the size of the other side of a matrix, which is not sharded. It is also set if a
    matrix is not sharded only because its size is not divisible. `vocabulary` is the number of rows
    of a table that has a dimension of the vocabulary.
    """

    dim: int | None
    reason: str
    outer: int | None = None
    vocabulary: int | None = None


ModelShardings = dict[int, ModelSharding]  # by the index of the array
Inputs = dict[str | None, WeightMatrix]  # those of attention, by their role
Side = Literal["column", "row"]


def vocabularies(splits: ModelShardings) -> set[int]:
    """The sizes of all vocabularies, sharded or not."""
    sizes = {split.vocabulary for split in splits.values()}
    return set(filter(None, sizes))


def indivisible(what: str, size: int, n: int) -> str:
    """The reason for not sharding an indivisible size."""
    return f"{what} {size} is not a multiple of model={n} ({multiples_near(size, n)} would be)"


def shard_matrices(blocks: list[Block], sizes: SizeCounts, n: int) -> ModelShardings:
    """The splits of all matrices and of their biases over `n` devices."""
    rules = _Rules(sizes, n)
    by_path = {block.path: block for block in blocks}
    matrices = blocks[-1].below
    # Attention is first, because it shows the width of the residual stream.
    for block in blocks:
        parent = None
        if block.path:
            parent = by_path.get(block.path[:-1])
        rules.shard_attention(block, parent)
    attention = dict(rules.splits)
    # Chains in lists may be sharded on any size, and others not on the residual widths.
    for block in blocks:
        if block.is_ordered:
            rules.shard_chains(block, set())
    tables = [matrix for matrix in matrices if matrix.kind == "table"]
    rules.shard_tables(tables, _outer_sizes(matrices, attention))
    widths = _outer_sizes(tables, rules.splits)
    for block in blocks:
        rules.shard_pairs(block, widths | _outer_sizes(block.below, attention))
    # Heads are found by the sizes of the vocabularies, which tables have shown.
    rules.shard_heads(matrices)
    residual = _outer_sizes(matrices, rules.splits)
    for block in blocks:
        rules.shard_chains(block, residual)
    residual = _outer_sizes(matrices, rules.splits)
    for matrix in matrices:
        if matrix.index not in rules.splits:
            rules.shard_alone(matrix, residual)
    return rules.splits


def _outer_sizes(matrices: Iterable[WeightMatrix], splits: ModelShardings) -> set[int]:
    """The sizes of the sides of matrices that are not sharded: widths of the residual stream."""
    sizes: set[int] = set()
    for matrix in matrices:
        split = splits.get(matrix.index)
        if split is not None and split.outer is not None:
            sizes.add(split.outer)
    return sizes


@dataclass(frozen=True)
class _Rules:
    """The rules, which fill `splits` for `n` devices. A matrix that has a split keeps it."""

    sizes: SizeCounts
    n: int
    splits: ModelShardings = field(default_factory=dict)

    def _shard(
        self,
        matrix: WeightMatrix,
        side: Side,
        reason: str,
        *,
        fused: int = 1,
        heads: int | None = None,
    ) -> None:
        """Shards a matrix on its output (column-parallel) or on its input (row-parallel).

        `fused` is the number of equal matrices that are fused in it. `heads` are not split
        themselves.
        """
        dim, outer = matrix.ins[0], matrix.out_size
        if side == "column":
            dim, outer = matrix.outs[0], matrix.in_size
        size = matrix.weight.shape[dim]
        if matrix.groups > 1:
            self._replicate(matrix, f"convolution in {matrix.groups} groups", outer)
        elif heads is not None and heads % self.n:
            self._replicate(matrix, indivisible("number of heads", heads, self.n), outer)
        elif size % (self.n * fused):
            what = "size"
            if len(matrix.ins) + len(matrix.outs) > 2:
                what = "number of heads"
            self._replicate(matrix, indivisible(what, size // fused, self.n), outer)
        else:
            self.splits[matrix.index] = ModelSharding(dim, f"{side}-parallel, {reason}", outer)
            if matrix.bias is not None:
                self.splits[matrix.bias.index] = _split_of_bias(matrix, matrix.bias, side, size)

    def _replicate(self, matrix: WeightMatrix, reason: str, outer: int | None = None) -> None:
        """Replicates a matrix and its bias."""
        self.splits[matrix.index] = ModelSharding(None, reason, outer)
        if matrix.bias is not None:
            self.splits[matrix.bias.index] = ModelSharding(None, "like its matrix")

    def _undecided(self, block: Block) -> list[WeightMatrix | None]:
        """The matrices near a block without a split, and None for others between them."""
        undecided: list[WeightMatrix | None] = []
        for matrix in block.near:
            if matrix is not None and (matrix.kind == "table" or matrix.index in self.splits):
                matrix = None
            undecided.append(matrix)
        return undecided

    def _linear(self, block: Block) -> list[WeightMatrix]:
        matrices = filter(None, self._undecided(block))
        return [matrix for matrix in matrices if matrix.kind == "linear"]

    def shard_attention(self, block: Block, parent: Block | None) -> None:
        """Shards the attention matrices of a block, if it has any."""
        matrices = self._linear(block)
        # Heads are divided, and never split.
        if self._shard_explicit_heads(matrices):
            return
        beside: list[WeightMatrix] = []
        if parent is not None:
            beside = self._linear(parent)
        inputs: Inputs = {}
        for matrix in matrices:
            if matrix.role in _INPUTS:
                inputs[matrix.role] = matrix
        # Without all the names that attention has, shapes decide.
        if set(inputs) not in _COMPLETE:
            inputs = _inputs_by_shape(matrices, beside)
            if block.is_ordered or not inputs:
                return
        heads = _int_field(block.owner, _HEADS)
        kv_heads = _int_field(block.owner, _KV_HEADS) or heads
        for role, matrix in inputs.items():
            if role == "fused":
                # The sizes of fused matrices are multiples of the keys' size.
                fused = matrix.out_size // gcd(matrix.in_size, matrix.out_size)
                what = "attention query, key and value in one matrix"
                self._shard(matrix, "column", what, fused=fused, heads=heads)
            elif role == "query":
                self._shard(matrix, "column", "attention query", heads=heads)
            else:
                self._shard(matrix, "column", f"attention {role}", heads=kv_heads)
        output = _output(matrices, inputs) or _output(beside, inputs)
        if output is not None:
            self._shard(output, "row", "attention output", heads=heads)

    def _shard_explicit_heads(self, matrices: list[WeightMatrix]) -> bool:
        """Shards matrices with a separate dimension of heads, which shows their sides."""
        what = "heads"
        for matrix in matrices:
            # As of (experts, width, hidden), where the sides are not next to each other.
            if len(matrix.outs) == 2 and matrix.outs[1] - matrix.outs[0] > 1:
                what = "heads or experts"
        has_heads = False
        for matrix in matrices:
            if len(matrix.outs) == 2:
                self._shard(matrix, "column", f"{what} of {matrix.name}")
            if len(matrix.ins) == 2:
                self._shard(matrix, "row", f"{what} into {matrix.name}")
            has_heads |= 2 in (len(matrix.outs), len(matrix.ins))
        return has_heads

    def shard_pairs(self, block: Block, residual: set[int]) -> None:
        """Shards pairs of matrices, from the residual width to an inner one and back, on the inner
        one.

        `residual` are the input widths of attention below the block, which are not inner widths.
        Names show the direction of square matrices.
        """
        matrices = list(filter(None, self._undecided(block)))
        # Layers in a list are chains, which come next.
        if block.is_ordered or len(matrices) < 2:
            return
        width = self._most_frequent(matrices)  # of the residual stream
        ups: list[WeightMatrix] = []
        downs: list[WeightMatrix] = []
        for matrix in matrices:
            if matrix.in_size == width and (not matrix.is_square or matrix.role == "up"):
                ups.append(matrix)
            if matrix.out_size == width and (not matrix.is_square or matrix.role == "down"):
                downs.append(matrix)
        for down in downs:
            inner = down.in_size
            if inner in residual and not down.is_square:
                continue
            # A gate and its value may be one matrix, of twice the inner width.
            partners = [up for up in ups if up.out_size in (inner, 2 * inner)]
            if partners:
                self._shard(down, "row", f"pairs with {partners[-1].name}")
            for up in partners:
                fused = up.out_size // inner
                self._shard(up, "column", f"pairs with {down.name}", fused=fused)

    def _most_frequent(self, matrices: list[WeightMatrix]) -> int:
        """The size that most matrices have on one side; ties go by the arrays of the layer."""
        counts: dict[int, int] = {}
        for matrix in matrices:
            # A square matrix counts once.
            for size in dict.fromkeys((matrix.in_size, matrix.out_size)):
                counts[size] = counts.get(size, 0) + 1
        weight = matrices[0].weight
        return max(counts, key=lambda size: (counts[size], self.sizes.count(weight, size)))

    def shard_chains(self, block: Block, residual: set[int]) -> None:
        """Shards chains of matrices, each the input of the next: column, row, column, row."""
        chains: list[list[WeightMatrix]] = []
        before = None
        for matrix in self._undecided(block):
            if matrix is not None and before is not None and _follows(before, matrix):
                chains[-1].append(matrix)
            elif matrix is not None:
                chains.append([matrix])
            before = matrix
        place = ""
        if block.is_ordered and block.path:
            place = f"{block.path[-1]}/"
        for chain in chains:
            if len(chain) > 1:
                self._alternate(chain, residual, place)

    def _alternate(self, chain: list[WeightMatrix], residual: set[int], place: str) -> None:
        column = None  # the matrix before, if it is column-parallel
        for i, matrix in enumerate(chain):
            if column is not None:
                self._shard(matrix, "row", f"pairs with {place}{column.name}")
                column = None
            elif matrix.out_size in residual:
                continue  # `shard_alone` replicates it
            elif i + 1 < len(chain):
                self._shard(matrix, "column", f"pairs with {place}{chain[i + 1].name}")
                if self.splits[matrix.index].dim is not None:
                    column = matrix
            # As the logits of a few classes.
            elif matrix.out_size * _NARROW < matrix.in_size:
                self._replicate(
                    matrix, f"output of {matrix.out_size} from {matrix.in_size}, narrow"
                )
            else:
                self._shard(matrix, "column", "output")

    def shard_alone(self, matrix: WeightMatrix, residual: set[int]) -> None:
        """Shards a matrix without a partner on its output, if it is divisible and large."""
        elements = prod(matrix.weight.shape[matrix.stack :])
        if matrix.out_size in residual:
            reason = "no matrix follows to pair with, and its output is replicated"
            self._replicate(matrix, reason)
        elif elements < LARGE:
            self._replicate(matrix, f"small, {elements:,} elements")
        else:
            self._shard(matrix, "column", "output")

    def shard_tables(self, tables: list[WeightMatrix], residual: set[int]) -> None:
        """Shards token embeddings on the vocabulary. Positions and token types are replicated."""
        for table in tables:
            if any(map(_SMALL.search, table.weight.path[-3:])):
                reason = "table of positions or types, small"
                self.splits[table.index] = ModelSharding(None, reason, table.out_size)
            elif table.in_size in residual and table.out_size not in residual:
                self.splits[table.index] = self._vocabulary(table, table.outs[0])
            else:
                self.splits[table.index] = self._vocabulary(table, table.ins[0])

    def shard_heads(self, matrices: list[WeightMatrix]) -> None:
        """Shards matrices outside layers that have the vocabulary on one side, and their biases."""
        sizes = vocabularies(self.splits)
        for matrix in matrices:
            is_decided = matrix.index in self.splits
            # A head is outside of repeated layers.
            if matrix.kind != "linear" or is_decided or layer_of(matrix.weight):
                continue
            shape, bias = matrix.weight.shape, matrix.bias
            dims = [d for d in (*matrix.outs, *matrix.ins) if shape[d] in sizes]
            # If both sides have the size of the vocabulary, a name must identify the head.
            if not dims or (len(dims) > 1 and not _HEAD.search(matrix.name)):
                continue
            split = self._vocabulary(matrix, dims[0])
            self.splits[matrix.index] = split
            if bias is None:
                continue
            last = None
            if split.dim in matrix.outs and bias.shape[-1] == shape[dims[0]]:
                last = len(bias.shape) - 1
            self.splits[bias.index] = ModelSharding(last, "like its matrix")

    def _vocabulary(self, matrix: WeightMatrix, dim: int) -> ModelSharding:
        """The split of a matrix along the dimension of the vocabulary."""
        size, outer, rows = matrix.weight.shape[dim], matrix.out_size, None
        if dim in matrix.outs:
            outer = matrix.in_size
        if matrix.kind == "table":
            rows = max(matrix.in_size, matrix.out_size)
        if size % self.n:
            return ModelSharding(None, indivisible("vocabulary", size, self.n), outer, rows)
        return ModelSharding(dim, "vocabulary-parallel", outer, rows)


def _split_of_bias(matrix: WeightMatrix, bias: Leaf, side: Side, size: int) -> ModelSharding:
    """The bias of a column-parallel matrix is sharded like the outputs that it is added to."""
    if side == "row":
        return ModelSharding(None, "bias of a row-parallel matrix")
    if size in bias.shape[matrix.stack :]:
        return ModelSharding(bias.shape.index(size, matrix.stack), "like its matrix")
    return ModelSharding(None, "does not have its matrix's output size")


def _inputs_by_shape(matrices: list[WeightMatrix], beside: list[WeightMatrix]) -> Inputs:
    """Finds query, key and value by four patterns of shapes.

    Four square matrices; two square ones and two others that are alike (grouped queries); three
    square ones and one in the parent; one square one and one with three times as many outputs.
    """
    squares = [matrix for matrix in matrices if matrix.is_square]
    # With squares of several sizes, none is known to be the width.
    if len({matrix.in_size for matrix in squares}) != 1:
        return {}
    width = squares[0].in_size
    # What the next matrix of an MLP reads is not of attention.
    inner = {matrix.in_size for matrix in matrices}
    others: list[WeightMatrix] = []
    for matrix in matrices:
        if matrix.in_size == width and matrix.out_size not in inner:
            others.append(matrix)
    sizes = [matrix.out_size for matrix in others]
    squares_beside = [matrix.out_size for matrix in beside if matrix.is_square]
    is_split = len(squares) == len(matrices) == 3 and squares_beside == [width]
    if len(squares) == 4 or is_split:
        return {"query": squares[0], "key": squares[1], "value": squares[2]}
    if len(squares) == 2 and len(sizes) == 2 and sizes[0] == sizes[1]:
        return {"query": squares[0], "key": others[0], "value": others[1]}
    if len(squares) == 1 and sizes == [3 * width]:
        return {"fused": others[0]}
    return {}


def _output(matrices: list[WeightMatrix], inputs: Inputs) -> WeightMatrix | None:
    """The last matrix from the heads' width back, if possible one with the name of an output."""
    query = inputs.get("query") or inputs["fused"]
    widths = {inputs[role].out_size for role in ("query", "value") if role in inputs}
    if not widths:
        widths = {query.in_size}
    indices = {matrix.index for matrix in inputs.values()}
    named, closing = None, None
    for matrix in matrices:
        if matrix.index in indices or matrix.in_size not in widths:
            continue
        if matrix.role == "output":
            named = matrix
        elif matrix.out_size == query.in_size:
            closing = matrix
    return named or closing


def _int_field(owner: PyTree, names: tuple[str, ...]) -> int | None:
    """The first of some fields of a module that is an integer."""
    if isinstance(owner, eqx.Module):
        for name in names:
            value = getattr(owner, name, None)
            if isinstance(value, int):
                return value
    return None


def _follows(before: WeightMatrix, after: WeightMatrix) -> bool:
    if before.kind == "conv" and after.kind == "linear":
        return after.in_size % before.out_size == 0  # flattened, channels first
    return before.out_size == after.in_size
