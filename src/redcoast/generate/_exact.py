"""Decoding and scoring with the same arithmetic, so that log-probabilities agree to the last bit.

A floating-point sum depends on its order, and compilers choose the order by the shapes of arrays.
So both read one token at a time, in blocks with a fixed number of rows, into caches whose size is a
power of two, and every row begins in the first slot. Each device has all weights and computes whole
rows. So the bits of a row depend neither on other rows nor on the mesh.
"""

import dataclasses
import functools as ft
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int, Integer, PyTree

from ..core._pytree import SplitTree
from ..core._target import divided_into, target
from ..core._tracing import on_one_device, traced_mesh
from ..models._inputs import AnyArray, Mask
from ..models._rotary import LongRope, RopeScaling
from ._check_arguments import check_no_encoder, check_token_options
from ._compiled import Padded, Result, trim
from ._generated import Generated
from ._prefill import as_real, mesh_of, slots_of
from ._prompt import align_left, append_tokens, at_own_columns, bucket, pad_columns
from ._request import Logits, Prompt, Request, Rows
from ._row_turns import Turns, blank_turns, choose_next
from ._sampling import score_tokens

AnyMesh = Mesh | AbstractMesh | None

# The number of rows of a block. Larger blocks read the weights less often. On CPUs, more rows than
# this are hardly faster, and blocks are padded.
ROWS, ROWS_OF_ACCELERATORS = {"cpu": 16}, 64


def check_exact(model: PyTree) -> None:
    """Raises if the log-probabilities of a model depend on more than the tokens before."""
    check_no_encoder(model, "exact")
    scaling = getattr(model.config, "rope_scaling", None)
    by_length = isinstance(scaling, RopeScaling) and scaling.kind == "dynamic"
    if by_length or isinstance(scaling, LongRope):
        raise ValueError(
            "`exact` is not supported with this `rope_scaling`, because the rotations of all "
            "tokens depend on the final length of their row. Pass `exact=False`."
        )


def decode_exactly(
    model: PyTree, tokens: AnyArray, mask: Mask | None, request: Request
) -> Result | Padded:
    """Generates tokens, of which the log-probabilities are those of `score_exactly`."""
    # The size of the cache is a part of the arithmetic: sums over slots are ordered by it.
    slots = slots_of(tokens.shape[1] + int(request.limit))
    split_model = SplitTree.of(model)
    if is_traced((split_model, tokens, mask, request.key)):
        return _decode(split_model, tokens, mask, request, slots, traced_mesh())
    length = bucket(tokens.shape[1])  # so that few lengths are compiled
    real = pad_columns(as_real(tokens, mask), length, left=False)
    tokens = pad_columns(np.asarray(tokens), length, left=False).astype(np.int32)
    new = _decode_compiled(split_model, tokens, real, request, slots, mesh_of(model))
    return trim(new, int(request.limit))


def score_exactly(
    model: PyTree, tokens: Integer[AnyArray, "batch seq"], mask: Mask | None
) -> Float[Array, "batch seq-1"]:
    """Returns the log-probability of each token but the first, and 0 at padding."""
    split_model = SplitTree.of(model)
    if is_traced((split_model, tokens, mask)):
        return _score(jax.lax.stop_gradient(split_model), tokens, mask, traced_mesh())
    return _score_compiled(split_model, tokens, mask, mesh_of(model))


def is_traced(inputs: PyTree) -> bool:
    # The call may be inside a traced function even if no argument is traced.
    return any(isinstance(x, Tracer) for x in jax.tree.leaves((inputs, jnp.zeros(()))))


def _decode(
    model: SplitTree,
    tokens: AnyArray,
    mask: Mask | None,
    request: Request,
    slots: int,
    mesh: AnyMesh,
) -> Padded:
    tokens, lengths = align_left(tokens, mask)
    tokens, lengths = (jnp.repeat(x, request.copies, axis=0) for x in (tokens, lengths))  # results
    numbers = jnp.arange(tokens.shape[0], dtype=jnp.int32)  # random numbers are those of a result

    def run(shared: tuple[SplitTree, Request], rows: tuple[Array, ...]) -> tuple[Array, ...]:
        model, request = shared
        return _decode_block(model.join(), request, slots, *rows)

    new, scores, counts = _in_blocks(run, (model, request), (tokens, lengths, numbers), mesh)
    if not request.scored:
        return new
    return Generated(new, scores, jnp.arange(new.shape[1])[None] < counts[:, None])


_decode_compiled = jax.jit(_decode, static_argnums=(4, 5))


def _score(
    model: SplitTree, tokens: AnyArray, mask: Mask | None, mesh: AnyMesh
) -> Float[Array, "batch seq"]:
    aligned, lengths = align_left(tokens, mask)
    slots = slots_of(tokens.shape[1])

    def run(model: SplitTree, rows: tuple[Array, Array]) -> Array:
        return _score_block(model.join(), slots, *rows)

    scores = _in_blocks(run, model, (aligned, lengths), mesh)
    if mask is None:
        return scores[:, :-1]  # nothing follows the last token
    return at_own_columns(scores, mask)


_score_compiled = jax.jit(_score, static_argnums=3)


