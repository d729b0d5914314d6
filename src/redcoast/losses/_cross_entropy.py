"""Cross-entropy losses and log-probabilities of tokens, whole or in chunks."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.extend.core import jaxpr_as_fun
from jaxtyping import Array, Bool, Float, Integer, PyTree

from ..core._control_flow import close_jaxpr, consts_of, open_jaxpr
from ..core._errors import check_functions, check_integer
from ..core._target import sequence_parts
from ..core._token_losses import token_losses
from ..core._tracing import size_of_axis
from ._check_values import at_least_float32, check_arrays

# Up to this many bytes of logits in float32, a device computes them whole.
MOST_WHOLE = 2**31
# The bytes of logits in float32 of a chunk, by default. The arrays of `unembed` are read, and their
# gradients added, once for each chunk, so small chunks are slow.
_BYTES_OF_CHUNK = 2**30

Weights = Bool[Array, "*batch"] | Integer[Array, "*batch"] | Float[Array, "*batch"]


def cross_entropy(
    logits: Float[Array, "*batch vocab"],
    targets: Integer[Array, "*batch"],
    *,
    mask: Weights | None = None,
) -> Float[Array, ""]:
    """Computes the mean negative log-probability of the target tokens, in nats.

    **Arguments:**

    - `logits`: the logits of each token, of any floating dtype. Sums are computed in float32 or
        wider.
    - `targets`: the target tokens, from 0 to `vocab - 1`. Any other value gives NaN.
    - `mask`: 1 at tokens that count and 0 at tokens to ignore, whose targets may be anything; or
        weights of the mean. If all are 0, the loss is 0.

    **Returns:**

    A scalar, in float32 or wider. To average the losses of several batches, weight each by
    `jnp.sum(mask)`; a `loss_fn` returns this weight as `{"weight": ...}`.

    **Raises:**

    `ValueError` if the shapes do not match, if there are no tokens and no `mask`, or if `targets`
    are not integers; `TypeError` if an argument is no array.

    !!! Example

        ```python
        from redcoast.losses import cross_entropy

        def loss_fn(model, batch, key):
            tokens, real = batch["tokens"], batch["mask"]
            mask = real[:, 1:] * real[:, :-1]  # real tokens that follow a real token
            logits = model(tokens, mask=real, key=key)[:, :-1]
            loss = cross_entropy(logits, tokens[:, 1:], mask=mask)
            return loss, {"weight": jnp.sum(mask)}
        ```
    """
    _check_targets("logits", logits, targets, mask)
    return mean_of_tokens(token_losses(logits, targets), mask)  # (*batch,), then a scalar


def chunked_cross_entropy(
    hidden: Float[Array, "batch seq width"],
    unembed: Callable[[Float[Array, "batch chunk width"]], Float[Array, "batch chunk vocab"]],
    targets: Integer[Array, "batch seq"],
    *,
    mask: Weights | None = None,
    chunk: int | None = None,
) -> Float[Array, ""]:
    """Computes `cross_entropy(unembed(hidden), targets, mask=mask)` with the logits of only one
    chunk of the sequence in memory at a time, if they are large.

    The logits of chunks are recomputed in the backward pass. The loss and all gradients, including
    the gradients of the arrays in `unembed`, are the same up to rounding. The latter are
    accumulated over chunks in the dtype of the arrays.

    **Arguments:**

    - `hidden`: the hidden states before the logits, such as `model.hidden(tokens)`.
    - `unembed`: computes the logits of hidden states, such as `model.unembed`. If the loss is
        differentiated with respect to `model`, gradients flow into the arrays of `unembed`.
    - `targets`, `mask`: see [`redcoast.losses.cross_entropy`][].
    - `chunk`: the maximum number of positions in a chunk. By default, logits of up to 2 GiB (in
        float32, on each device of the mesh) are computed whole, and others in chunks of at most
        1 GiB.

    **Returns:**

    A scalar, in float32 or wider.

    **Raises:**

    `ValueError` if the shapes do not match, if `targets` are not integers, if `chunk` is less than
    1, or if `unembed` returns no logits of the hidden states; `TypeError` if an argument has
    another type.

    !!! Example

        ```python
        from redcoast.losses import chunked_cross_entropy

        def loss_fn(model, batch, key):
            tokens, real = batch["tokens"], batch["mask"]
            mask = real[:, 1:] * real[:, :-1]  # real tokens that follow a real token
            hidden = model.hidden(tokens, mask=real, key=key)[:, :-1]
            loss = chunked_cross_entropy(hidden, model.unembed, tokens[:, 1:], mask=mask)
            return loss, {"weight": jnp.sum(mask)}
        ```
    """
    _check_targets("hidden", hidden, targets, mask)
    return mean_of_tokens(_chunked_losses(hidden, unembed, targets, chunk), mask)


def token_log_probabilities(
    hidden: Float[Array, "batch seq width"],
    unembed: Callable[[Float[Array, "batch chunk width"]], Float[Array, "batch chunk vocab"]],
    tokens: Integer[Array, "batch seq"],
    *,
    chunk: int | None = None,
) -> Float[Array, "batch seq"]:
    """Computes the log-probabilities of tokens, in nats, with the logits of only one chunk of the
    sequence in memory at a time, if they are large.

    The logits of chunks are recomputed in the backward pass, as in
    [`redcoast.losses.chunked_cross_entropy`][].

    **Arguments:**

    - `hidden`: the hidden states before the logits, such as `model.hidden(tokens)[:, :-1]`.
    - `unembed`: computes the logits of hidden states, such as `model.unembed`. To sample with a
        `temperature` other than 1, pass `lambda hidden: model.unembed(hidden) / temperature`.
    - `tokens`: the token that follows each hidden state, from 0 to `vocab - 1`. Any other value
        gives NaN.
    - `chunk`: the maximum number of positions in a chunk. By default, logits of up to 2 GiB (in
        float32, on each device of the mesh) are computed whole, and others in chunks of at most
        1 GiB.

    **Returns:**

    The log-probability of each token, in float32 or wider.

    **Raises:**

    `ValueError` if the shapes do not match, if `tokens` are not integers, if `chunk` is less than
    1, or if `unembed` returns no logits of the hidden states; `TypeError` if an argument has
    another type.

    !!! Example

        ```python
        from redcoast.losses import token_log_probabilities

        def policy_gradient(model, batch, key):
            tokens = batch["tokens"]  # prompts and sampled answers
            hidden = model.hidden(tokens, mask=batch["mask"])[:, :-1]
            log_probs = token_log_probabilities(hidden, model.unembed, tokens[:, 1:])
            ratio = jnp.exp(log_probs - batch["sampled_with"])
            weight = jnp.sum(batch["answered"])
            total = jnp.sum(ratio * batch["advantages"] * batch["answered"])
            return -total / weight, {"weight": weight}
        ```
    """
    _check_targets("hidden", hidden, tokens, None, name="tokens")
    return -_chunked_losses(hidden, unembed, tokens, chunk)


def _chunked_losses(
    hidden: Float[Array, "batch seq width"],
    unembed: Callable[[Array], Array],
    targets: Integer[Array, "batch seq"],
    chunk: int | None,
) -> Float[Array, "batch seq"]:
    """The losses of all tokens, in chunks."""
    check_functions(unembed=unembed)
    if chunk is None:
        chunk = _chunk_by_size(hidden, unembed)
        if chunk is None:
            return _losses_of(unembed(hidden), targets)
    check_integer("chunk", chunk)
    if targets.size == 0:
        return _losses_of(unembed(hidden), targets)  # there is no chunk
    if sequence_parts() > 1:
        return _losses_in_parts(hidden, unembed, targets, chunk)

    def body(_: None, inputs: tuple[Array, Array]) -> tuple[None, Array]:
        hidden, targets = inputs
        return None, _losses_of(unembed(hidden), targets)

    # Inside a scan the compiler cannot undo rematerialisation by CSE.
    body = jax.checkpoint(body, prevent_cse=False)
    # (chunks, batch, chunk): a scan stacks what its steps return.
    _, losses = jax.lax.scan(body, None, (in_chunks(hidden, chunk), in_chunks(targets, chunk)))
    return join_chunks(losses, hidden.shape[1])


def _losses_of(logits: PyTree, targets: Integer[Array, "..."]) -> Float[Array, "..."]:
    """The losses of a chunk. Raises `ValueError` if a user's `unembed` returned no logits of it."""
    if logits.shape[:-1] != targets.shape:
        raise ValueError(
            f"`unembed` returned an array of shape {logits.shape} for hidden states of shape "
            f"{(*targets.shape, 'width')}. It must return logits of shape "
            f"{(*targets.shape, 'vocab')}."
        )
    return token_losses(logits, targets)


