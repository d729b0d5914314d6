"""Shards matrices over `model` by the rules of RedCoast (arXiv:2310.16355, section 3.1).

Consecutive matrices are sharded alternately, on the output and then on the input: the sharded
output of one matrix is the sharded input of the next, so that one all-reduce is enough for both.
In attention, query, key and value are sharded on their outputs, and the output matrix on its input.
Embeddings and language-model heads are sharded on the vocabulary. For transformers, these are the
rules of Megatron-LM (arXiv:1909.08053, section 3).
"""

import re
from dataclasses import dataclass
from math import gcd, prod
from typing import Any, Literal

import equinox as eqx

from ..tree._leaves import LARGE
from ..tree._overrides import multiples_near
from ._matrices import Group, Known, WeightMatrix, layer_of

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


Splits = dict[int, Split]
Matrices = list[WeightMatrix]


def shard_matrices(group: Group, known: Known, n: int) -> Splits:
    """Shards all matrices. Attention is first, because it shows the residual width."""
    parents = {id(m): g for g in group for m in g.members.values() if isinstance(m, Group)}
    attention: Splits = {}
    for part in group:
        attention |= _shard_attention(part, parents.get(id(part)), attention, n)
    done = dict(attention)
    # Chains in lists may be sharded on any size, and others not on the residual widths.
    for part in group:
        done |= _shard_chains(part, done, set(), n) if part.ordered else {}
    tables = _shard_tables(group, _outer_sizes(group, attention), n)
    done |= tables
    widths = _outer_sizes(group, tables)
    for part in group:
        done |= _shard_pairs(part, done, widths | _outer_sizes(part, attention), known, n)
    done |= _shard_heads(group, done, vocabularies(done), n)
    residual = _outer_sizes(group, done)
    for part in group:
        done |= _shard_chains(part, done, residual, n)
    residual = _outer_sizes(group, done)
    for matrix in group.matrices():
        done |= {} if matrix.index in done else _shard_alone(matrix, residual, n)
    return done


def vocabularies(splits: Splits) -> set[int]:
    """The sizes of all vocabularies, sharded or not."""
    return {split.vocabulary for split in splits.values() if split.vocabulary is not None}


