"""Shards matrices over `model` by the rules of RedCoast (arXiv:2310.16355, section 3.1).

Consecutive matrices are sharded alternately, on the output and then on the input: the sharded
output of one matrix is the sharded input of the next, so that one all-reduce is enough for both.
In attention, query, key and value are sharded on their outputs, and the output matrix on its input.
Embeddings and language-model heads are sharded on the vocabulary. For transformers, these are the
rules of Megatron-LM (arXiv:1909.08053, section 3).
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from math import gcd, prod
from typing import Literal

import equinox as eqx
from jaxtyping import PyTree

from ..tree._leaves import LARGE
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
_HEADS = ("num_heads", "n_heads", "n_head", "num_attention_heads", "heads")
_KV_HEADS = ("num_kv_heads", "n_kv_heads", "num_key_value_heads", "kv_heads")


@dataclass(frozen=True)
class Split:
    """The dimension of an array that is sharded over `model`, or None, and the reason.

    `outer` is the size of the other side of a matrix, which is not sharded. It is also set if a
    matrix is not sharded only because its size is not divisible. `vocabulary` is the number of rows
    of a table that has a dimension of the vocabulary.
    """

    dim: int | None
    reason: str
    outer: int | None = None
    vocabulary: int | None = None


Splits = dict[int, Split]  # by the index of the array


def shard_matrices(blocks: list[Block], sizes: SizeCounts, n: int) -> Splits:
    """The splits of all matrices and of their biases over `n` devices."""
    by_path = {block.path: block for block in blocks}
    matrices = blocks[-1].below
    splits: Splits = {}
    # Attention is first, because it shows the width of the residual stream.
    for block in blocks:
        parent = by_path.get(block.path[:-1]) if block.path else None
        _shard_attention(block, parent, splits, n)
    attention = dict(splits)
    # Chains in lists may be sharded on any size, and others not on the residual widths.
    for block in blocks:
        if block.is_ordered:
            _shard_chains(block, set(), splits, n)
    tables = [matrix for matrix in matrices if matrix.kind == "table"]
    _shard_tables(tables, _outer_sizes(matrices, attention), splits, n)
    widths = _outer_sizes(tables, splits)
    for block in blocks:
        _shard_pairs(block, widths | _outer_sizes(block.below, attention), sizes, splits, n)
    _shard_heads(matrices, splits, n)
    residual = _outer_sizes(matrices, splits)
    for block in blocks:
        _shard_chains(block, residual, splits, n)
    residual = _outer_sizes(matrices, splits)
    for matrix in matrices:
        if matrix.index not in splits:
            _shard_alone(matrix, residual, splits, n)
    return splits


def vocabularies(splits: Splits) -> set[int]:
    """The sizes of all vocabularies, sharded or not."""
    return {split.vocabulary for split in splits.values() if split.vocabulary is not None}


def indivisible(what: str, size: int, n: int) -> str:
    """The reason for not sharding an indivisible size."""
    return f"{what} {size} is not a multiple of model={n} ({multiples_near(size, n)} would be)"


def _shard(
    matrix: WeightMatrix,
    side: Literal["column", "row"],
    reason: str,
    splits: Splits,
    n: int,
    *,
    fused: int = 1,
    heads: int | None = None,
) -> None:
    """Shards a matrix on its output (column-parallel) or on its input (row-parallel).

    `fused` is the number of equal matrices that are fused in it. `heads` are not split themselves.
    """
    dim, outer = matrix.ins[0], matrix.out_size
    if side == "column":
        dim, outer = matrix.outs[0], matrix.in_size
    size = matrix.weight.shape[dim]
    has_heads = len(matrix.ins) + len(matrix.outs) > 2
    if matrix.groups > 1:
        _replicate(matrix, f"convolution in {matrix.groups} groups", splits, outer)
    elif heads is not None and heads % n:
        _replicate(matrix, indivisible("number of heads", heads, n), splits, outer)
    elif size % (n * fused):
        what = "number of heads" if has_heads else "size"
        _replicate(matrix, indivisible(what, size // fused, n), splits, outer)
    else:
        splits[matrix.index] = Split(dim, f"{side}-parallel, {reason}", outer)
        if matrix.bias is not None:
            splits[matrix.bias.index] = _split_of_bias(matrix, side, size)


def _split_of_bias(matrix: WeightMatrix, side: Literal["column", "row"], size: int) -> Split:
    """The bias of a column-parallel matrix is sharded like the outputs that it is added to."""
    if side == "row":
        return Split(None, "bias of a row-parallel matrix")
    assert matrix.bias is not None
    for dim in range(matrix.stack, len(matrix.bias.shape)):
        if matrix.bias.shape[dim] == size:
            return Split(dim, "like its matrix")
    return Split(None, "does not have its matrix's output size")


def _replicate(matrix: WeightMatrix, reason: str, splits: Splits, outer: int | None = None) -> None:
    """Replicates a matrix and its bias."""
    splits[matrix.index] = Split(None, reason, outer)
    if matrix.bias is not None:
        splits[matrix.bias.index] = Split(None, "like its matrix")


def _undecided(block: Block, splits: Splits) -> list[WeightMatrix | None]:
    """The matrices near a block without a split, and None for others between them."""
    undecided: list[WeightMatrix | None] = []
    for matrix in block.near:
        if matrix is not None and (matrix.kind == "table" or matrix.index in splits):
            matrix = None
        undecided.append(matrix)
    return undecided


def _outer_sizes(matrices: Iterable[WeightMatrix], splits: Splits) -> set[int]:
    """The sizes of the sides of matrices that are not sharded: widths of the residual stream."""
    outer = {splits[matrix.index].outer for matrix in matrices if matrix.index in splits}
    return {size for size in outer if size is not None}


def _shard_attention(block: Block, parent: Block | None, splits: Splits, n: int) -> None:
    """Shards the attention matrices of a block, if it has any."""
    matrices = _linear(block, splits)
    if _shard_explicit_heads(matrices, splits, n):
        return
    beside: list[WeightMatrix] = []
    if parent is not None:
        beside = _linear(parent, splits)
    inputs: dict[str | None, WeightMatrix] = {m.role: m for m in matrices if m.role in _INPUTS}
    if set(inputs) not in ({"query", "key", "value"}, {"query", "fused"}, {"fused"}):
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
            _shard(matrix, "column", what, splits, n, fused=fused, heads=heads)
        elif role == "query":
            _shard(matrix, "column", "attention query", splits, n, heads=heads)
        else:
            _shard(matrix, "column", f"attention {role}", splits, n, heads=kv_heads)
    output = _output(matrices, inputs) or _output(beside, inputs)
    if output is not None:
        _shard(output, "row", "attention output", splits, n, heads=heads)


def _linear(block: Block, splits: Splits) -> list[WeightMatrix]:
    undecided = _undecided(block, splits)
    return [matrix for matrix in undecided if matrix is not None and matrix.kind == "linear"]


def _shard_explicit_heads(matrices: list[WeightMatrix], splits: Splits, n: int) -> bool:
    """Shards matrices with a separate dimension of heads, which shows their sides."""
    columns = [matrix for matrix in matrices if len(matrix.outs) == 2]
    rows = [matrix for matrix in matrices if len(matrix.ins) == 2]
    # As of (experts, width, hidden), where the sides are not next to each other.
    apart = any(matrix.outs[1] - matrix.outs[0] > 1 for matrix in columns)
    what = "heads or experts" if apart else "heads"
    for matrix in columns:
        _shard(matrix, "column", f"{what} of {matrix.name}", splits, n)
    for matrix in rows:
        _shard(matrix, "row", f"{what} into {matrix.name}", splits, n)
    return bool(columns or rows)


def _inputs_by_shape(
    matrices: list[WeightMatrix], beside: list[WeightMatrix]
) -> dict[str | None, WeightMatrix]:
    """Finds query, key and value by four patterns of shapes.

    Four square matrices; two square ones and two others that are alike (grouped queries); three
    square ones and one in the parent; one square one and one with three times as many outputs.
    """
    squares = [matrix for matrix in matrices if matrix.is_square]
    if len({matrix.in_size for matrix in squares}) != 1:
        return {}
    width = squares[0].in_size
    # What the next matrix of an MLP reads is not of attention.
    others = [m for m in matrices if m.in_size == width and not m.is_square]
    inner = {matrix.in_size for matrix in matrices}
    others = [matrix for matrix in others if matrix.out_size not in inner]
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


def _output(
    matrices: list[WeightMatrix], inputs: dict[str | None, WeightMatrix]
) -> WeightMatrix | None:
    """The last matrix from the heads' width back, if possible one with the name of an output."""
    query = inputs.get("query") or inputs["fused"]
    widths = {inputs[role].out_size for role in ("query", "value") if role in inputs}
    widths = widths or {query.in_size}
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


