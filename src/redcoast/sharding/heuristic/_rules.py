"""Shards matrices over `model` by the two rules of RedCoast (arXiv:2310.16355, section 3.1).

1. Consecutive matrices are sharded alternately, on the output and then on the input: the sharded
   output of one is the sharded input of the next, so that one all-reduce is enough for both.
2. In attention, query, key and value are sharded on their outputs, and the output matrix on its
   input.

A block of a transformer reads and writes the width of the residual stream. In it, both rules shard
a matrix on its other side, which sizes tell, unless the matrix is square. Embeddings and
language-model heads are sharded on the vocabulary, which is their other side too. For transformers,
these are the rules of Megatron-LM (arXiv:1909.08053, section 3).
"""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import gcd, prod
from operator import attrgetter
from typing import Literal

import equinox as eqx
from jaxtyping import PyTree

from ..tree._leaves import LARGE
from ..tree._overrides import multiples_near
from ._matrices import WINDOWS, Block, Tree, WeightMatrix, layer_of

# A matrix with this many times fewer outputs than inputs is not worth sharding.
_NARROW = 8
# The output matrix of an attention whose matrices are all square.
_OUTPUT = re.compile(
    r"w?_?(o|out|output)(_?(proj|projection|linear|dense|kernel|weight))*", re.IGNORECASE
)
_HEADS = ("num_heads", "n_heads", "n_head", "num_attention_heads", "heads")
_KV_HEADS = ("num_kv_heads", "n_kv_heads", "num_key_value_heads", "kv_heads")

Side = Literal["column", "row"]  # the outputs, or the inputs
Matrices = list[WeightMatrix]


@dataclass(frozen=True)
class ModelSharding:
    """The dimension of an array that is sharded over `model`, or None, and the reason.

    `outer` is the size of the other side of a matrix, which is not sharded. It is also set if a
    matrix is not sharded only because its size is not divisible.
    """

    dim: int | None
    reason: str
    outer: int | None = None


def indivisible(what: str, size: int, n: int) -> str:
    """The reason for not sharding an indivisible size."""
    return f"{what} {size} is not a multiple of model={n} ({multiples_near(size, n)} would be)"


