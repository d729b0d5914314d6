"""The public function `log_probabilities`. It imports its implementation on the first call."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Integer, PyTree, Shaped

from ..core._errors import check_flag
from ..core._frames import hide_frames
from ..losses import token_log_probabilities


@hide_frames
def log_probabilities(
    model: PyTree,
    tokens: Integer[Array | np.ndarray, "batch seq"] | Sequence[Any],
    *,
    mask: Shaped[Array | np.ndarray, "batch seq"] | Sequence[Any] | None = None,
    exact: bool = False,
    chunk: int = 128,
) -> Float[Array, "batch later"]:
    """Computes the log-probability of each token but the first, given those before it in its row,
    in nats.

    With `exact=True`, the log-probabilities of tokens that [`redcoast.generate`][] sampled with
    `exact=True` are the same numbers to the last bit, on any mesh and among any other rows. So the
    ratio of a policy to itself is exactly 1. The values are then computed as in decoding, one token
    of all rows at a time; the gradient is that of the usual forward pass.

    **Arguments:**

    - `model`: a decoder of `redcoast.models`, or any model with the same `hidden` and `unembed`,
        and for `exact` the methods that `generate` needs.
    - `tokens`: integers from 0 to `vocab - 1`, or a list of rows of one length.
    - `mask`: 1 at real tokens and 0 at padding tokens, which may be anywhere, also between the
        turns of a conversation.
    - `exact`: whether to compute the values as in decoding. Each device needs memory for all
        weights, and rows should have the same number of columns as when they were generated, or one
        with the same next power of two. Inside a `jax.jit` of your own, a sharded model needs its
        mesh as the ambient mesh (`jax.set_mesh`); `fit`, `prepare` and `plan.constrain` set it.
    - `chunk`: the maximum number of positions whose logits are in memory at a time.

    **Returns:**

    Log-probabilities in float32 or wider, and 0 at padding and at the first real token of a row.

    **Raises:**

    `TypeError` if the model is no decoder; `ValueError` if the shapes do not match, or, with
    `exact`, if the model's rotary embeddings depend on the final length of a row.

    !!! Example

        ```python
        def loss_fn(model, batch, key):
            new = rc.log_probabilities(model, batch["tokens"], mask=batch["mask"])
            answered = batch["answered"][:, 1:]
            loss = rc.losses.grpo(new, batch["old"], batch["advantages"], mask=answered)
            return loss, {"weight": jnp.sum(answered)}
        ```
    """
    from ._check_arguments import as_matrix, check_rows_to_score
    from ._exact import check_exact, is_traced, score_exactly
    from ._prompt import align_left, at_own_columns

    check_flag("exact", exact)
    rows, real = as_matrix("tokens", tokens), as_matrix("mask", mask)
    check_rows_to_score(model, rows, real)
    if exact:
        check_exact(model)
        if not is_traced((model, rows, real)):
            return score_exactly(model, rows, real)
    # Without padding between tokens: the token before each one is then in the column before it.
    ids, lengths = align_left(rows, real)
    context_mask = None
    if real is not None:
        context_mask = jnp.arange(ids.shape[1] - 1)[None] < lengths[:, None]
    hidden = model.hidden(ids[:, :-1], mask=context_mask)  # (batch, seq - 1, width)
    fast = token_log_probabilities(hidden, model.unembed, ids[:, 1:], chunk=chunk)
    if real is not None:
        fast = at_own_columns(fast, real)
    if not exact:
        return fast
    values = score_exactly(model, rows, real)
    # The difference is zero, and has the gradient of the fast pass.
    return values + (fast - jax.lax.stop_gradient(fast))
