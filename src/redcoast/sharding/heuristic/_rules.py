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
from math import gcd
from typing import Literal

import equinox as eqx
from jaxtyping import PyTree

from ..tree._leaves import LARGE, Leaf
from ..tree._overrides import multiples_near
from ._matrices import NORMS, RECURRENT, WINDOWS, Block, Tree, WeightMatrix, layer_of, long_dims

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


def shard_arrays(tree: Tree, n: int) -> dict[int, ModelSharding]:
    """Decides which dimension of each array of a tree is sharded over `n` devices, by its index."""
    rules = _Rules(tree, n)
    rules.shard_matrices()
    rules.shard_vectors()
    return rules.shardings


@dataclass(frozen=True)
class _Rules:
    """The rules, which fill `shardings`, by the index of the array.

    `shared` are the sizes of sides that all layers have and a matrix outside of them, such as an
    embedding, too, and `vocabularies` the sizes of the vocabularies, sharded or not.
    """

    tree: Tree
    n: int
    shardings: dict[int, ModelSharding] = field(default_factory=dict)
    shared: set[int] = field(default_factory=set)
    vocabularies: set[int] = field(default_factory=set)

    def shard_matrices(self) -> None:
        matrices = self.tree.matrices
        outside: list[Block] = []
        self.shared.update(_shared_sizes(self.tree))
        # Layers show the width of the residual stream, by which tables and heads are known.
        for block in self.tree.blocks:
            if any(matrix and self.tree.is_in_layer(matrix.leaf) for matrix in block.own):
                self._shard_block(block, self.widths(block.all))
            else:
                outside.append(block)
        if self.shardings:
            self._shard_tables_and_heads()
        for block in outside:
            self._shard_block(block, self.widths(matrices))
        self._shard_tables_and_heads()
        # A matrix without a partner is sharded on its outputs, if it is divisible and large.
        for matrix in self._undecided(matrices):
            if matrix.out_size in self.widths(matrices):
                reason = "no matrix follows to pair with, and its output is replicated"
                self.shardings[matrix.leaf.index] = ModelSharding(None, reason)
            elif matrix.leaf.size < LARGE:
                self.shardings[matrix.leaf.index] = _small(matrix)
            elif _is_narrow(matrix):
                self.shardings[matrix.leaf.index] = _narrow(matrix)
            else:
                self._shard(matrix, "column")

    def shard_vectors(self) -> None:
        """Shards biases like the outputs that they are added to, and replicates other vectors."""
        # A vector with the width of the residual stream is no bias of the logits.
        self.vocabularies.difference_update(self.widths(self.tree.matrices))
        for matrix in self.tree.matrices:
            if matrix.bias is not None:
                sharding = _sharding_of_bias(matrix, matrix.bias, self.shardings[matrix.leaf.index])
                self.shardings[matrix.bias.index] = sharding
        for block in self.tree.blocks:
            for leaf in block.node.children.values():
                if isinstance(leaf, Leaf) and leaf.index not in self.shardings:
                    self.shardings[leaf.index] = self._sharding_of_vector(leaf, block.node.owner)

    def _sharding_of_vector(self, leaf: Leaf, owner: PyTree) -> ModelSharding:
        """The sharding of an array that no matrix has: of a bias of the logits, or none."""
        # Its gates are stacked in one matrix, and each step needs all of them.
        if isinstance(owner, RECURRENT):
            return ModelSharding(None, "recurrent, every step needs its full output")
        if isinstance(owner, NORMS):
            return ModelSharding(None, "norm scale")
        dims = long_dims(leaf)
        if not dims:
            return ModelSharding(None, "scalar")
        if len(dims) > 1:
            return ModelSharding(None, "not recognised as a matrix")
        if self.tree.is_in_layer(leaf) or leaf.size not in self.vocabularies:
            return ModelSharding(None, "vector")
        if leaf.size % self.n:
            return ModelSharding(None, indivisible("vocabulary", leaf.size, self.n))
        return ModelSharding(dims[0], "bias of the vocabulary")

    def widths(self, matrices: Iterable[WeightMatrix]) -> set[int]:
        """The sizes of sides that are not sharded: widths of the residual stream."""
        indices = self.shardings.keys() & {matrix.leaf.index for matrix in matrices}
        outer = {self.shardings[index].outer for index in indices}
        return {size for size in outer if size is not None}

    def _undecided(self, matrices: Iterable[WeightMatrix]) -> Matrices:
        """The matrices without a sharding. One that has a sharding keeps it."""
        return [matrix for matrix in matrices if matrix.leaf.index not in self.shardings]

    def _linear(self, block: Block) -> Matrices:
        """The matrices of a block without a sharding, but for tables and kernels."""
        undecided = self._undecided(filter(None, block.own))
        return [matrix for matrix in undecided if matrix.kind == "linear"]

    def _shard_block(self, block: Block, widths: set[int]) -> None:
        """Shards the matrices of a block. `widths` are known ones of the residual stream."""
        # Layers in a list are a chain, which may be sharded on any size.
        if block.node.ordered:
            self._shard_chain(block.own, set())
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
        self._shard_chain(block.own, widths | self.widths(block.all))
        # A dict is sorted by name, which may be the other way round.
        if isinstance(block.node.owner, dict):
            self._shard_chain(block.own[::-1], widths)

    def _shard(
        self, matrix: WeightMatrix, side: Side, fused: int = 1, heads: int | None = None
    ) -> None:
        """Shards a matrix on its outputs (column-parallel) or on its inputs (row-parallel).

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
        reason = f"{side}-parallel"
        if matrix.groups > 1:
            dim, reason = None, f"convolution in {matrix.groups} groups"
        elif heads is not None and heads % self.n:
            dim, reason = None, indivisible("number of heads", heads, self.n)
        elif size % (self.n * fused):
            dim, reason = None, indivisible(what, size // fused, self.n)
        self.shardings[matrix.leaf.index] = ModelSharding(dim, reason, outer)

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
        # Neither a width nor the window of a convolution is the size between two.
        no_inner = {width, *widths, *WINDOWS}
        squares = [x for x in linear if x.in_size == x.out_size == width]
        reading = [x for x in linear if x.in_size == width != x.out_size]
        writing = [x for x in linear if x.out_size == width and x.in_size not in no_inner]
        outputs = self._outputs(block, squares, reading, writing)
        rows = list(outputs)
        for matrix in writing:
            if any(_reads(x.out_size, matrix.in_size) for x in reading):
                rows.append(matrix)
        columns: Matrices = []
        if outputs:
            columns = [matrix for matrix in squares if matrix not in outputs]
        counts = Counter(matrix.out_size for matrix in reading)
        for matrix in reading:
            size = matrix.out_size
            # Keys and values may be narrower than queries, and are two.
            is_narrow = counts[size] > 1 and any(not x.in_size % size for x in outputs)
            if is_narrow or any(_reads(size, row.in_size) for row in rows):
                columns.append(matrix)
        if columns:  # which an output or another row reads
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

    def _shard_chain(self, matrices: Sequence[WeightMatrix | None], widths: set[int]) -> None:
        """Shards matrices that each read the one before: column, row, column."""
        # What is decided, or is not a matrix alone, ends a chain.
        free: list[WeightMatrix | None] = [None]
        for matrix in matrices:
            if matrix is None or matrix.kind == "table" or matrix.leaf.index in self.shardings:
                free.append(None)
            else:
                free.append(matrix)
        free.append(None)
        is_read_in_parts = False  # whether the matrix before is column-parallel
        for before, matrix, after in zip(free, free[1:], free[2:], strict=False):
            follows, leads = _follows(before, matrix), _follows(matrix, after)
            is_read_in_parts &= follows
            # `shard_matrices` decides a matrix alone, and one that writes the residual stream.
            if matrix is None or not (follows or leads):
                continue
            if is_read_in_parts:
                self._shard(matrix, "row")
                is_read_in_parts = False
            elif matrix.out_size in widths:
                continue
            # As the logits of a few classes.
            elif not leads and _is_narrow(matrix):
                self.shardings[matrix.leaf.index] = _narrow(matrix)
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
            is_in_layer = self.tree.is_in_layer(matrix.leaf)
            is_known = matrix.is_oriented or matrix.bias is not None or is_in_layer
            if matrix.kind == "table" or (matrix.is_flat and not is_known):
                dim = self._vocabulary_dim(matrix)
                vocabulary_sides.append((matrix.leaf.shape[dim], dim, matrix))
                most = max(most, matrix.leaf.shape[dim])
        # The largest first, since it is a vocabulary.
        for size, dim, matrix in sorted(vocabulary_sides, key=lambda side: -side[0]):
            outer = matrix.leaf.size // size
            # Both sides may be widths, as of a pooler, or of what projects to another width.
            is_between = matrix.is_square or {size, outer} <= self.widths(matrices)
            if is_between and not _is_table(matrix) and size not in self.vocabularies:
                continue
            has_rows_first = dim == min(matrix.ins + matrix.outs)
            if matrix.leaf.size < LARGE:
                self.shardings[matrix.leaf.index] = _small(matrix)
            elif has_rows_first and 2 * size < most:
                self.shardings[matrix.leaf.index] = ModelSharding(
                    None, f"table of {size} rows, small", outer
                )
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


def _sharding_of_bias(matrix: WeightMatrix, bias: Leaf, sharding: ModelSharding) -> ModelSharding:
    """A bias is added to the outputs of its matrix, and sharded like these."""
    if sharding.dim is None:
        return ModelSharding(None, "like its matrix")
    if sharding.dim in matrix.ins:
        return ModelSharding(None, "bias of a row-parallel matrix")
    dim = None
    size = matrix.leaf.shape[sharding.dim]
    if size in bias.shape:
        dim = bias.shape.index(size)
    return ModelSharding(dim, "bias of a column-parallel matrix")


def _shared_sizes(tree: Tree) -> set[int]:
    """The sizes of sides that all layers have, and a matrix outside of layers too."""
    outside: set[int] = set()
    by_layer: dict[tuple[str, ...], set[int]] = {}
    for matrix in tree.matrices:
        sizes = {matrix.in_size, matrix.out_size}
        if tree.is_in_layer(matrix.leaf):
            by_layer.setdefault(layer_of(matrix.leaf), set()).update(sizes)
        else:
            outside.update(sizes)
    return outside.intersection(*by_layer.values())


def _is_narrow(matrix: WeightMatrix) -> bool:
    return matrix.out_size * _NARROW < matrix.in_size


def _narrow(matrix: WeightMatrix) -> ModelSharding:
    return ModelSharding(None, f"output of {matrix.out_size} from {matrix.in_size}, narrow")


def _small(matrix: WeightMatrix) -> ModelSharding:
    return ModelSharding(None, f"small, {matrix.leaf.size:,} elements")


def _is_table(matrix: WeightMatrix) -> bool:
    """Whether a module or a name tells that rows of a matrix are looked up."""
    return matrix.kind == "table" or "embed" in matrix.leaf.name.lower()


def _reads(size: int, inner: int) -> bool:
    """Whether a matrix with `inner` inputs may read an output: of one matrix, or of two or three in
    one, as of a gate and its value, or of query, key and value."""
    return size in (inner, 2 * inner, 3 * inner)


def _follows(before: WeightMatrix | None, after: WeightMatrix | None) -> bool:
    """Whether the outputs of a matrix are as many as the inputs of the next one."""
    if before is None or after is None:
        return False
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
