"""Cross-entropy of tokens, also where the logits of a whole text do not fit in memory."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Integer

Weights = Bool[Array, "*batch"] | Integer[Array, "*batch"] | Float[Array, "*batch"]


def cross_entropy(
    logits: Float[Array, "*batch vocab"],
    targets: Integer[Array, "*batch"],
    *,
    mask: Weights | None = None,
) -> Float[Array, ""]:
    """The mean over tokens of the negative log-probability of the right one, in nats.

    **Arguments:**

    - `logits`: of each token, in any floating dtype; sums are taken in float32 or wider.
    - `targets`: the right tokens, below the vocabulary's size; one that is not gives NaN.
    - `mask`: 1 at tokens that count and 0 at those that do not, whose targets may be anything; or
        any weights of the mean. Where all are 0, so is the loss.

    **Returns:**

    A scalar, in float32 or wider. Of several batches the means weighted by `jnp.sum(mask)` make up
    the mean of all: a `loss_fn` returns that as `{"weight": ...}`.

    **Raises:**

    `ValueError` if shapes do not fit together, or `targets` are no integers.

    !!! Example

        ```python
        from redcoast.losses import cross_entropy

        def loss_fn(model, batch, key):
            tokens, real = batch["tokens"], batch["mask"]
            mask = real[:, 1:] * real[:, :-1]  # real tokens behind real ones
            logits = model(tokens, mask=real, key=key)[:, :-1]
            loss = cross_entropy(logits, tokens[:, 1:], mask=mask)
            return loss, {"weight": jnp.sum(mask)}
        ```
    """
    _check_targets("logits", logits, targets, mask)
    return _mean(_token_losses(logits, targets), mask)


def chunked_cross_entropy(
    hidden: Float[Array, "batch seq width"],
    unembed: Callable[[Float[Array, "batch chunk width"]], Float[Array, "batch chunk vocab"]],
    targets: Integer[Array, "batch seq"],
    *,
    mask: Weights | None = None,
    chunk: int = 128,
) -> Float[Array, ""]:
    """`cross_entropy(unembed(hidden), targets, mask=mask)`, with the logits of one chunk of the
    sequence at a time in memory.

    The logits are computed once more in the backward pass. Values and gradients, those of the
    arrays in `unembed` too, are the same up to rounding; the latter are added up chunk by chunk in
    the dtype of the arrays.

    **Arguments:**

    - `hidden`: what the logits are made of, such as `model.hidden(tokens)`.
    - `unembed`: makes them, such as `model.unembed`. Where `model` is what is differentiated,
        gradients flow into its arrays.
    - `targets`, `mask`: as for [`redcoast.losses.cross_entropy`][].
    - `chunk`: of at most how many positions in the sequence there are logits at a time.

    **Returns:**

    A scalar, in float32 or wider.

    **Raises:**

    `ValueError` if shapes do not fit together, `targets` are no integers, or `chunk` is below 1.

    !!! Example

        ```python
        from redcoast.losses import chunked_cross_entropy

        def loss_fn(model, batch, key):
            tokens, real = batch["tokens"], batch["mask"]
            mask = real[:, 1:] * real[:, :-1]  # real tokens behind real ones
            hidden = model.hidden(tokens, mask=real, key=key)[:, :-1]
            loss = chunked_cross_entropy(hidden, model.unembed, tokens[:, 1:], mask=mask)
            return loss, {"weight": jnp.sum(mask)}
        ```
    """
    _check_targets("hidden", hidden, targets, mask)
    if chunk < 1:
        raise ValueError(f"`chunk` is {chunk}. There must be at least 1 position in a chunk.")

    def body(_: None, inputs: tuple[Array, Array]) -> tuple[None, Array]:
        hidden, targets = inputs
        return None, _token_losses(unembed(hidden), targets)

    # Inside a scan the compiler cannot undo remat, and need not be kept from it.
    body = jax.checkpoint(body, prevent_cse=False)
    _, losses = jax.lax.scan(body, None, (_in_chunks(hidden, chunk), _in_chunks(targets, chunk)))
    losses = jnp.moveaxis(losses, 0, 1).reshape(hidden.shape[0], -1)
    return _mean(losses[:, : hidden.shape[1]], mask)


def _check_targets(name: str, x: Array, targets: Array, mask: Array | None) -> None:
    if not jnp.issubdtype(targets.dtype, jnp.integer):
        raise ValueError(f"`targets` are {targets.dtype}. They must be integers: the right tokens.")
    if targets.shape != x.shape[:-1] or (mask is not None and mask.shape != targets.shape):
        given = "" if mask is None else f", and `mask` of {mask.shape}"
        raise ValueError(
            f"`{name}` is of shape {x.shape}, so there must be targets of shape {x.shape[:-1]} and "
            f"a mask like them; but `targets` is of shape {targets.shape}{given}."
        )


def _in_chunks(x: Array, chunk: int) -> Array:
    """Chunks of the sequence, which are equal in length, first; then the batch."""
    batch, seq, *rest = x.shape
    count = -(-seq // chunk)
    size = -(-seq // count)
    x = jnp.pad(x, [(0, 0), (0, count * size - seq)] + [(0, 0)] * len(rest))
    return jnp.moveaxis(x.reshape(batch, count, size, *rest), 1, 0)


def _token_losses(
    logits: Float[Array, "*batch vocab"], targets: Integer[Array, "*batch"]
) -> Float[Array, "*batch"]:
    logits = logits.astype(np.promote_types(logits.dtype, np.float32))
    vocab, targets = logits.shape[-1], targets.astype(jnp.int32)
    # Not looked up but summed: over a vocabulary that is split, that sends a number for each token.
    tokens = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    right = jnp.sum(jnp.where(tokens == targets[..., None], logits, 0), axis=-1)
    losses = jax.nn.logsumexp(logits, axis=-1) - right
    return jnp.where((targets >= 0) & (targets < vocab), losses, jnp.nan)


def _mean(losses: Float[Array, "*batch"], mask: Weights | None) -> Float[Array, ""]:
    if mask is None:
        return jnp.mean(losses)
    weights = mask.astype(losses.dtype)
    total = jnp.sum(weights)
    summed = jnp.sum(jnp.where(weights == 0, 0, losses) * weights)
    return summed / jnp.where(total == 0, 1, total)
