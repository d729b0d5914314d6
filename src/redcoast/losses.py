"""Losses over large vocabularies."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Integer

Weight = Bool[Array, "*batch"] | Integer[Array, "*batch"] | Float[Array, "*batch"]


def cross_entropy(
    logits: Float[Array, "*batch vocab"],
    targets: Integer[Array, "*batch"],
    *,
    mask: Weight | None = None,
) -> Float[Array, ""]:
    losses = _token_losses(logits, targets)
    return _mean(losses, mask)


def chunked_cross_entropy(
    hidden: Float[Array, "batch seq width"],
    unembed: Callable[[Array], Array],
    targets: Integer[Array, "batch seq"],
    *,
    mask: Weight | None = None,
    chunk: int = 128,
) -> Float[Array, ""]:
    batch, seq, width = hidden.shape
    count = -(-seq // chunk)
    padded = ((0, 0), (0, count * chunk - seq))
    chunks = lambda x: jnp.moveaxis(
        jnp.pad(x, padded + ((0, 0),) * (x.ndim - 2)).reshape(batch, count, chunk, *x.shape[2:]), 1, 0
    )

    def body(_, inputs):
        hidden, targets = inputs
        return None, _token_losses(unembed(hidden), targets)

    body = jax.checkpoint(body, prevent_cse=False)
    _, losses = jax.lax.scan(body, None, (chunks(hidden), chunks(targets)))
    losses = jnp.moveaxis(losses, 0, 1).reshape(batch, count * chunk)[:, :seq]
    return _mean(losses, mask)


def _token_losses(logits, targets):
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    vocab = logits.shape[-1]
    labels = jax.lax.broadcasted_iota(targets.dtype, logits.shape, logits.ndim - 1)
    chosen = jnp.sum(jnp.where(labels == targets[..., None], logits, 0), axis=-1)
    losses = jax.nn.logsumexp(logits, axis=-1) - chosen
    return jnp.where((targets >= 0) & (targets < vocab), losses, jnp.nan)


def _mean(losses, mask):
    if mask is None:
        return jnp.mean(losses)
    weight = mask.astype(losses.dtype)
    total = jnp.sum(weight)
    summed = jnp.sum(jnp.where(weight != 0, losses, 0) * weight)
    return summed / jnp.where(total == 0, 1, total)