def _shard_pairs(
    block: Block, residual: set[int], sizes: SizeCounts, splits: Splits, n: int
) -> None:
    """Shards pairs of matrices, from the residual width to an inner one and back, on the inner one.

    `residual` are the input widths of attention below the block, which are not inner widths. Names
    show the direction of square matrices.
    """
    matrices = [matrix for matrix in _undecided(block, splits) if matrix is not None]
    if block.is_ordered or len(matrices) < 2:
        return
    sides = [(matrix.in_size, matrix.out_size) for matrix in matrices]

    def frequency(size: int) -> tuple[int, int]:
        """How many matrices have it on one side; ties go by the arrays of the layer."""
        pairs = [pair for pair in sides if size in pair]
        return len(pairs), sizes.count(matrices[0].weight, size)

    width = max(sum(sides, ()), key=frequency)
    ups = [m for m in matrices if m.in_size == width and (not m.is_square or m.role == "up")]
    downs = [m for m in matrices if m.out_size == width and (not m.is_square or m.role == "down")]
    for down in downs:
        inner = down.in_size
        if inner in residual and not down.is_square:
            continue
        partners = [up for up in ups if up.out_size in (inner, 2 * inner)]
        if partners:
            _shard(down, "row", f"pairs with {partners[-1].name}", splits, n)
        for up in partners:
            fused = up.out_size // inner
            _shard(up, "column", f"pairs with {down.name}", splits, n, fused=fused)


