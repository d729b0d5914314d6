"""What `generate` returns with log-probabilities."""

from typing import NamedTuple

from jaxtyping import Array, Bool, Float, Int


class Generated(NamedTuple):
    """New tokens with their log-probabilities, which [`redcoast.generate`][] returns if
    `log_probabilities` is true.

    **Fields:**

    - `tokens`: the new tokens, int32 of shape (results, `max_new_tokens`).
    - `log_probabilities`: the log-probability of each token in nats, float32 of the same shape, and
        0 at padding. It is the softmax of the model's logits, before `temperature` and all other
        options: [`redcoast.losses.token_log_probabilities`][] of the prompts and the new tokens.
    - `mask`: true at the tokens of the answer, which include the token that ends it.
    """

    tokens: Int[Array, "results new"]
    log_probabilities: Float[Array, "results new"]
    mask: Bool[Array, "results new"]