def _chunk_by_size(
    hidden: Float[Array, "batch seq width"], unembed: Callable[[Array], Array]
) -> int | None:
    """The number of positions in a chunk, or None if the logits are small enough to be whole."""
    batch, seq, width = hidden.shape
    position = jax.ShapeDtypeStruct((batch, 1, width), hidden.dtype)
    vocab = jax.eval_shape(unembed, position).shape[-1]
    of_position = 4 * batch * vocab
    # Which axes there are is asked only if it matters: a program that depends on the mesh is
    # traced again for each.
    if of_position * seq <= MOST_WHOLE:
        return None
    for axis in ("data", "fsdp"):
        if batch % size_of_axis(axis) == 0:
            batch //= size_of_axis(axis)  # the rows of a device
    if vocab % size_of_axis("model") == 0:
        vocab //= size_of_axis("model")  # the head is split, and so are its logits
    of_position = 4 * batch * vocab
    # Each device has a part of the sequence, if the plan splits it.
    if of_position * seq <= MOST_WHOLE * sequence_parts():
        return None
    return max(1, _BYTES_OF_CHUNK // of_position)


def _losses_in_parts(
    hidden: Float[Array, "batch seq width"],
    unembed: Callable[[Array], Array],
    targets: Integer[Array, "batch seq"],
    chunk: int,
) -> Float[Array, "batch seq"]:
    """The losses of all tokens of a sequence that is split over devices.

    Each chunk has tokens of every part. The arrays of `unembed` are repeated for each part before
    the loop, which moves nothing, so that their gradients are summed over the devices once, after
    the loop, and not in every chunk.
    """
    batch, seq, width = hidden.shape
    parts = sequence_parts()
    count = -(-seq // (parts * chunk))  # chunks of each part
    size = -(-seq // (parts * count))  # positions of a part in a chunk

    def divided(x: Array) -> Array:
        x = jnp.pad(x, [(0, 0), (0, parts * count * size - seq)] + [(0, 0)] * (x.ndim - 2))
        # (count, batch, parts, size, ...), with whole chunks at the end of the sequence.
        return jnp.moveaxis(x.reshape(batch, parts, count, size, *x.shape[2:]), 2, 0)

    # The arrays of `unembed` are hidden in a function: a trace shows them as constants.
    traced = jax.make_jaxpr(unembed)(jax.ShapeDtypeStruct((batch, size, width), hidden.dtype))
    consts = consts_of(traced)
    arrays: list[Array] = []
    in_axes: list[int | None] = []
    for x in consts:
        if jnp.issubdtype(x.dtype, jnp.inexact):  # only these have gradients
            arrays.append(jnp.broadcast_to(x[None], (parts, *x.shape)))
            in_axes.append(0)
        else:
            arrays.append(x)
            in_axes.append(None)

    def of_part(arrays: list[Array], hidden: Array, targets: Array) -> Array:
        (logits,) = jaxpr_as_fun(close_jaxpr(open_jaxpr(traced), arrays))(hidden)
        return _losses_of(logits, targets)

    def body(_: None, inputs: tuple[Array, Array]) -> tuple[None, Array]:
        return None, jax.vmap(of_part, (in_axes, 1, 1), 1)(arrays, *inputs)  # (batch, parts, size)

    # Inside a scan the compiler cannot undo rematerialisation by CSE.
    body = jax.checkpoint(body, prevent_cse=False)
    _, losses = jax.lax.scan(body, None, (divided(hidden), divided(targets)))
    # (batch, parts, count, size): the order of the sequence again.
    return jnp.moveaxis(losses, 0, 2).reshape(batch, -1)[:, :seq]


def pairwise_sigmoid(logits: Float[Array, "images texts"]) -> Float[Array, ""]:
    """Computes the loss of SigLIP (Zhai et al., 2023, <https://arxiv.org/abs/2303.15343>): each
    image belongs to the text of the same index, and to no other.

    **Arguments:**

    - `logits`: the logits of each image and each text, such as `model(pixels, tokens)` of a
        `redcoast.models.Siglip`.

    **Returns:**

    A scalar, in float32 or wider: the sum over all texts, averaged over images.

    **Raises:**

    `ValueError` if there are not as many images as texts; `TypeError` if an argument has another
    type.

    !!! Example

        ```python
        from redcoast.losses import pairwise_sigmoid

        def loss_fn(model, batch, key):
            return pairwise_sigmoid(model(batch["pixels"], batch["tokens"], key=key))
        ```
    """
    check_arrays(logits=logits)
    if logits.ndim != 2 or logits.shape[0] != logits.shape[1] or not logits.size:
        raise ValueError(
            "`logits` must have one row and one column for each pair of an image and a text, but "
            f"has shape {logits.shape}."
        )
    wide = at_least_float32(logits)
    signs = 2 * jnp.eye(len(wide), dtype=wide.dtype) - 1  # 1 for pairs, and -1 for all others
    # Each pair is a decision by itself, so no softmax needs the logits of all devices.
    return -jnp.mean(jnp.sum(jax.nn.log_sigmoid(signs * wide), axis=1))


def _check_targets(
    of: str, x: PyTree, targets: PyTree, mask: PyTree, *, name: str = "targets"
) -> None:
    check_arrays(**{of: x, name: targets})
    if mask is not None:
        check_arrays(mask=mask)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"`{of}` must be floating-point numbers, but has dtype {x.dtype}.")
    if not jnp.issubdtype(targets.dtype, jnp.integer):
        raise ValueError(f"`{name}` must be integers (token ids), but have dtype {targets.dtype}.")
    if of == "hidden" and x.ndim != 3:
        raise ValueError(f"`hidden` has shape {x.shape}, but must be (batch, seq, width).")
    if targets.shape != x.shape[:-1] or (mask is not None and mask.shape != targets.shape):
        of_mask = ""
        if mask is not None:
            of_mask = f" and `mask` has shape {mask.shape}"
        both = "`targets` and `mask`"
        if name == "tokens":
            both = "`tokens`"
        raise ValueError(
            f"`{of}` has shape {x.shape}, so {both} must have shape {x.shape[:-1]}; but "
            f"`{name}` has shape {targets.shape}{of_mask}."
        )


def in_chunks(x: Array, chunk: int) -> Array:
    """Pads and splits the sequence into chunks of equal length, along a new first dimension."""
    batch, seq, *rest = x.shape
    count = -(-seq // chunk)
    size = -(-seq // count)
    # Chunks of equal length, of which the last has less than one position of padding for each
    # chunk.
    x = jnp.pad(x, [(0, 0), (0, count * size - seq)] + [(0, 0)] * len(rest))
    return jnp.moveaxis(x.reshape(batch, count, size, *rest), 1, 0)  # (chunks, batch, chunk, ...)


def join_chunks(chunks: Array, seq: int) -> Array:
    """The inverse of `in_chunks`, for a sequence of `seq` positions."""
    rows = jnp.moveaxis(chunks, 0, 1)  # (batch, chunks, chunk, ...)
    batch, count, size, *rest = rows.shape
    return rows.reshape(batch, count * size, *rest)[:, :seq]


def mean_of_tokens(losses: Float[Array, "*batch"], mask: Weights | None) -> Float[Array, ""]:
    """Returns the mean of losses, weighted by a mask if there is one."""
    if mask is None:
        if losses.size == 0:
            raise ValueError(
                f"There are no tokens to average: the targets have shape {losses.shape}. Pass a "
                "`mask` of this shape, with which the loss of no tokens is 0."
            )
        return jnp.mean(losses)
    weights = mask.astype(losses.dtype)
    total = jnp.sum(weights)
    # What is masked may be NaN or infinite, and 0 times it would be NaN.
    summed = jnp.sum(jnp.where(weights == 0, 0, losses) * weights)
    # If nothing counts, the loss is 0 and has gradients of 0.
    return summed / jnp.where(total == 0, 1, total)