@dataclass(frozen=True)
class Rules:
    """The rules, which fill `shardings` for `n` devices, by the index of the array.

    `shared` are the sizes of sides that all layers have and a matrix outside of them, such as an
    embedding, too, and `vocabularies` the sizes of the vocabularies, sharded or not.
    """

    tree: Tree
    n: int
    shardings: dict[int, ModelSharding] = field(default_factory=dict)
    shared: set[int] = field(default_factory=set)
    vocabularies: set[int] = field(default_factory=set)

    def shard_tree(self) -> None:
        """Shards all matrices of the tree, and their biases."""
        matrices = self.tree.matrices
        outside: list[Block] = []
        self.shared.update(_shared_sizes(matrices))
        # Layers show the width of the residual stream, by which tables and heads are known.
        for block in self.tree.blocks:
            if any(map(_is_in_layer, filter(None, block.own))):
                self._shard_block(block, self.widths(block.all))
            else:
                outside.append(block)
        if self.shardings:
            self._shard_tables_and_heads()
        for block in outside:
            self._shard_block(block, self.widths(matrices))
        self._shard_tables_and_heads()
        # A matrix without a partner is sharded on its output, if it is divisible and large.
        for matrix in self._undecided(matrices):
            elements = prod(matrix.leaf.shape[matrix.stack :])
            if matrix.out_size in self.widths(matrices):
                reason = "no matrix follows to pair with, and its output is replicated"
                self._replicate(matrix, reason)
            elif elements < LARGE:
                self._replicate(matrix, f"small, {elements:,} elements")
            elif _is_narrow(matrix):
                self._replicate(matrix, _narrow(matrix))
            else:
                self._shard(matrix, "column")

    def widths(self, matrices: Iterable[WeightMatrix]) -> set[int]:
        """The sizes of sides that are not sharded: widths of the residual stream."""
        widths: set[int] = set()
        for matrix in matrices:
            sharding = self.shardings.get(matrix.leaf.index)
            if sharding is not None and sharding.outer is not None:
                widths.add(sharding.outer)
        return widths

    def _undecided(self, matrices: Iterable[WeightMatrix | None]) -> Matrices:
        """The matrices without a sharding. One that has a sharding keeps it."""
        present = filter(None, matrices)
        return [matrix for matrix in present if matrix.leaf.index not in self.shardings]

    def _linear(self, block: Block) -> Matrices:
        """The matrices of a block without a sharding, but for tables and kernels."""
        return [matrix for matrix in self._undecided(block.own) if matrix.kind == "linear"]

    def _shard_block(self, block: Block, widths: set[int]) -> None:
        """Shards the matrices near a block. `widths` are known ones of the residual stream."""
        # Layers in a list are a chain, which may be sharded on any size.
        if block.node.ordered:
            self._shard_chains(block.own, set())
            return
        # A dimension of heads or experts shows which side is the width. It is never split itself.
        for matrix in self._linear(block):
            if len(matrix.outs) == 2:
                self._shard(matrix, "column")
            elif len(matrix.ins) == 2:
                self._shard(matrix, "row")
        linear = self._linear(block)
        if isinstance(block.node.owner, eqx.nn.MultiheadAttention) and len(linear) == 4:
            self._shard_together(block, linear[:3], linear[3:])
        elif linear:
            self._shard_residual(block, widths)
        self._shard_chains(block.own, widths | self.widths(block.all))
        # A dict is sorted by name, which may be the other way round.
        if isinstance(block.node.owner, dict):
            self._shard_chains(block.own[::-1], widths)

    def _shard(
        self, matrix: WeightMatrix, side: Side, fused: int = 1, heads: int | None = None
    ) -> None:
        """Shards a matrix on its output (column-parallel) or on its input (row-parallel).

        `fused` is the number of equal matrices that are fused in it. `heads` are not split
        themselves.
        """
        dim, outer = matrix.ins[0], matrix.out_size
        if side == "column":
            dim, outer = matrix.outs[0], matrix.in_size
        size = matrix.leaf.shape[dim]
        what = "size"
        if len(matrix.ins) + len(matrix.outs) > 2:
            what = "number of heads"
        if matrix.groups > 1:
            self._replicate(matrix, f"convolution in {matrix.groups} groups", outer)
        elif heads is not None and heads % self.n:
            self._replicate(matrix, indivisible("number of heads", heads, self.n), outer)
        elif size % (self.n * fused):
            self._replicate(matrix, indivisible(what, size // fused, self.n), outer)
        else:
            self.shardings[matrix.leaf.index] = ModelSharding(dim, f"{side}-parallel", outer)
            if matrix.bias is None:
                return
            # The bias of a column-parallel matrix is added to the outputs, and sharded like these.
            place = None
            if side == "column" and size in matrix.bias.shape[matrix.stack :]:
                place = matrix.bias.shape.index(size, matrix.stack)
            reason = f"bias of a {side}-parallel matrix"
            self.shardings[matrix.bias.index] = ModelSharding(place, reason)

    def _replicate(self, matrix: WeightMatrix, reason: str, outer: int | None = None) -> None:
        """Replicates a matrix and its bias."""
        self.shardings[matrix.leaf.index] = ModelSharding(None, reason, outer)
        if matrix.bias is not None:
            self.shardings[matrix.bias.index] = ModelSharding(None, "like its matrix")

    def _shard_residual(self, block: Block, widths: set[int]) -> None:
        """Shards pairs of matrices, from the residual stream and back, on the size between them."""
        linear = self._linear(block)
        # A size that an embedding has too, or else the one that most of them have on one side; ties
        # go to the smaller one, as in a single pair.
        sizes: Counter[int] = Counter()
        for matrix in linear:
            sizes.update({matrix.in_size, matrix.out_size})  # a square matrix counts once

        def likelihood(size: int) -> tuple[bool, int, bool, int]:
            return size in self.shared, sizes[size], size in widths, -size

        width = max(sizes, key=likelihood)
        # Neither another width nor the window of a convolution is the size between two.
        no_inner = {*widths, *WINDOWS} - {width}
        squares: Matrices = []
        reading: Matrices = []
        writing: Matrices = []
        for matrix in linear:
            if matrix.in_size == matrix.out_size == width:
                squares.append(matrix)
            elif matrix.in_size == width:
                reading.append(matrix)
            elif matrix.out_size == width and matrix.in_size not in no_inner:
                writing.append(matrix)
        outputs = self._outputs(block, squares, reading, writing)
        rows = list(outputs)
        for matrix in writing:
            is_read = any(_reads(x.out_size, matrix.in_size) for x in reading)
            if is_read and matrix not in outputs:
                rows.append(matrix)
        columns: Matrices = []
        for matrix in squares:
            if outputs and matrix not in outputs:
                columns.append(matrix)
        counts = Counter(map(attrgetter("out_size"), reading))
        for matrix in reading:
            size = matrix.out_size
            # Keys and values may be narrower than queries, and are two.
            is_narrow = counts[size] > 1 and any(not x.in_size % size for x in outputs)
            if is_narrow or any(_reads(size, row.in_size) for row in rows):
                columns.append(matrix)
        if columns and rows:
            self._shard_together(block, columns, rows)

    def _outputs(
        self, block: Block, squares: Matrices, reading: Matrices, writing: Matrices
    ) -> Matrices:
        """The output matrices of attention, which shapes do not tell where they are square.

        It is the one with such a name, or else the last of the square ones.
        """
        depth = len(block.node.path)
        named: Matrices = []
        for matrix in (*squares, *writing):
            if any(map(_OUTPUT.fullmatch, matrix.leaf.path[depth:])):
                named.append(matrix)
        if named and len(squares) + len(reading) > 1:
            return named
        # Query, key and value may be in a block of their own, beside their output.
        parent = next(x for x in self.tree.blocks if x.node.path == block.node.path[:-1])
        above = [matrix for matrix in self._linear(parent) if matrix.is_square]
        if len(squares) == 3 and len(above) == 1:
            return above
        # They may be fused in one matrix.
        is_fused = any(_reads(matrix.out_size, matrix.in_size) for matrix in reading)
        if len(squares) > 1 or is_fused:
            return squares[-1:]
        return []

    def _shard_together(self, block: Block, columns: Matrices, rows: Matrices) -> None:
        """Shards matrices on their outputs, and others, which read these, on their inputs."""
        heads = _int_field(block.node.owner, _HEADS)
        kv_heads = _int_field(block.node.owner, _KV_HEADS) or heads
        for matrix in columns:
            # As many equal parts as a gate and its value, or query, key and value, in one matrix.
            size = matrix.out_size
            fused, inner = min((size // gcd(size, row.in_size), row.in_size) for row in rows)
            if size < inner:
                self._shard(matrix, "column", fused, kv_heads)
            else:
                self._shard(matrix, "column", fused, heads)
        for matrix in rows:
            self._shard(matrix, "row", heads=heads)

    def _shard_chains(self, matrices: Sequence[WeightMatrix | None], widths: set[int]) -> None:
        """Shards chains of matrices, each of which reads the one before: column, row, column."""
        chains: list[Matrices] = [[]]
        for matrix in matrices:
            if matrix is None or matrix.kind == "table" or not self._undecided([matrix]):
                chains.append([])
                continue
            if chains[-1] and not _follows(chains[-1][-1], matrix):
                chains.append([])
            chains[-1].append(matrix)
        for chain in chains:
            self._shard_chain(chain, widths)

    def _shard_chain(self, chain: Matrices, widths: set[int]) -> None:
        if len(chain) < 2:
            return  # `shard_tree` shards it
        is_read_in_parts = False  # whether the matrix before is column-parallel
        for matrix in chain:
            if is_read_in_parts:
                self._shard(matrix, "row")
                is_read_in_parts = False
            elif matrix.out_size in widths:
                continue  # `shard_tree` replicates it
            # As the logits of a few classes.
            elif matrix is chain[-1] and _is_narrow(matrix):
                self._replicate(matrix, _narrow(matrix))
            else:
                self._shard(matrix, "column")
                is_read_in_parts = self.shardings[matrix.leaf.index].dim is not None

    def _shard_tables_and_heads(self) -> None:
        """Shards tables and heads, which are outside of layers and have no bias, on the vocabulary.

        Tables of positions or types have fewer rows, and are replicated.
        """
        matrices = self.tree.matrices
        most = max(self.widths(matrices), default=0)
        vocabulary_sides: list[tuple[int, int, WeightMatrix]] = []
        for matrix in self._undecided(matrices):
            is_known = matrix.is_oriented or matrix.bias is not None or _is_in_layer(matrix)
            if matrix.kind == "table" or (matrix.is_flat and not is_known):
                dim = self._vocabulary_dim(matrix)
                vocabulary_sides.append((matrix.leaf.shape[dim], dim, matrix))
                most = max(most, matrix.leaf.shape[dim])
        # The largest first, since it is a vocabulary.
        for size, dim, matrix in sorted(vocabulary_sides, key=lambda side: -side[0]):
            elements = matrix.in_size * matrix.out_size
            outer = elements // size
            # Both sides may be widths, as of a pooler, or of what projects to another width.
            is_between = matrix.is_square or {size, outer} <= self.widths(matrices)
            if is_between and not _is_table(matrix) and size not in self.vocabularies:
                continue
            has_rows_first = dim == min(matrix.ins + matrix.outs)
            if elements < LARGE:
                self._replicate(matrix, f"small, {elements:,} elements")
            elif has_rows_first and 2 * size < most:
                self._replicate(matrix, f"table of {size} rows, small", outer)
            else:
                reason = "vocabulary-parallel"
                if size % self.n:
                    dim, reason = None, indivisible("vocabulary", size, self.n)
                self.vocabularies.add(size)
                self.shardings[matrix.leaf.index] = ModelSharding(dim, reason, outer)

    def _vocabulary_dim(self, matrix: WeightMatrix) -> int:
        """The dimension of a table or a head that is not the width of the residual stream."""
        (ins,), (outs,) = matrix.ins, matrix.outs
        if matrix.kind == "table" or (matrix.is_square and _is_table(matrix)):
            return min(ins, outs)
        widths, in_layer = self.widths(self.tree.matrices), self.tree.counts[layer_of(matrix.leaf)]

        def likelihood(size: int) -> tuple[bool, int]:
            # If no width is known, most arrays have it.
            return size in widths, in_layer[size]

        if likelihood(matrix.in_size) < likelihood(matrix.out_size):
            return ins
        return outs


def _is_in_layer(matrix: WeightMatrix) -> bool:
    """Whether a matrix is in a repeated layer, of a list or stacked."""
    return matrix.stack > 0 or bool(layer_of(matrix.leaf))


def _shared_sizes(matrices: Matrices) -> set[int]:
    """The sizes of sides that all layers have, and a matrix outside of layers too."""
    outside: set[int] = set()
    by_layer: dict[tuple[str, ...], set[int]] = {}
    for matrix in matrices:
        sizes = {matrix.in_size, matrix.out_size}
        if _is_in_layer(matrix):
            by_layer.setdefault(layer_of(matrix.leaf), set()).update(sizes)
        else:
            outside.update(sizes)
    return outside.intersection(*by_layer.values())


def _is_narrow(matrix: WeightMatrix) -> bool:
    return matrix.out_size * _NARROW < matrix.in_size


def _narrow(matrix: WeightMatrix) -> str:
    """The reason for not sharding a narrow matrix."""
    return f"output of {matrix.out_size} from {matrix.in_size}, narrow"


def _is_table(matrix: WeightMatrix) -> bool:
    """Whether a module or a name tells that rows of a matrix are looked up."""
    return matrix.kind == "table" or "embed" in matrix.leaf.name.lower()


def _reads(size: int, inner: int) -> bool:
    """Whether a matrix with `inner` inputs may read an output: of one matrix, or of two or three in
    one, as of a gate and its value, or of query, key and value."""
    return size in (inner, 2 * inner, 3 * inner)


def _follows(before: WeightMatrix, after: WeightMatrix) -> bool:
    """Whether the outputs of a matrix are as many as the inputs of the next one."""
    if before.kind == "conv" and after.kind == "linear":
        return after.in_size % before.out_size == 0  # flattened, channels first
    return before.out_size == after.in_size


def _int_field(owner: PyTree, names: tuple[str, ...]) -> int | None:
    """The first of some fields of a module that is an integer."""
    for name in names:
        value = getattr(owner, name, None)
        if isinstance(owner, eqx.Module) and isinstance(value, int):
            return value
    return None