def _in_blocks(
    run: Callable[[PyTree, PyTree], PyTree], shared: PyTree, rows: PyTree, mesh: AnyMesh
) -> PyTree:
    """Computes `run(shared, rows)` for blocks of rows, one after the other on each device.

    Rows are padded with zeros to whole blocks.
    """
    devices = 1
    if mesh is not None:
        devices = math.prod(mesh.shape.values())
    size = ROWS.get(target().platform, ROWS_OF_ACCELERATORS)
    batch = jax.tree.leaves(rows)[0].shape[0]
    padding = -batch % (devices * size)  # the same blocks on each device
    rows = jax.tree.map(lambda x: jnp.pad(x, [(0, padding)] + [(0, 0)] * (x.ndim - 1)), rows)

    def on_device(shared: PyTree, rows: PyTree) -> PyTree:
        blocks = jax.tree.map(lambda x: x.reshape(-1, size, *x.shape[1:]), rows)
        # Inside, models must not choose another arithmetic for a mesh, or for a sequence that is
        # split.
        with on_one_device(), divided_into(1):
            results = jax.lax.map(ft.partial(run, shared), blocks)
        return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), results)

    if devices > 1 and mesh is not None:
        # The compiler partitions nothing inside, so that it has the same program on every mesh.
        over = P(mesh.axis_names)
        on_device = jax.shard_map(
            on_device, mesh=mesh, in_specs=(P(), over), out_specs=over, check_vma=False
        )
    return jax.tree.map(lambda x: x[:batch], on_device(shared, rows))


def _decode_block(
    model: PyTree, request: Request, slots: int, tokens: Prompt, lengths: Rows, numbers: Rows
) -> tuple[Int[Array, "rows room"], Float[Array, "rows room"], Rows]:
    """Generates tokens for a block. Rows without a prompt are padding."""
    last = jnp.maximum(lengths - 1, 0)  # the column of the last token of each prompt
    # The history of a row has its prompt on the right, next to its new tokens.
    padding_left = jnp.arange(tokens.shape[1])[None] >= (tokens.shape[1] - lengths)[:, None]
    shift = lengths[:, None] + jnp.arange(tokens.shape[1])[None]
    prompt = jnp.take_along_axis(tokens, shift % tokens.shape[1], axis=1)
    unscored = dataclasses.replace(request, scored=False)
    turns = blank_turns(jnp.where(padding_left, prompt, -1), numbers, unscored)
    turns = dataclasses.replace(turns, ended=lengths == 0)  # padding rows never begin
    carry = jnp.zeros((), jnp.int32), model.init_cache(tokens.shape[0], slots), turns

    def keep_going(carry: tuple[Array, PyTree, Turns]) -> Bool[Array, ""]:
        return ~jnp.all(carry[2].ended)

    def step(carry: tuple[Array, PyTree, Turns]) -> tuple[Array, PyTree, Turns]:
        i, cache, turns = carry
        of_prompt = _column(tokens, jnp.minimum(i, tokens.shape[1] - 1))
        logits, cache = _read_token(model, jnp.where(i <= last, of_prompt, turns.tokens), cache)
        check_token_options(request, logits.shape[-1])
        after = choose_next(logits, turns, unscored)
        if request.scored:
            scores = _score_token(logits, after.tokens)
            column = jnp.where(turns.ended, request.room, turns.counts)  # `room` is out of bounds
            rows = jnp.arange(len(scores))
            scores = turns.scores.at[rows, column].set(scores, mode="drop")
            after = dataclasses.replace(after, scores=scores)
        # While the prompt is read, the model's choices are dropped.
        keep = lambda x, y: jnp.where((i < last).reshape(-1, *[1] * (x.ndim - 1)), x, y)
        return i + 1, cache, jax.tree.map(keep, turns, after)

    _, _, turns = jax.lax.while_loop(keep_going, step, carry)
    return turns.new, turns.scores, turns.counts


def _score_block(
    model: PyTree, slots: int, tokens: Int[Array, "rows seq"], lengths: Rows
) -> Float[Array, "rows seq"]:
    """Returns the log-probability of the token after each one; 0 after the last one."""
    steps = jnp.max(lengths) - 1  # the last token has no successor to score
    scores = jnp.zeros(tokens.shape, jnp.float32)
    carry = jnp.zeros((), jnp.int32), model.init_cache(tokens.shape[0], slots), scores

    def keep_going(carry: tuple[Array, PyTree, Array]) -> Bool[Array, ""]:
        return carry[0] < steps

    def step(carry: tuple[Array, PyTree, Array]) -> tuple[Array, PyTree, Array]:
        i, cache, scores = carry
        logits, cache = _read_token(model, _column(tokens, i), cache)
        new = jnp.where(i + 1 < lengths, _score_token(logits, _column(tokens, i + 1)), 0)
        return i + 1, cache, jax.lax.dynamic_update_slice_in_dim(scores, new[:, None], i, 1)

    return jax.lax.while_loop(keep_going, step, carry)[2]


def _column(x: Int[Array, "rows columns"], i: Int[Array, ""]) -> Rows:
    return jax.lax.dynamic_index_in_dim(x, i, 1, keepdims=False)


def _read_token(model: PyTree, tokens: Rows, cache: PyTree) -> tuple[Logits, PyTree]:
    """Reads a token of each row. The compiler fuses nothing into it that differs elsewhere."""
    logits, cache = append_tokens(model, jax.lax.optimization_barrier(tokens), cache)
    return jax.lax.optimization_barrier(logits), cache


def _score_token(logits: Logits, tokens: Rows) -> Float[Array, " rows"]:
    logits, tokens = jax.lax.optimization_barrier((logits, tokens))
    return jax.lax.optimization_barrier(score_tokens(logits, tokens))
