from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Integer


def shift_right(
    labels: Integer[Array | np.ndarray, "*batch seq"], *, start: int, pad: int | None = None
) -> Any:
    """A decoder's input tokens for its labels: each token is followed by its label.

    ```python
    config = T5Config(vocab=99, width=8, layers=1, decoder_layers=1, heads=2, hidden=16)
    labels = np.array([[5, 7, 1], [6, 1, -100]])
    tokens = shift_right(labels, start=config.decoder_start)  # [[0, 5, 7], [0, 6, 1]]
    ```

    **Arguments:**

    - `labels`: the tokens that the decoder is to make, of shape (..., seq).
    - `start`: the token that it begins with, the configuration's `decoder_start`.
    - `pad`: what takes the place of labels below 0, such as the -100 by which some losses know
      padding; by default `start`.

    **Returns:**

    Tokens of the same shape and dtype: the start, and all labels but the last. An array of NumPy
    if the labels are one.

    **Raises:**

    `TypeError` if the labels are no integers; `ValueError` if `start` or `pad` is below 0 or does
    not fit their dtype, or if there is no label to shift.
    """
    if not jnp.issubdtype(labels.dtype, np.integer):
        raise TypeError(f"`labels` must be integers, but are of {labels.dtype}.")
    if labels.ndim == 0 or labels.shape[-1] == 0:
        raise ValueError(f"`labels` of shape {labels.shape} have nothing to shift.")
    pad = start if pad is None else pad
    for name, token in (("start", start), ("pad", pad)):
        if not 0 <= token <= np.iinfo(labels.dtype).max:
            raise ValueError(
                f"`{name}` is {token}, which is no token that {labels.dtype} can hold."
            )
    xp = np if isinstance(labels, np.ndarray) else jnp
    first = xp.full_like(labels[..., :1], start)
    shifted = xp.concatenate([first, labels[..., :-1]], axis=-1)
    return xp.where(shifted < 0, xp.full_like(shifted, pad), shifted)