def _shard_chains(block: Block, residual: set[int], splits: Splits, n: int) -> None:
    """Shards chains of matrices, each the input of the next: column, row, column, row."""
    chains: list[list[WeightMatrix]] = []
    before = None
    for matrix in _undecided(block, splits):
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
            _alternate(chain, residual, place, splits, n)


def _follows(before: WeightMatrix, after: WeightMatrix) -> bool:
    if before.kind == "conv" and after.kind == "linear":
        return after.in_size % before.out_size == 0  # flattened, channels first
    return before.out_size == after.in_size


def _alternate(
    chain: list[WeightMatrix], residual: set[int], place: str, splits: Splits, n: int
) -> None:
    column = None  # the matrix before, if it is column-parallel
    for i, matrix in enumerate(chain):
        if column is not None:
            _shard(matrix, "row", f"pairs with {place}{column.name}", splits, n)
            column = None
        elif matrix.out_size in residual:
            continue  # `_shard_alone` replicates it
        elif i + 1 < len(chain):
            _shard(matrix, "column", f"pairs with {place}{chain[i + 1].name}", splits, n)
            if splits[matrix.index].dim is not None:
                column = matrix
        elif matrix.out_size * _NARROW < matrix.in_size:
            reason = f"output of {matrix.out_size} from {matrix.in_size}, narrow"
            _replicate(matrix, reason, splits)
        else:
            _shard(matrix, "column", "output", splits, n)


def _shard_alone(matrix: WeightMatrix, residual: set[int], splits: Splits, n: int) -> None:
    """Shards a matrix without a partner on its output, if it is divisible and large."""
    elements = prod(matrix.weight.shape[matrix.stack :])
    if matrix.out_size in residual:
        reason = "no matrix follows to pair with, and its output is replicated"
        _replicate(matrix, reason, splits)
    elif elements < LARGE:
        _replicate(matrix, f"small, {elements:,} elements", splits)
    else:
        _shard(matrix, "column", "output", splits, n)


def _shard_tables(tables: list[WeightMatrix], residual: set[int], splits: Splits, n: int) -> None:
    """Shards token embeddings on the vocabulary. Positions and token types are replicated."""
    for table in tables:
        if any(_SMALL.search(part) for part in table.weight.path[-3:]):
            reason = "table of positions or types, small"
            splits[table.index] = Split(None, reason, table.out_size)
        elif table.in_size in residual and table.out_size not in residual:
            splits[table.index] = _vocabulary(table, table.outs[0], n)
        else:
            splits[table.index] = _vocabulary(table, table.ins[0], n)


def _shard_heads(matrices: list[WeightMatrix], splits: Splits, n: int) -> None:
    """Shards matrices outside layers that have the vocabulary on one side, and their biases."""
    sizes = vocabularies(splits)
    for matrix in matrices:
        if matrix.kind != "linear" or matrix.index in splits or layer_of(matrix.weight):
            continue
        shape = matrix.weight.shape
        dims = [d for d in (*matrix.outs, *matrix.ins) if shape[d] in sizes]
        # If both sides have the size of the vocabulary, a name must identify the head.
        if not dims or (len(dims) > 1 and not _HEAD.search(matrix.name)):
            continue
        split = _vocabulary(matrix, dims[0], n)
        splits[matrix.index] = split
        if matrix.bias is None:
            continue
        last = len(matrix.bias.shape) - 1
        if split.dim not in matrix.outs or matrix.bias.shape[last] != shape[dims[0]]:
            last = None
        splits[matrix.bias.index] = Split(last, "like its matrix")


def _vocabulary(matrix: WeightMatrix, dim: int, n: int) -> Split:
    """The split of a matrix along the dimension of the vocabulary."""
    size = matrix.weight.shape[dim]
    outer = matrix.in_size if dim in matrix.outs else matrix.out_size
    rows = None
    if matrix.kind == "table":
        rows = max(matrix.in_size, matrix.out_size)
    if size % n:
        return Split(None, indivisible("vocabulary", size, n), outer, rows)
    return Split(dim, "vocabulary-parallel", outer, rows)