def _shard(
    matrix: WeightMatrix,
    side: Literal["column", "row"],
    n: int,
    reason: str,
    *,
    parts: int = 1,
    heads: int | None = None,
) -> Splits:
    """Shards a matrix over `n` devices, on its output (column-parallel) or input (row-parallel).

    `parts` is the number of equal matrices that are fused in it. `heads` are not split themselves.
    """
    column = side == "column"
    dim = (matrix.outs if column else matrix.ins)[0]
    outer = matrix.in_size if column else matrix.out_size
    size = matrix.weight.shape[dim]
    if matrix.groups > 1:
        return _replicate(matrix, f"convolution in {matrix.groups} groups", outer)
    if heads is not None and heads % n:
        return _replicate(matrix, indivisible("number of heads", heads, n), outer)
    if size % (n * parts):
        what = "number of heads" if len(matrix.ins) + len(matrix.outs) > 2 else "size"
        return _replicate(matrix, indivisible(what, size // parts, n), outer)
    splits = {matrix.index: Split(dim, f"{side}-parallel, {reason}", outer)}
    if matrix.bias is not None and column:
        shape = matrix.bias.shape
        fits = next((d for d in range(matrix.stack, len(shape)) if shape[d] == size), None)
        why = "does not have its matrix's output size" if fits is None else "like its matrix"
        splits[matrix.bias.index] = Split(fits, why)
    elif matrix.bias is not None:
        splits[matrix.bias.index] = Split(None, "bias of a row-parallel matrix")
    return splits


def _replicate(matrix: WeightMatrix, reason: str, outer: int | None = None) -> Splits:
    """Replicates a matrix and its bias."""
    splits = {matrix.index: Split(None, reason, outer)}
    if matrix.bias is not None:
        splits[matrix.bias.index] = Split(None, "like its matrix")
    return splits


def indivisible(what: str, size: int, n: int) -> str:
    """The reason for not sharding an indivisible size."""
    return f"{what} {size} is not a multiple of model={n} ({multiples_near(size, n)} would be)"


def _undecided(group: Group, done: Splits) -> list[WeightMatrix | None]:
    """The matrices near a group, and None for others between them."""
    near = group.near()
    return [m if m and m.kind != "table" and m.index not in done else None for m in near]


def _outer_sizes(group: Group, done: Splits) -> set[int]:
    """The sizes of the sides of matrices that are not sharded: widths of the residual stream."""
    splits = (done.get(matrix.index) for matrix in group.matrices())
    return {split.outer for split in splits if split is not None and split.outer is not None}


def _shard_attention(group: Group, parent: Group | None, done: Splits, n: int) -> Splits:
    """Returns the splits of the group's attention matrices, if it has any."""
    matrices = _linear(group, done)
    if explicit := _explicit_heads(matrices, n):
        return explicit
    beside = _linear(parent, done) if parent is not None else []
    inputs = {m.role: m for m in matrices if m.role in _INPUTS}
    if set(inputs) not in ({"query", "key", "value"}, {"query", "fused"}, {"fused"}):
        inputs = {} if group.ordered else _inputs_by_shape(matrices, beside)
    if not inputs:
        return {}
    heads = _int_field(group.owner, _HEADS)
    kv_heads = _int_field(group.owner, _KV_HEADS) or heads
    splits: Splits = {}
    for role, matrix in inputs.items():
        # The sizes of fused matrices are multiples of the keys' size.
        parts = matrix.out_size // gcd(matrix.in_size, matrix.out_size) if role == "fused" else 1
        count = kv_heads if role in ("key", "value") else heads
        what = "query, key and value in one matrix" if role == "fused" else role
        splits |= _shard(matrix, "column", n, f"attention {what}", parts=parts, heads=count)
    if (output := _output(matrices, inputs) or _output(beside, inputs)) is not None:
        splits |= _shard(output, "row", n, "attention output", heads=heads)
    return splits


def _linear(group: Group, done: Splits) -> Matrices:
    return [m for m in _undecided(group, done) if m is not None and m.kind == "linear"]


def _explicit_heads(matrices: Matrices, n: int) -> Splits:
    """Shards matrices with a separate dimension of heads, which shows their sides."""
    splits: Splits = {}
    apart = any(m.outs[-1] - m.outs[0] > 1 for m in matrices)  # (experts, width, hidden)
    what = "heads or experts" if apart else "heads"
    for matrix in matrices:
        if len(matrix.outs) == 2:
            splits |= _shard(matrix, "column", n, f"{what} of {matrix.name}")
        if len(matrix.ins) == 2:
            splits |= _shard(matrix, "row", n, f"{what} into {matrix.name}")
    return splits


def _inputs_by_shape(matrices: Matrices, beside: Matrices) -> dict[str, WeightMatrix]:
    """Finds query, key and value by four patterns of shapes.

    Four square matrices; two square ones and two others that are alike (grouped queries); three
    square ones and one in the parent; one square one and one with three times as many outputs.
    """
    squares = [m for m in matrices if m.square]
    if len({m.in_size for m in squares}) != 1:
        return {}
    width = squares[0].in_size
    read = {m.in_size for m in matrices}  # by the next matrix of an MLP
    others = [m for m in matrices if m.in_size == width != m.out_size and m.out_size not in read]
    sizes = [m.out_size for m in others]
    last = [m.out_size for m in beside if m.square] == [width]
    if len(squares) == 4 or (len(squares) == len(matrices) == 3 and last):
        return dict(zip(("query", "key", "value"), squares[:3], strict=True))
    if len(squares) == 2 and len(sizes) == 2 and sizes[0] == sizes[1]:
        return {"query": squares[0], "key": others[0], "value": others[1]}
    if len(squares) == 1 and sizes == [3 * width]:
        return {"fused": others[0]}
    return {}


def _output(matrices: Matrices, inputs: dict[str, WeightMatrix]) -> WeightMatrix | None:
    """The last matrix from the heads' width back, if possible one with the name of an output."""
    query = inputs.get("query") or inputs["fused"]
    heads = {inputs[role].out_size for role in ("query", "value") if role in inputs}
    ids = {matrix.index for matrix in inputs.values()}
    fits = [
        m
        for m in matrices
        if m.index not in ids
        and m.in_size in (heads or {query.in_size})
        and (m.out_size == query.in_size or m.role == "output")
    ]
    return max(reversed(fits), key=lambda m: m.role == "output", default=None)


def _int_field(owner: Any, names: tuple[str, ...]) -> int | None:
    """The first of some fields of a module that is an integer."""
    if not isinstance(owner, eqx.Module):
        return None
    values = (getattr(owner, name, None) for name in names)
    return next((value for value in values if isinstance(value, int)), None)


def _shard_pairs(group: Group, done: Splits, residual: set[int], known: Known, n: int) -> Splits:
    """Shards pairs of matrices, from the residual width to an inner one and back, on the inner one.

    `residual` are the input widths of attention below the group, which are not inner widths. Names
    show the direction of square matrices.
    """
    matrices = [matrix for matrix in _undecided(group, done) if matrix is not None]
    if group.ordered or len(matrices) < 2:
        return {}
    # The size that most of the matrices have on one side; ties go by the arrays of the layer.
    sizes = known.sizes[layer_of(matrices[0].weight)]
    sides = [(matrix.in_size, matrix.out_size) for matrix in matrices]
    score = lambda size: (sum(size in pair for pair in sides), sizes[size])
    width = max((size for pair in sides for size in pair), key=score)
    ups = [m for m in matrices if m.in_size == width and (not m.square or m.role == "up")]
    downs = [m for m in matrices if m.out_size == width and (not m.square or m.role == "down")]
    splits: Splits = {}
    for down in downs:
        inner = down.square or down.in_size not in residual
        mates = [up for up in ups if inner and up.out_size in (down.in_size, 2 * down.in_size)]
        if mates:
            splits |= _shard(down, "row", n, f"pairs with {mates[-1].name}")
        for up in mates:
            parts = up.out_size // down.in_size
            splits |= _shard(up, "column", n, f"pairs with {down.name}", parts=parts)
    return splits


def _shard_chains(group: Group, done: Splits, residual: set[int], n: int) -> Splits:
    """Shards chains of matrices, each the input of the next: column, row, column, row."""
    splits: Splits = {}
    runs: list[Matrices] = [[]]
    for matrix in _undecided(group, done):
        if matrix is not None and runs[-1] and _follows(runs[-1][-1], matrix):
            runs[-1].append(matrix)
        else:
            runs.append([] if matrix is None else [matrix])
    place = f"{group.path[-1]}/" if group.ordered and group.path else ""
    for run in runs:
        splits |= _alternate(run, residual, place, n) if len(run) > 1 else {}
    return splits


def _follows(before: WeightMatrix, after: WeightMatrix) -> bool:
    if before.kind == "conv" and after.kind == "linear":
        return after.in_size % before.out_size == 0  # flattened, channels first
    return before.out_size == after.in_size


def _alternate(run: list[WeightMatrix], residual: set[int], place: str, n: int) -> Splits:
    splits: Splits = {}
    before: WeightMatrix | None = None
    for matrix, after in zip(run, [*run[1:], None], strict=True):
        if before is not None:
            splits |= _shard(matrix, "row", n, f"pairs with {place}{before.name}")
            before = None
        elif matrix.out_size in residual:
            continue  # `_shard_alone` replicates it
        elif after is not None:
            splits |= _shard(matrix, "column", n, f"pairs with {place}{after.name}")
            before = matrix if splits[matrix.index].dim is not None else None
        elif matrix.out_size * _NARROW < matrix.in_size:
            reason = f"output of {matrix.out_size} from {matrix.in_size}, narrow"
            splits |= _replicate(matrix, reason)
        else:
            splits |= _shard(matrix, "column", n, "output")
    return splits


def _shard_alone(matrix: WeightMatrix, residual: set[int], n: int) -> Splits:
    """Shards a matrix without a partner on its output, if it is divisible and large."""
    if matrix.out_size in residual:
        return _replicate(matrix, "no matrix follows to pair with, and its output is replicated")
    elements = prod(matrix.weight.shape[matrix.stack :])
    if elements < LARGE:
        return _replicate(matrix, f"small, {elements:,} elements")
    return _shard(matrix, "column", n, "output")


def _shard_tables(root: Group, residual: set[int], n: int) -> Splits:
    """Shards token embeddings on the vocabulary. Positions and token types are replicated."""
    splits: Splits = {}
    for table in root.matrices():
        if table.kind != "table":
            continue
        if any(_SMALL.search(part) for part in table.weight.path[-3:]):
            splits[table.index] = Split(None, "table of positions or types, small", table.out_size)
        else:
            turned = table.in_size in residual and table.out_size not in residual
            splits[table.index] = _vocabulary(table, (table.outs if turned else table.ins)[0], n)
    return splits


def _shard_heads(root: Group, done: Splits, sizes: set[int], n: int) -> Splits:
    """Shards matrices outside layers that have the vocabulary on one side, and their biases."""
    splits: Splits = {}
    for matrix in root.matrices():
        dims = [d for d in (*matrix.outs, *matrix.ins) if matrix.weight.shape[d] in sizes]
        # If both sides have the size of the vocabulary, a name must identify the head.
        found = len(dims) == 1 or (dims and _HEAD.search(matrix.name))
        if not found or matrix.kind != "linear" or matrix.index in done or layer_of(matrix.weight):
            continue
        split = splits[matrix.index] = _vocabulary(matrix, dims[0], n)
        if matrix.bias is not None:
            shape, size = matrix.bias.shape, matrix.weight.shape[dims[0]]
            fits = split.dim in matrix.outs and shape[-1:] == (size,)
            splits[matrix.bias.index] = Split(len(shape) - 1 if fits else None, "like its matrix")
    return splits


def _vocabulary(matrix: WeightMatrix, dim: int, n: int) -> Split:
    size = matrix.weight.shape[dim]
    outer = matrix.in_size if dim in matrix.outs else matrix.out_size
    rows = max(matrix.in_size, matrix.out_size) if matrix.kind == "table" else None
    if size % n:
        return Split(None, indivisible("vocabulary", size, n), outer, rows)
    return Split(dim, "vocabulary-parallel", outer, rows)
