"""The cross-entropy of each token, of which losses and log-probabilities are made."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Integer


def token_losses(
    logits: Float[Array, "*batch vocab"], targets: Integer[Array, "*batch"]
) -> Float[Array, "*batch"]:
    """Returns the negative log-probability of each target, in float32 or wider; NaN for a target
    outside the vocabulary."""
    logits = logits.astype(np.promote_types(logits.dtype, np.float32))
    vocab, targets = logits.shape[-1], targets.astype(jnp.int32)
    # A masked sum instead of a gather: over a sharded vocabulary it communicates only one number
    # for each token.
    tokens = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    right = jnp.sum(jnp.where(tokens == targets[..., None], logits, 0), axis=-1)
    losses = jax.nn.logsumexp(logits, axis=-1) - right
    return jnp.where((targets >= 0) & (targets < vocab), losses, jnp.nan)
